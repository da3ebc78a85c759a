"""`aenv template build` and what belongs to it: what is sent, what is shown, how it ends, and that leaving ends nothing."""

import json
import os
import signal
import subprocess
import sys

import pytest
from aenv_runner import Screen, process_environment, wait_for

from agentenv.core.images import ImageConfig
from agentenv.core.model import Context


@pytest.fixture
def workshop(server):
    orchestrator = server.orchestrator
    orchestrator.images.contexts["debian"] = Context("user", "/home/user")
    orchestrator.images.configs["debian"] = ImageConfig(cmd=("bash",))
    return orchestrator.workshop


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "My Project"
    (folder / "app").mkdir(parents=True)
    (folder / "app" / "main.py").write_text("print(1)\n")
    (folder / "app" / "junk.log").write_text("x" * 100_000)
    (folder / ".dockerignore").write_text("*.log\n**/*.log\n")
    (folder / "Dockerfile").write_text("FROM debian\nARG WHO=me\nCOPY app /srv/app\nRUN make $WHO\n")
    return folder


def template(server, name):
    return next((one for one in server.orchestrator._book.templates() if name in one.aliases), None)


def test_a_folder_becomes_a_template(aenv, server, workshop, project):
    workshop.answers_to = lambda command: (0, "built it") if command.startswith("make") else (0, "")
    done = aenv("template", "build", str(project))
    assert (done.exit_code, done.stdout) == (0, "local/my-project\n"), done.stderr
    assert template(server, "my-project").kind == "built"
    lines = done.stderr.splitlines()
    assert "#1 [stage-0 1/2] COPY app /srv/app" in lines
    assert "#2 [stage-0 2/2] RUN make $WHO" in lines
    assert "#2 built it" in lines
    assert next(command for command in workshop.ran if command.argv[-1] == "make $WHO").env_vars == {"WHO": "me"}
    again = aenv("tpl", "bd", str(project / "Dockerfile"), "--name", "other:v1", "--build-arg", "WHO=you")
    assert (again.exit_code, again.stdout) == (0, "local/other:v1\n")
    assert again.stderr.splitlines().count("#1 CACHED") == 1
    assert "send the files" not in again.stderr, "the node has them"
    assert workshop.ran[-2].argv[-1] == "make $WHO" or any(c.env_vars == {"WHO": "you"} for c in workshop.ran)


def test_only_what_is_used_and_not_ignored_is_sent(aenv, server, workshop, project):
    (project / "unused").write_bytes(os.urandom(200_000))
    assert aenv("template", "build", str(project)).exit_code == 0
    sizes = [path.stat().st_size for path in server.orchestrator.builds.files._folder.iterdir()]
    assert len(sizes) == 1
    assert sizes[0] < 1000


def test_a_failing_line_is_told_with_its_output(aenv, server, workshop, project):
    workshop.answers_to = lambda command: (2, "no rule to make target") if command.startswith("make") else (0, "")
    done = aenv("template", "build", str(project))
    assert (done.exit_code, done.stdout) == (1, "")
    told = done.stderr[done.stderr.index("error: ") :].splitlines()
    shown = str(project / "Dockerfile")
    assert told[:3] == [
        f"error: {shown}:4: failed to run 'make $WHO': exit status 2",
        "  4 | RUN make $WHO",
        "no rule to make target",
    ]
    assert told[3].startswith("hint: `aenv template logs ")
    assert template(server, "my-project") is None
    workshop.answers_to = lambda command: (0, "")
    assert "#1 CACHED" in aenv("template", "build", str(project)).stderr


REFUSED = [
    ("FROM debian\nFOO bar\n", (), "Dockerfile:2: unknown instruction: FOO\n  2 | FOO bar"),
    ("FROM debian\nRUN --mount=type=secret,id=a x\n", (), "Dockerfile:2: RUN: --mount of type 'secret' is not supported"),
    ("FROM debian\nCOPY none /x\n", (), "Dockerfile:2: the context has no 'none'\n  2 | COPY none /x"),
    ("FROM debian\nCOPY app/junk.log /x\n", (), "Dockerfile:2: 'app/junk.log' is left out by the ignore file"),
    ("FROM debian\n", ("--target", "x"), "has no stage 'x'"),
    ("FROM debian\n", ("--build-arg", "A"), "KEY=VALUE"),
    ("FROM debian\n", ("--cpu", "99"), "99"),
    ("FROM debian\n", ("--name", "a b"), "a b"),
]


@pytest.mark.parametrize(("text", "options", "message"), REFUSED)
def test_what_is_wrong_is_told_before_anything_is_built(aenv, server, workshop, project, text, options, message):
    (project / "Dockerfile").write_text(text)
    done = aenv("template", "build", str(project), *options)
    assert done.exit_code in (2, 3), done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert workshop.opened == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./none", "there is no file or folder './none'"),
        ("Dockerfile", "there is no file or folder 'Dockerfile'"),
        (".", "there is no Dockerfile at Dockerfile"),
    ],
)
def test_sources_that_are_none(aenv, tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    done = aenv("template", "build", source)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_dockerfile_elsewhere(aenv, server, workshop, project, tmp_path):
    other = tmp_path / "other.Dockerfile"
    other.write_text("FROM debian\nCOPY app/main.py app/junk.log /x/\n")
    other.with_name("other.Dockerfile.dockerignore").write_text("unrelated\n")
    done = aenv("template", "build", str(project), "-f", str(other))
    assert done.exit_code == 0, done.stderr
    assert aenv("template", "build", str(other), "-f", str(other)).exit_code == 2


def test_images_and_templates_as_they_are(aenv, server, workshop):
    done = aenv("template", "build", "debian", "--cpu", "2", "--memory", "1024")
    assert (done.exit_code, done.stdout) == (0, "local/debian\n"), done.stderr
    made = template(server, "debian").builds[0]
    assert (made.machine.vcpu_count, made.machine.memory_mb, made.service) == (2, 1024, None)
    done = aenv("template", "build", "template://debian", "--name", "copy:v2")
    assert (done.exit_code, done.stdout) == (0, "local/copy:v2\n"), done.stderr
    assert aenv("template", "build", "none:latest").exit_code == 1
    assert aenv("template", "build", "debian", "--target", "x").exit_code == 2


def test_json_is_a_document_a_line(aenv, workshop, project):
    done = aenv("template", "build", str(project), "--json")
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert documents[-1]["status"] == "ready"
    assert documents[-1]["names"] == ["local/my-project"]
    assert [entry["step"] for entry in documents[:-1] if "RUN make" in entry["message"]] == ["2"]
    assert "#1" not in done.stderr


def test_no_cache_runs_everything(aenv, workshop, project):
    for options, count in (((), 1), ((), 1), (("--no-cache",), 2)):
        assert aenv("template", "build", str(project), *options).exit_code == 0
        assert sum(command.argv[-1] == "make $WHO" for command in workshop.ran) == count


def test_leaving_does_not_end_the_build(aenv, server, workshop, project):
    with workshop.hold("make $WHO"):
        left = aenv("template", "build", str(project), "--detach")
        build_id = left.stdout.strip()
        assert left.exit_code == 0
        assert f"aenv template logs {build_id}" in left.stderr
        listed = json.loads(aenv("template", "builds", "--json").stdout)
        assert [(job["buildID"], job["name"], job["status"]) for job in listed] == [(build_id, "my-project", "building")]
    for words in ((build_id,), (build_id[:8],), ("my-project",)):
        followed = aenv("template", "logs", *words)
        assert followed.exit_code == 0, followed.stderr
        assert "#2 [stage-0 2/2] RUN make $WHO" in followed.stderr
    assert "my-project" in aenv("template", "builds").stdout
    assert template(server, "my-project")
    missing = aenv("template", "logs", "none")
    assert missing.exit_code == 3


def test_ctrl_c_leaves_and_says_how_to_come_back(aenv, server, workshop, project):
    with workshop.hold("make $WHO"):
        process = subprocess.Popen(
            [sys.executable, "-m", "agentenv.cli", "template", "build", str(project)],
            env=process_environment(server.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for(lambda: any(command.argv[-1] == "make $WHO" for command in workshop.ran))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
        assert (process.returncode, out) == (130, "")
        build_id = server.orchestrator.builds.recent(1)[0].build_id
        assert f"the build goes on: `aenv template logs {build_id}` follows it" in err
    assert aenv("template", "logs", build_id).exit_code == 0
    assert template(server, "my-project")


def test_on_a_terminal_every_step_is_a_bar(server, workshop, project):
    screen = Screen(server.environment, "template", "build", str(project), columns=120)
    try:
        screen.wait_for("local/my-project")
        code, restored = screen.end()
    finally:
        screen.close()
    assert (code, restored) == (0, True)
    assert "[stage-0 2/2] RUN make $WHO" in screen.shown
    assert "━" in screen.shown or "✓" in screen.shown
