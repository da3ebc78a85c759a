"""Templates from Dockerfiles on real guests, by `aenv template build` and by the SDK: stages, owners, heredocs, failures, the cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox, Template
from e2e_node import Node, busybox

NAME = "e2e-docker"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TEXT = """# escape=\\
ARG BASE=base
FROM template://${BASE} AS build
USER root
ARG VERSION
ENV PATH=/opt/tools:$PATH
WORKDIR /work
COPY --chown=user:55 --chmod=640 src ./
ADD parts.tar.gz /parts
RUN <<EOF
set -e
mkdir /out /opt/tools
printf '#!/bin/sh\\necho tool %s\\n' "$VERSION" > /opt/tools/tool
chmod 755 /opt/tools/tool
tool > /out/said
cp -a /parts/inner.txt /out/ && chown 7:8 /out/inner.txt
ln -s inner.txt /out/link
EOF
RUN --mount=type=cache,target=/var/cache/thing --mount=type=tmpfs,target=/mem \\
    # both are gone afterwards
    echo x > /var/cache/thing/x && echo x > /mem/x
RUN ls / /var/cache && test ! -e /var/cache/thing && test ! -e /mem && ! ls -d /.aenv*

FROM template://${BASE} AS unused
RUN exit 1

FROM template://${BASE}
USER root
RUN useradd -m runner
COPY --from=build /out /srv/out
COPY --from=build --chown=runner /work/*.txt /srv/
COPY <<hello.sh <<'raw' /srv/
echo "$PATH" $UNSET
hello.sh
$PATH
raw
RUN ["/bin/sh", "-c", "echo exec $0 > /srv/exec"]
RUN <<script.py
#!/usr/bin/env python3
import os
open("/srv/python", "w").write(os.getcwd())
script.py
USER runner
WORKDIR /srv/sub
RUN LAST > /tmp/last
HEALTHCHECK CMD test -e /tmp/started
ENTRYPOINT ["/bin/sh", "-c"]
CMD ["id -un > /tmp/started; exec sleep 100000"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "src" / "a.txt").write_text("a")
    (folder / "src" / "deep" / "b.txt").write_text("b")
    (folder / "src" / "junk.log").write_text("never sent")
    (folder / ".dockerignore").write_text("**/*.log\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "inner.txt").write_text("unpacked")
    shutil.make_archive(str(folder / "parts"), "gztar", inner)
    return folder


@pytest.fixture
def forgets(node: Node) -> Iterator[None]:
    yield
    for name in (NAME, f"{NAME}-scratch", f"{NAME}-sdk"):
        node.aenv("template", "delete", name, "--yes", check=False)


def build(node: Node, folder: Path, last: str, *more: str, check: bool = True):  # type: ignore[no-untyped-def]
    (folder / "Dockerfile").write_text(TEXT.replace("LAST", last))
    return node.aenv("template", "build", str(folder), "--name", NAME, "--build-arg", "VERSION=7", *more, check=check, timeout=600)


def steps(stderr: str) -> tuple[int, int]:
    """How many steps were shown, and how many of them were cached."""
    lines = stderr.splitlines()
    return sum("] " in line and line.startswith("#") and "/" in line.split("]")[0] for line in lines), sum(
        line.endswith(" CACHED") for line in lines
    )


def test_stages_a_failing_line_and_the_cache(node: Node, project: Path, forgets: None):
    failed = build(node, project, "ls /missing", check=False)
    assert (failed.returncode, failed.stdout) == (1, ""), failed.stderr
    told = failed.stderr[failed.stderr.index("error: ") :].splitlines()
    line = next(n for n, text in enumerate(TEXT.splitlines(), start=1) if "LAST" in text)
    assert told[0] == f"error: {project / 'Dockerfile'}:{line}: failed to run 'ls /missing > /tmp/last': exit status 2"
    assert told[1] == f"  {line} | RUN ls /missing > /tmp/last"
    assert "No such file" in told[2]
    assert "exit 1" not in failed.stderr, "a stage that nobody needs is not built"

    done = build(node, project, "id -un")
    assert done.stdout == f"local/{NAME}\n", done.stderr
    shown, cached = steps(done.stderr)
    assert shown - cached == 1, f"the last step alone runs: {done.stderr}"

    made = Sandbox.create(NAME, timeout=600, **node.options)
    try:
        told = made.commands.run(
            "id -un; pwd; cat /tmp/started /tmp/last /srv/out/said /srv/exec; "
            "cat /srv/python; echo; cat /srv/hello.sh /srv/raw; readlink /srv/out/link; cat /srv/out/link; echo; "
            "stat -c '%U %g %a %n' /srv/a.txt /srv/hello.sh /srv/sub; stat -c '%u %g %n' /srv/out/inner.txt; ls /srv"
        ).stdout.splitlines()
    finally:
        made.kill()
    assert told == [
        *("runner", "/srv/sub", "runner", "runner", "tool 7", "exec /bin/sh", "/home/user"),
        f'echo "{PATH}" ',
        *("$PATH", "inner.txt", "unpacked"),
        *("runner 1001 640 /srv/a.txt", "root 0 644 /srv/hello.sh", "root 0 755 /srv/sub", "7 8 /srv/out/inner.txt"),
        *("a.txt", "exec", "hello.sh", "out", "python", "raw", "sub"),
    ]


def test_scratch_with_one_program(node: Node, project: Path, forgets: None):
    shutil.copy(busybox(), project / "busybox")
    (project / "Dockerfile").write_text(
        "FROM scratch AS tool\nCOPY busybox /bin/busybox\nFROM scratch\nCOPY --from=tool /bin/* /app/\n"
        'WORKDIR /data\nENTRYPOINT ["/app/busybox", "sleep"]\nCMD ["1000000"]\n'
    )
    done = node.aenv("template", "build", str(project), "--name", f"{NAME}-scratch", "--no-start", timeout=600)
    assert done.stdout == f"local/{NAME}-scratch\n"
    made = Sandbox.create(f"{NAME}-scratch", timeout=600, **node.options)
    try:
        assert {entry.name for entry in made.files.list("/app")} == {"busybox"}
        assert made.files.exists("/data")
        assert made.files.read("/app/busybox", format="bytes") == bytearray(busybox().read_bytes())
    finally:
        made.kill()


def test_the_sdk_reads_dockerfiles_itself(node: Node, debian: str, project: Path, forgets: None):
    text = f"FROM {debian}\nENV A='x y'\nCOPY src/a.txt /srv/\nWORKDIR /srv\nRUN <<EOF\ncat a.txt > b\necho $A >> b\nEOF\nUSER user\n"
    template = Template(file_context_path=str(project)).from_dockerfile(text)
    Template.build(template, f"{NAME}-sdk", **node.options)
    made = Sandbox.create(f"{NAME}-sdk", timeout=600, **node.options)
    try:
        assert made.commands.run("pwd; id -un; cat b; echo $A").stdout.split() == ["/srv", "user", "ax", "y", "x", "y"]
    finally:
        made.kill()
