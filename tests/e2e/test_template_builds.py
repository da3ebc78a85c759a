"""A template built on real guests by the official client: steps, a failure, the cache, the program, and what sandboxes get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2b import Sandbox, Template
from e2b.exceptions import BuildException

NAME = "e2e-built"


def recipe(context: Path, last: str):  # type: ignore[no-untyped-def]
    return (
        Template(file_context_path=str(context))
        .from_template("base")
        .copy("app", "/srv/app/", user="root", mode=0o755)
        .set_user("runner")
        .set_workdir("/srv/work")
        .set_envs({"GREETING": "hello world"})
        .set_envs({"TWICE": "$GREETING, ${GREETING}", "SHELL_PATH": "$PATH"})
        .run_cmd("echo $GREETING > greeting; readlink /srv/app/link; for n in 1 2 3; do echo line $n; echo error $n >&2; done")
        .run_cmd(last)
        .set_start_cmd("echo $TWICE > /tmp/started; exec sleep 100000", "test -s /tmp/started")
    )


def test_a_build_that_fails_at_its_last_step_and_is_mended(node, tmp_path: Path):
    app = tmp_path / "app"
    (app / "sub").mkdir(parents=True)
    (app / "run.sh").write_text("#!/bin/sh\necho from the archive\n")
    (app / "sub" / "ünïcode 'name").write_bytes(os.urandom(200_000))
    (app / "link").symlink_to("run.sh")
    said: list[str] = []

    def build(last: str):  # type: ignore[no-untyped-def]
        said.clear()
        return Template.build(recipe(tmp_path, last), f"{NAME}:v1", on_build_logs=lambda entry: said.append(entry.message), **node.options)

    with pytest.raises(BuildException, match=r"failed to run command 'ls /missing; exit 7': exit status 7\n.*No such file") as failure:
        build("ls /missing; exit 7")
    here = [entry.lineno for entry in failure.traceback if entry.path.name == Path(__file__).name]
    assert any(".run_cmd(last)" in Path(__file__).read_text().splitlines()[line] for line in here)
    assert Template.exists(f"{NAME}:v1", **node.options) is False
    assert [line for line in said if line.startswith("[stdout] line")] == ["[stdout] line 1", "[stdout] line 2", "[stdout] line 3"]
    assert [line for line in said if line.startswith("[stderr] error")] == ["[stderr] error 1", "[stderr] error 2", "[stderr] error 3"]
    assert "[stdout] run.sh" in said
    try:
        info = build("id -un > who")
        assert [line.partition("CACHED ")[2].split()[0] for line in said if "CACHED" in line] == [
            "COPY",
            "USER",
            "WORKDIR",
            "ENV",
            "ENV",
            "RUN",
        ]
        assert [line for line in said if line.startswith("[7/")] == ["[7/7] RUN id -un > who"]
        made = Sandbox.create(f"{NAME}:v1", timeout=600, **node.options)
        try:
            assert made.get_info().template_id == info.template_id
            told = made.commands.run("pwd; id -un; cat who greeting /tmp/started; echo $TWICE; echo $SHELL_PATH; /srv/app/run.sh").stdout
            assert told.splitlines() == [
                "/srv/work",
                "runner",
                "runner",
                "hello world",
                "hello world, hello world",
                "hello world, hello world",
                "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games",
                "from the archive",
            ]
            assert made.commands.run("pgrep -u runner -x sleep").exit_code == 0
            shown = made.commands.run("stat -c '%U %G %a %n' /srv/work /srv/app /srv/app/run.sh; stat -c %N /srv/app/link").stdout
            assert "runner runner 755 /srv/work" in shown
            assert "root root 755 /srv/app/run.sh" in shown
            assert "'/srv/app/link' -> 'run.sh'" in shown
            copied = made.files.read("/srv/app/sub/ünïcode 'name", format="bytes")
            assert bytes(copied) == (app / "sub" / "ünïcode 'name").read_bytes()
        finally:
            made.kill()
        assert made.sandbox_id not in [one.sandbox_id for one in Sandbox.list(**node.options).next_items()]
    finally:
        node.aenv("template", "delete", NAME, "--yes", check=False)
    assert Template.exists(f"{NAME}:v1", **node.options) is False


def test_a_path_of_the_templates_own_holds_wherever_commands_run(node):
    """F01, F19: in later steps, in the start command, and in the login shells that sandboxes run commands in."""
    name = "e2e-path"
    script = "printf '#!/bin/sh\\necho mine\\n' > /opt/own/bin/own && chmod 755 /opt/own/bin/own"
    made = (
        Template()
        .from_template("base")
        .run_cmd(f"mkdir -p /opt/own/bin && {script}", user="root")
        .set_envs({"PATH": "/opt/own/bin:$PATH"})
        .run_cmd("own > step")
        .set_start_cmd("own > started; exec sleep 100000", "test -s started")
    )
    try:
        Template.build(made, name, **node.options)
        box = Sandbox.create(name, **node.options)
        told = box.commands.run("cat step started; own; command -v own python3 sudo").stdout.split()
        assert told == ["mine", "mine", "mine", "/opt/own/bin/own", "/usr/bin/python3", "/usr/bin/sudo"]
        box.kill()
    finally:
        node.aenv("template", "delete", "--yes", name, check=False)
