"""Builds from Dockerfiles over a workshop without VMs: stages, the cache, what runs with what, and which line a failure names."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

import pytest
from build_rig import HASH, Rig, upload

from agentenv.core.builds import BuildPlan, DockerfileSource, Registry
from agentenv.core.errors import InvalidInput, NotFound
from agentenv.core.images import ImageConfig
from agentenv.core.model import Context, Service
from agentenv.guest.commands import Command


@pytest.fixture(autouse=True)
def images(rig: Rig) -> None:
    rig.images.contexts = {"debian": Context(), "golang": Context()}
    rig.images.configs = {
        "debian": ImageConfig(env=("PATH=/usr/bin:/bin",), cmd=("bash",)),
        "golang": ImageConfig(user="77", working_dir="/go"),
    }


async def build(rig: Rig, text: str, files: dict[int, str] | None = None, target: str = "", starts: bool = True, **plan: object):
    arguments = plan.pop("arguments", {})
    source = DockerfileSource(text, "Dockerfile", arguments, target, files or {}, starts)
    return await rig.build(dockerfile=source, **plan)


def programs(rig: Rig) -> dict[str, Command]:
    """What ran that is no script of the builder, by its line or words."""
    found = (command for command in rig.workshop.ran if command.argv[3:4] != ("sh",) or "-l -c" in command.argv[2])
    return {
        command.argv[2] if command.argv[:2] == ("/bin/sh", "-c") and len(command.argv) == 3 else " ".join(command.argv): command
        for command in found
    }


async def test_from_a_dockerfile_to_a_template(rig: Rig):
    await upload(rig, "app/main.py")
    text = """FROM debian
ARG VERSION=1
ENV A=1 PATH=/opt/bin:$PATH
WORKDIR /srv/app
COPY --chown=5:6 --chmod=750 app ./
RUN make $VERSION
USER root:root
RUN ["check", "it's"]
LABEL a=b
HEALTHCHECK CMD is-ready
CMD ["serve", "--all"]
"""
    job = await build(rig, text, {5: HASH}, arguments={"VERSION": "2"})
    assert (job.status, job.failure) == ("ready", None), await rig.said(job)
    (made,) = rig.template().builds
    env = {"PATH": "/opt/bin:/usr/bin:/bin", "A": "1"}
    assert made.context == Context(
        "root:root",
        "/srv/app",
        env,
        Service("exec serve --all", "is-ready", "root:root", "/srv/app", env, stays=True),
    )
    assert made.labels == {"a": "b"}
    ran = programs(rig)
    assert (ran["make $VERSION"].user, ran["make $VERSION"].workdir) == ("root", "/srv/app")
    assert ran["make $VERSION"].env_vars == {**env, "VERSION": "2"}
    assert ran["check it's"].argv == ("check", "it's")
    assert ran["check it's"].user == "root:root"
    with tarfile.open(fileobj=io.BytesIO(rig.workshop.uploaded[0])) as copied:
        assert [(m.name, m.uid, m.gid, m.mode) for m in copied.getmembers()] == [("main.py", 5, 6, 0o750)]
    said = await rig.said(job)
    assert "[stage-0 3/6] COPY --chown=5:6 --chmod=750 app ./" in said


STAGES = """FROM golang AS build
RUN make
FROM debian AS unused
RUN never
FROM debian
COPY --from=build /out/app /app
COPY --from=debian /etc/*.conf /none* /etc/
RUN last
"""


async def test_stages(rig: Rig):
    rig.workshop.stage_files = {"out/app": b"binary", "etc/a.conf": b"a"}
    job = await build(rig, STAGES)
    assert job.status == "ready", job.failure
    assert rig.workshop.packed == [(("image golang", "make"), ("out/app",)), (("image debian",), ("etc/*.conf", "none*"))]
    assert "never" not in programs(rig)
    assert len(rig.workshop.opened) == 5  # two stages, two that files are read from, and the capture
    assert rig.disk()[0] == "image debian"
    assert [what for what in rig.disk() if what in ("make", "last")] == ["last"]
    archives = []
    for archive in rig.workshop.uploaded:
        with tarfile.open(fileobj=io.BytesIO(archive)) as copied:
            archives.append([(m.name, m.uid, m.gid, f"{m.mode:o}") for m in copied.getmembers()])
    assert archives == [[("app", 7, 8, "640")], [("a.conf", 7, 8, "640")]]
    assert programs(rig)["make"].user == "77"
    assert programs(rig)["make"].workdir == "/go"


async def test_a_rebuild_runs_what_has_changed_and_no_more(rig: Rig):
    rig.workshop.stage_files = {"out/app": b"binary"}
    await build(rig, STAGES)
    for changed, runs in (("last", {"other"}), ("make", {"other", "last"})):
        rig.workshop.ran.clear()
        rig.workshop.opened.clear()
        job = await build(rig, STAGES.replace(changed, "other"))
        assert set(programs(rig)) & {"make", "last", "other"} == runs
        assert job.status == "ready"
    rig.workshop.opened.clear()
    job = await build(rig, STAGES)
    assert len(rig.workshop.opened) == 1  # for the capture alone
    cached = [line for line in await rig.said(job) if "CACHED" in line]
    assert len(cached) == 4
    assert (await build(rig, STAGES, force=True)).status == "ready"
    assert "make" in programs(rig)


@pytest.mark.parametrize(
    ("before", "after", "runs_again"),
    [
        ("ARG A\nRUN x", None, {"arguments": {"A": "2"}}),
        ("ARG A\nRUN x", None, {"arguments": {}}),
        ("RUN x\nARG A", None, None),
        ("RUN x", "ARG A=1\nRUN x", {}),
        ("RUN x", "ENV A=1\nRUN x", {}),
        ("RUN x", "USER 1\nRUN x", {}),
        ("RUN x", 'SHELL ["/bin/ash", "-c"]\nRUN x', {}),
        ("RUN x", "LABEL a=1\nEXPOSE 1\nRUN   x # same", {}),
        ("RUN x", "# a comment\n\nRUN x\nCMD y", None),
        ("ARG http_proxy\nRUN x", None, {"arguments": {"A": "1", "http_proxy": "p"}}),
        ("RUN x", None, None),
    ],
)
async def test_what_makes_a_run_again(rig: Rig, before: str, after: str | None, runs_again: dict | None):
    await build(rig, f"FROM debian\n{before}", arguments={"A": "1"})
    rig.workshop.ran.clear()
    more = {"arguments": {"A": "2", "HTTP_PROXY": "p"}} if runs_again is None else runs_again
    assert (await build(rig, f"FROM debian\n{after or before}", **more)).status == "ready"
    ran = any(command.argv[-1].startswith("x") for command in rig.workshop.ran)
    assert ran is (runs_again is not None)


async def test_a_failing_line_is_named_shown_and_leaves_those_before_it(rig: Rig):
    text = "FROM debian\nRUN good\n\nRUN fails && \\\n  more\nRUN never\n"
    rig.workshop.answers_to = lambda command: (7, "why\nbecause") if command.startswith("fails") else (0, "")
    job = await build(rig, text)
    assert (job.status, job.failure.step) == ("error", "2")
    assert job.failure.message.splitlines() == [
        "Dockerfile:4: failed to run 'fails &&   more': exit status 7",
        "  4 | RUN fails && \\",
        "why",
        "because",
    ]
    rig.workshop.ran.clear()
    rig.workshop.answers_to = lambda command: (0, "")
    assert (await build(rig, text.replace("fails", "works"))).status == "ready"
    assert "good" not in programs(rig)


FAILURES = {
    "FROM nothing": "Dockerfile:1: image 'nothing' not found\n  1 | FROM nothing",
    "FROM template://none": "Dockerfile:1: ",
    "FROM debian\nUSER ghost\nRUN x": "Dockerfile:3: failed to run 'x': unauthenticated: invalid username: 'ghost'",
    "FROM debian\nCOPY --from=golang /none /x": "Dockerfile:2: the stage has no 'none'",
    "FROM debian\nCOPY --chown=ghost --from=golang /out/app /x": "Dockerfile:2: 'ghost' is not known in the template",
    "FROM debian\nENV A=${HOME:?must}": "Dockerfile:2: ENV: failed to process",
    "FROM debian\nEXPOSE $PATH": "Dockerfile:2: EXPOSE: '/usr/bin:/bin' is not a port",
}


@pytest.mark.parametrize("text", FAILURES)
async def test_failures_name_their_line(rig: Rig, text: str):
    rig.workshop.stage_files = {"out/app": b"x"}
    job = await build(rig, text)
    assert job.status == "error"
    assert FAILURES[text] in job.failure.message
    rig.assert_rests()


async def test_what_is_refused_before_it_begins(rig: Rig):
    job = await rig.builds.request("mine", ())
    source = DockerfileSource("FROM debian\nCOPY a /a")
    plan = BuildPlan(dockerfile=source)
    for wrong, message in (
        (plan, "Dockerfile:2: `files` does not name an archive for this line\n  2 | COPY a /a"),
        (replace(plan, from_image="x"), "do not go with it"),
        (replace(plan, registry=Registry("registry", {})), "fromImageRegistry"),
        (BuildPlan(dockerfile=DockerfileSource("FRM x")), "Dockerfile:1: unknown instruction: FRM"),
        (BuildPlan(dockerfile=DockerfileSource("FROM x\n" + "RUN a\n" * 1001)), "more than 1000"),
        (BuildPlan(dockerfile=DockerfileSource("FROM x", target="y")), "no stage 'y'"),
    ):
        with pytest.raises(InvalidInput, match="(?s)" + message.replace("|", "\\|")):
            await rig.builds.start("mine", job.build_id, wrong)
    assert rig.builds.job("mine", job.build_id).status == "waiting"


async def test_files_that_were_named_but_not_uploaded(rig: Rig):
    job = await build(rig, "FROM debian\nCOPY a /a", {2: "0" * 64})
    assert "Dockerfile:2: the files of this step (0000000000000000) were not uploaded" in job.failure.message


# --- what it starts from


async def test_a_template_is_a_base_with_its_user_and_folder(rig: Rig):
    assert (await build(rig, "FROM template://base\nRUN x\nUSER root\nRUN y")).status == "ready"
    ran = programs(rig)
    assert [(ran[name].user, ran[name].workdir) for name in "xy"] == [("user", "/home/user"), ("root", "/home/user")]
    assert [cold for *_, cold in rig.workshop.opened] == [False, True]


async def test_nothing_is_a_base_too(rig: Rig):
    rig.workshop.stage_files = {"app": b"x"}
    job = await build(rig, 'FROM golang AS b\nFROM scratch\nCOPY --from=b /app /\nENTRYPOINT ["/app"]', ready_command="ok")
    assert job.status == "ready"
    made = rig.template().builds[0]
    assert made.context == Context("root", "/", {}, Service("exec /app", "ok", "root", "/", {}, stays=True))


@pytest.mark.parametrize(
    ("lines", "config", "start"),
    [
        ("", ImageConfig(cmd=("bash",)), None),
        ("", ImageConfig(entrypoint=("serve",), cmd=("a",)), None),
        ('CMD ["b"]', ImageConfig(entrypoint=("serve",), cmd=("a",)), "exec serve b"),
        ('ENTRYPOINT ["own"]', ImageConfig(entrypoint=("serve",), cmd=("a",)), "exec own"),
        ('ENTRYPOINT ["own"]\nCMD ["b"]', ImageConfig(entrypoint=("serve",), cmd=("a",)), "exec own b"),
        ('ENTRYPOINT []\nCMD ["b"]', ImageConfig(entrypoint=("serve",)), "exec b"),
        ("CMD []", ImageConfig(), None),
    ],
)
async def test_what_is_started(rig: Rig, lines: str, config: ImageConfig, start: str | None):
    rig.images.configs["debian"] = config
    assert (await build(rig, f"FROM debian\n{lines}")).status == "ready"
    service = rig.template().builds[0].service
    assert (service.start if service else None) == start
    assert (await build(rig, f"FROM debian\n{lines}", starts=False)).status == "ready"
    assert rig.template().builds[0].service is None
    assert (await build(rig, f"FROM debian\n{lines}", start_command="mine")).status == "ready"
    assert rig.template().builds[0].service.start == "mine"


async def test_the_shell_of_the_image_holds(rig: Rig):
    rig.images.configs["debian"] = ImageConfig(shell=("/bin/ash", "-ec"))
    assert (await build(rig, "FROM debian\nRUN x")).status == "ready"
    assert programs(rig)["/bin/ash -ec x"].argv == ("/bin/ash", "-ec", "x")


async def test_triggers_of_the_image_come_first(rig: Rig):
    rig.images.configs["debian"] = ImageConfig(on_build=("ENV A=1", "WORKDIR /w", "RUN make $A", "CMD serve"))
    job = await build(rig, "FROM golang AS b\nFROM debian\nRUN x\nFROM b")
    assert job.status == "ready"
    assert "make $A" not in programs(rig), "a stage that nobody needs has no triggers"
    job = await build(rig, "FROM debian\nRUN x\n")
    assert job.status == "ready", job.failure
    ran = list(programs(rig))
    assert ran.index("make $A") < ran.index("x")
    assert programs(rig)["make $A"].workdir == "/w"
    assert rig.template().builds[0].service.start == "exec /bin/sh -c serve"
    assert any("ONBUILD of the image: ENV A=1; WORKDIR /w" in line for line in await rig.said(job))


async def test_triggers_that_need_files_say_which(rig: Rig):
    rig.images.configs["debian"] = ImageConfig(on_build=("COPY . /app", "RUN make"))
    job = await build(rig, "FROM golang AS b\nFROM debian\nRUN x")
    assert job.failure.message.startswith("Dockerfile:2: ONBUILD of the image copies files of the context, which were not sent")
    assert job.failure.on_build == {"2": ["COPY . /app", "RUN make"]}
    await upload(rig, "a")
    job = await build(rig, "FROM golang AS b\nFROM debian\nRUN x", {2: HASH})
    assert job.status == "ready", job.failure
    assert "files /app 0:0" in rig.disk()


async def test_triggers_that_are_none_or_name_other_stages(rig: Rig):
    for held, message in (("FROM x", "not allowed in ONBUILD"), ("COPY --from=b /a /b", "cannot name"), ("WHAT", "not one instruction")):
        rig.images.configs["debian"] = ImageConfig(on_build=(held,))
        job = await build(rig, "FROM debian\nRUN x")
        assert message in job.failure.message
        assert job.failure.message.startswith("Dockerfile:1: ")


async def test_images_are_asked_for_with_their_registrys_account(rig: Rig):
    rig.images.contexts |= {"one.test/a": Context(), "two.test/b": Context()}
    rig.workshop.stage_files = {"x": b"x"}
    accounts = {name: Registry("registry", {"username": name, "password": "secret"}) for name in ("one.test", "docker.io", "other.test")}
    source = DockerfileSource("FROM one.test/a\nCOPY --from=two.test/b /x /x\nCOPY --from=debian /x /y\n", accounts=accounts)
    job = await rig.build(dockerfile=source)
    assert job.status == "ready", job.failure
    asked = {reference: account and account.settings["username"] for reference, account in rig.images.asked}
    assert asked == {"one.test/a": "one.test", "two.test/b": None, "debian": "docker.io"}
    assert "secret" not in repr(source)


async def test_a_health_check_is_no_ready_command_of_nothing(rig: Rig):
    began_ms = rig.clock.now_ms()
    rig.workshop.answers_to = lambda command: (1, "") if command == "never" else (0, "")
    assert (await build(rig, "FROM debian\nHEALTHCHECK CMD never")).status == "ready"
    assert rig.clock.now_ms() - began_ms < 600_000


# --- RUN


async def test_a_script_is_put_and_run(rig: Rig):
    assert (await build(rig, "FROM debian\nRUN <<run.py\n#!/usr/bin/env python3\nprint(1)\nrun.py\n")).status == "ready"
    with tarfile.open(fileobj=io.BytesIO(rig.workshop.uploaded[0])) as made:
        (script,) = made.getmembers()
        content = made.extractfile(script).read()
    assert (script.name, script.mode, content) == ("run.py", 0o755, b"#!/usr/bin/env python3\nprint(1)\n")
    assert [what for what in rig.disk() if "shm" in what] == ["files /dev/shm 0:0", "/dev/shm/run.py"]


# --- COPY


def archive(**files: bytes | None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            else:
                info.size, info.uid = len(content), 9
            made.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


COPIES = [
    ("COPY a /x", ("/", ["x"])),
    ("COPY a /x/", ("/x", ["a"])),
    ("COPY a /tmp", ("/tmp", ["a"])),
    ("COPY a b /x/", ("/x", ["a", "b"])),
    ("COPY [ab] /x", ("/x", ["a", "b"])),
    ("COPY d /x", ("/x", [".", "f", "s", "s/g"])),
    ("COPY d/* /x", ("/x", ["f", ".", "g"])),
    ("COPY . /x", ("/x", ["a", "b", "d", "d/f", "d/s", "d/s/g", "t.tgz"])),
    ("COPY d a /x/", ("/x", [".", "f", "s", "s/g", "a"])),
    ("COPY d d/s /x/", ("/x", [".", "f", "s", "s/g", ".", "g"])),
    ("COPY --exclude=s d /x", ("/x", [".", "f"])),
    ("COPY --exclude=*.tgz . /x", ("/x", ["a", "b", "d", "d/f", "d/s", "d/s/g"])),
    ("COPY --exclude=a [ab] /x/", ("/x", ["b"])),
    ("COPY --parents d/s/g /x", ("/x", ["d", "d/s", "d/s/g"])),
    ("COPY --parents d/./s/g a /x/", ("/x", ["s", "s/g", "a"])),
    ("COPY --parents d/**/[fg] /x", ("/x", ["d", "d/f", "d/s", "d/s/g"])),
    ("COPY --parents --exclude=d/f d /x", ("/x", ["d", "d/s", "d/s/g"])),
    ("COPY --link a /tmp", ("/", ["tmp"])),
    ("COPY none* a /x/", ("/x", ["a"])),
    ("COPY none* /x/", None),
    ("COPY t.tgz /x", ("/", ["x"])),
    ("ADD t.tgz /x", ("/x", ["inner", "inner/file"])),
    ("ADD t.tgz a /x/", ("/x", ["a", "inner", "inner/file"])),
    ("ADD --unpack=false t.tgz /x/", ("/x", ["t.tgz"])),
    ("COPY <<in.txt a /x/\nhello\nin.txt", ("/x", ["a", "in.txt"])),
    ("COPY <<in.txt /x\nhello\nin.txt", ("/", ["x"])),
]


@pytest.mark.parametrize(("line", "expected"), COPIES, ids=[case[0] for case in COPIES])
async def test_where_files_go(rig: Rig, line: str, expected: tuple[str, list[str]] | None):
    inner = archive(inner=None, inner__file=b"i")
    content = archive(a=b"a", b=b"b", d=None, d__f=b"f", d__s=None, d__s__g=b"g", **{"t.tgz": inner})

    async def chunks():
        yield content

    await rig.builds.files.receive(HASH, rig.builds.files.ticket(HASH), None, chunks())
    job = await build(rig, f"FROM debian\n{line}", {2: HASH})
    assert job.status == "ready", job.failure
    if expected is None:
        assert rig.workshop.uploaded == []
        return
    with tarfile.open(fileobj=io.BytesIO(rig.workshop.uploaded[0])) as copied:
        members = copied.getmembers()
    assert [member.name for member in members] == expected[1]
    assert {member.uid for member in members} == {0}
    apart = " apart" if "--link" in line else ""
    assert [what for what in rig.disk() if what.startswith("files")] == [f"files {expected[0]} 0:0{apart}"]


async def test_what_a_copy_cannot_find(rig: Rig):
    await upload(rig, "a")
    for line, message in (("COPY b /x", "what was uploaded has no 'b'"), ("ADD t.tar.zst /x", "no 't.tar.zst'")):
        job = await build(rig, f"FROM debian\n{line}", {2: HASH})
        assert message in job.failure.message


async def test_a_template_that_is_gone(rig: Rig):
    with pytest.raises(NotFound):
        rig.workshop.base("none")
    job = await build(rig, "FROM template://none:v1")
    assert (job.status, job.failure.step) == ("error", "base")
