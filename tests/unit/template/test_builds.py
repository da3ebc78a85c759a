"""Builds over a workshop without VMs: what is requested, carried out, cached, said, and how each failure ends."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest
from build_rig import HASH, Rig, run, upload

from agentenv.core.builds import BuildPlan, MachineSize, Step
from agentenv.core.errors import AgentEnvError, Conflict, InvalidInput, LimitReached, NotFound, StorageFull, Unavailable
from agentenv.core.model import Context, Machine, Service
from agentenv.template import build_log, builds

# --- requests


async def test_a_new_name_gets_an_id_that_it_keeps(rig: Rig):
    first = await rig.builds.request("mine", ())
    second = await rig.builds.request("MINE:v1", ("stable", "v1", "mine:v2"), MachineSize(2, 1024))
    assert first.template_id == second.template_id
    assert first.build_id != second.build_id
    assert (first.tags, second.tags) == (("default",), ("v1", "stable", "v2"))
    assert (await rig.builds.request("other", ())).template_id != first.template_id
    assert (first.status, await rig.builds.entries(first)) == ("waiting", [])


@pytest.mark.parametrize(
    ("name", "tags", "sizes"),
    [
        ("", (), (None, None)),
        ("a b", (), (None, None)),
        ("theirs/mine", (), (None, None)),
        ("base", (), (None, None)),
        ("mine", ("a b",), (None, None)),
        ("mine", ("other:v1",), (None, None)),
        ("mine", tuple(f"t{n}" for n in range(101)), (None, None)),
        ("mine", (), (0, None)),
        ("mine", (), (33, None)),
        ("mine", (), (None, 127)),
        ("mine", (), (None, 1 << 20)),
        ("mine", (), (None, None, 65537)),
    ],
)
async def test_requests_that_are_refused(rig: Rig, name: str, tags: tuple[str, ...], sizes: tuple[int | None, ...]):
    with pytest.raises(InvalidInput):
        await rig.builds.request(name, tags, MachineSize(*sizes))
    assert rig.book.builds.all() == []


async def test_unfinished_builds_are_bounded_and_those_never_started_end(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builds, "UNFINISHED_MAX", 2)
    first = await rig.builds.request("a", ())
    await rig.builds.request("b", ())
    with pytest.raises(LimitReached):
        await rig.builds.request("c", ())
    rig.clock.advance_ms(24 * 3_600_000 + 1)
    await rig.builds.request("c", ())
    ended = rig.builds.job("a", first.build_id)
    assert (ended.status, "not started" in ended.failure.message) == ("error", True)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (BuildPlan(), InvalidInput),
        (BuildPlan(from_image="x", from_template="base"), InvalidInput),
        (BuildPlan(from_template="nothing"), NotFound),
        (BuildPlan(from_template="base:nothing"), NotFound),
        (BuildPlan(from_template="base", steps=(run("x"),) * 1001), InvalidInput),
        (BuildPlan(from_template="base", steps=(Step("ADD", ("x",)),)), InvalidInput),
    ],
)
async def test_plans_that_are_refused_leave_the_build_waiting(rig: Rig, plan: BuildPlan, error: type[AgentEnvError]):
    job = await rig.builds.request("mine", ())
    with pytest.raises(error):
        await rig.builds.start("mine", job.build_id, plan)
    assert rig.builds.job("mine", job.build_id).status == "waiting"


async def test_a_build_starts_once_and_only_under_its_template(rig: Rig):
    job = await rig.begin(run("x"))
    with pytest.raises(Conflict):
        await rig.builds.start("mine", job.build_id, BuildPlan(from_template="base"))
    for reference, build_id in (("other", job.build_id), ("mine", "nothing")):
        with pytest.raises(NotFound):
            rig.builds.job(reference, build_id)
    await rig.finish()


async def test_of_two_starts_at_once_one_is_refused(rig: Rig):
    job = await rig.builds.request("mine", ())
    plan = BuildPlan(from_template="base")
    outcomes = await asyncio.gather(*(rig.builds.start("mine", job.build_id, plan) for _ in range(3)), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["BuildJob", "Conflict", "Conflict"]
    await rig.finish()


async def test_a_start_that_cannot_be_recorded_or_logged_can_be_repeated(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    job = await rig.builds.request("mine", ())
    plan = BuildPlan(from_template="base")

    async def full(_job: object) -> None:
        raise StorageFull("no room")

    def unwritable(*_: object) -> None:
        raise StorageFull("no room")

    for owner, name, fails in ((rig.book.builds, "put", full), (builds, "BuildLog", unwritable)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with pytest.raises(StorageFull):
                await rig.builds.start("mine", job.build_id, plan)
    assert (await rig.builds.start("mine", job.build_id, plan)).status == "building"
    await rig.finish()


# --- what a build does


async def test_from_a_template_to_a_template(rig: Rig):
    await upload(rig, "app/a.txt")
    job = await rig.build(
        run("one"),
        Step("ENV", ("A", "1", "B", "$A-${C:-c}-$PATH")),
        Step("WORKDIR", ("sub/$A",)),
        Step("USER", ("runner",)),
        Step("COPY", ("app", "/srv/", "root", "0700"), HASH),
        run("two", "root"),
        start_command="serve",
        ready_command="is ready",
        tags=("v1", "stable"),
    )
    assert (job.status, job.failure) == ("ready", None), await rig.said(job)
    template, (build,) = rig.template(), rig.template().builds
    assert (template.template_id, template.kind, [tag.tag for tag in template.tags]) == (job.template_id, "built", ["stable", "v1"])
    assert build.build_id == job.build_id
    assert (build.user, build.workdir, build.env_vars) == ("runner", "/home/user/sub/1", {"A": "1", "B": "-c-/usr/bin:/bin"})
    assert build.service == Service("serve", "is ready", "runner", "/home/user/sub/1", build.env_vars, stays=True)
    assert [what for what in rig.disk() if what in ("one", "two", "serve", "is ready")] == ["one", "two", "serve", "is ready"]
    ran = {command.argv[-1]: command for command in rig.workshop.ran}
    assert (ran["two"].user, ran["two"].workdir, ran["two"].env_vars) == ("root", "/home/user/sub/1", build.env_vars)
    assert (ran["one"].user, ran["one"].workdir, ran["one"].env_vars) == ("user", "/home/user", {})
    assert (ran["serve"].user, ran["serve"].workdir) == ("runner", "/home/user/sub/1")
    with tarfile.open(fileobj=io.BytesIO(rig.workshop.uploaded[0])) as copied:
        assert [(m.name, m.uid, m.gid, m.mode) for m in copied.getmembers()] == [("a.txt", 0, 0, 0o700)]


async def test_the_machine_is_the_one_asked_for_else_the_bases(rig: Rig):
    await rig.build(run("x"))
    base = Machine(1, 512, 8192)
    assert [(machine, cold) for _, machine, cold in rig.workshop.opened] == [(base, False), (base, True)]
    rig.workshop.opened.clear()
    await rig.build(run("x"), vcpu_count=2, memory_mb=1024)
    large = Machine(2, 1024, 8192)
    assert [(machine, cold) for _, machine, cold in rig.workshop.opened] == [(large, True), (large, True)]
    assert rig.template().builds[0].machine == large


async def test_a_larger_disk_is_another_disk_from_the_first_step_on(rig: Rig):
    for disk_mb in (None, 16384, 32768, 16384):
        rig.workshop.opened.clear()
        await rig.build(run("x"), disk_mb=disk_mb)
        assert rig.template().builds[0].machine == Machine(1, 512, disk_mb or 8192)
        assert rig.workshop.opened[-1][1].disk_mb == (disk_mb or 8192)
    assert len(rig.workshop.opened) == 1  # the last one had its step cached, and only booted


async def test_a_disk_smaller_than_the_bases_fails_with_a_word(rig: Rig):
    job = await rig.build(run("x"), disk_mb=8191)
    assert (job.status, job.failure.step) == ("error", "base")
    assert "diskSizeMB: 8191 is less than the 8192 of template base" in job.failure.message
    rig.assert_rests()


async def test_a_template_hands_on_what_it_has(rig: Rig):
    await rig.build(Step("USER", ("root",)), Step("ENV", ("A", "1")), Step("WORKDIR", ("/app",)), start_command="serve", ready_command="ok")
    await rig.build(Step("ENV", ("B", "$A")), name="child", from_template="mine")
    child = rig.template("child").builds[0]
    assert child.context == Context("root", "/app", {"A": "1", "B": "1"}, Service("serve", "ok", "root", "/app", {"A": "1"}, stays=True))
    assert [command.argv[-1] for command in rig.workshop.ran].count("serve") == 2
    await rig.build(name="other", from_template="child", start_command="another")
    assert rig.template("other").builds[0].service.start == "another"


async def test_output_comes_into_the_log_line_by_line(rig: Rig):
    rig.workshop.answers_to = lambda command: (0, "first\nsecond")
    job = await rig.build(run("x"))
    said = [(entry.step, entry.message) for entry in await rig.builds.entries(job)]
    assert [message for step, message in said if step == "1"] == ["[1/1] RUN x", "[stdout] first", "[stdout] second"]
    assert said[0] == ("base", "FROM template base")


async def test_offset_limit_and_level(rig: Rig):
    rig.workshop.answers_to = lambda command: (0, "\n".join(map(str, range(150))))
    job = await rig.build(run("x"))
    everything = await rig.builds.entries(job)
    seen: list = []
    while part := (await rig.builds.report("mine", job.build_id, len(seen), 100, "debug")).entries:
        assert len(part) <= 100
        seen += part
    assert seen == everything
    assert (await rig.builds.report("mine", job.build_id, 0, 100, "warn")).entries == []
    assert (await rig.builds.report("mine", job.build_id, 0, 0, "debug")).entries == []


# --- the cache


async def test_a_rebuild_starts_at_the_first_changed_step(rig: Rig):
    await rig.build(run("one"), Step("ENV", ("A", "$PATH")), run("two"), run("three"))
    rig.workshop.ran.clear()
    job = await rig.build(run("one"), Step("ENV", ("A", "$PATH")), run("two"), run("changed"))
    assert [c.argv[-1] for c in rig.workshop.ran if c.argv[-1] in ("one", "two", "three", "changed") or "PATH" in c.argv[-1]] == ["changed"]
    assert [what for what in rig.disk() if "{" not in what] == ["one", "two", "changed"]
    assert [line for line in await rig.said(job) if "CACHED" in line] == [
        "[1/4] CACHED RUN one",
        "[2/4] CACHED ENV A $PATH",
        "[3/4] CACHED RUN two",
    ]
    assert rig.template().builds[0].env_vars == {"A": "/usr/bin:/bin"}


async def test_nothing_runs_when_nothing_has_changed(rig: Rig):
    steps = (run("one"), Step("WORKDIR", ("/app",)))
    await rig.build(*steps)
    rig.workshop.opened.clear()
    assert (await rig.build(*steps)).status == "ready"
    assert [cold for *_, cold in rig.workshop.opened] == [True]  # for the capture alone
    assert (rig.template().build_count, len(rig.template().builds)) == (2, 1)


@pytest.mark.parametrize(
    ("again", "runs"),
    [
        ({"force": True}, ["one", "two"]),
        ({"steps": (run("one"), run("two", force=True), run("three"))}, ["two", "three"]),
        ({"steps": (run("one", "root"), run("two"))}, ["one", "two"]),
        ({"steps": (Step("ENV", ("A", "1")), run("one"), run("two"))}, ["one", "two"]),
        ({"steps": (run("one"), run("two")), "memory_mb": 1024}, ["one", "two"]),
        ({"steps": (run("two"), run("one"))}, ["two", "one"]),
        ({"name": "other"}, []),
    ],
    ids=str,
)
async def test_what_makes_steps_run_again(rig: Rig, again: dict, runs: list[str]):
    await rig.build(run("one"), run("two"))
    rig.workshop.ran.clear()
    steps = again.pop("steps", (run("one"), run("two")))
    assert (await rig.build(*steps, **again)).status == "ready"
    assert [c.argv[-1] for c in rig.workshop.ran if c.argv[-1] in ("one", "two", "three")] == runs


async def test_other_files_under_the_same_name_are_another_step(rig: Rig):
    await upload(rig, "a")
    await rig.build(Step("COPY", ("a", "/a"), HASH))
    rig.builds.files._folder.joinpath("e" * 64).write_bytes(rig.builds.files._folder.joinpath(HASH).read_bytes())
    await rig.build(Step("COPY", ("a", "/a"), "e" * 64))
    assert len(rig.workshop.uploaded) == 2
    rig.builds.files._folder.joinpath(HASH).unlink()
    assert (await rig.build(Step("COPY", ("a", "/a"), HASH))).status == "ready"  # cached: the files are not needed
    assert len(rig.workshop.uploaded) == 2


async def test_a_disk_that_is_gone_is_made_again(rig: Rig):
    await rig.build(run("one"), run("two"))
    for entry in rig.book.cached_steps.all():
        if rig.workshop.disks[entry.snapshot_id].did == ("one",):
            del rig.workshop.disks[entry.snapshot_id]
    rig.workshop.ran.clear()
    assert (await rig.build(run("one"), run("two"))).status == "ready"
    assert [c.argv[-1] for c in rig.workshop.ran if c.argv[-1] in ("one", "two")] == ["one"]
    assert rig.disk() == ("one", "two")


async def test_the_cache_is_bounded(tmp_path: Path):
    rig = Rig(tmp_path, build_steps_cached=3)
    await rig.builds.open()
    for number in range(5):
        await rig.build(run(f"{number}"))
        rig.clock.advance_ms(1000)
    assert len(rig.book.cached_steps.all()) == 3
    rig.assert_rests()


# --- failures


STEPS = {
    "run": (run("fails"), "failed to run command 'fails': exit status 7\nwhy\nbecause"),
    "nobody": (run("x", "root123"), "failed to run command 'x': command failed: unauthenticated: invalid username: 'root123'"),
    "workdir": (Step("WORKDIR", ("/fails",)), "WORKDIR: '/fails' could not be made: why\nbecause"),
    "user": (Step("USER", ("fails",)), "USER: 'fails' could not be made: why\nbecause"),
    "user name": (Step("USER", ("a b",)), "not a user's name"),
    "env": (Step("ENV", ("A B", "1")), "is not the name of a variable"),
    "env count": (Step("ENV", ("A",)), "1 arguments"),
    "run count": (Step("RUN", ()), "0 arguments"),
    "run empty": (run("  "), "the argument is empty"),
    "copy": (Step("COPY", ("a", "/fails"), HASH), "could not be unpacked: why\nbecause"),
    "copy source": (Step("COPY", ("b", "/x"), HASH), "no 'b'"),
    "copy files": (Step("COPY", ("a", "/x"), "0" * 64), "were not uploaded"),
    "copy hash": (Step("COPY", ("a", "/x")), "no filesHash"),
    "copy owner": (Step("COPY", ("a", "/x", "nobody123"), HASH), "'nobody123' is not known"),
    "copy mode": (Step("COPY", ("a", "/x", "", "abc"), HASH), "not a mode"),
}


@pytest.mark.parametrize("case", STEPS)
async def test_a_failing_step_names_itself_and_leaves_those_before_it(rig: Rig, case: str):
    await upload(rig, "a")
    step, message = STEPS[case]
    rig.workshop.answers_to = lambda command: (
        (7, "why\nbecause") if "fails" in command or command.startswith(("folder", "user")) else (0, "")
    )
    if case.startswith("copy"):
        rig.workshop.answers_to = lambda command: (7, "why\nbecause") if command.startswith("files") else (0, "")
    job = await rig.build(run("good"), step, run("never"))
    assert job.status == "error"
    assert job.failure.step == "2"
    assert message in job.failure.message
    assert (await rig.builds.entries(job))[-1].level == "error"
    assert rig.template() is None
    rig.workshop.ran.clear()
    rig.workshop.answers_to = lambda command: (0, "")
    again = await rig.build(run("good"), run("other"))
    assert again.status == "ready"
    assert again.template_id == job.template_id
    assert [c.argv[-1] for c in rig.workshop.ran if c.argv[-1] in ("good", "never", "other")] == ["other"]


async def test_a_failed_rebuild_leaves_the_former_build(rig: Rig):
    await rig.build(run("one"))
    before = rig.template()
    rig.workshop.answers_to = lambda command: (1, "")
    assert (await rig.build(run("two"))).status == "error"
    assert rig.template() == before


async def test_a_vm_that_cannot_be_started(rig: Rig):
    rig.workshop.fails_to_open = Unavailable("no room", "wait")
    job = await rig.build(run("x"))
    assert (job.status, job.failure.step, job.failure.message) == ("error", "base", "no room\nwait")


async def test_a_fault_of_ours_ends_the_build_with_a_word(rig: Rig):
    rig.workshop.fails_to_open = RuntimeError("a bug")
    job = await rig.build(run("x"))
    assert (job.status, "fault of the node" in job.failure.message) == ("error", True)


async def test_a_template_whose_tags_are_full(rig: Rig):
    await rig.build(tags=tuple(f"t{n}" for n in range(100)))
    job = await rig.build(tags=("one-more",))
    assert (job.status, job.failure.step) == ("error", "finalize")
    assert "more than 100 tags" in job.failure.message


# --- start and ready


async def test_ready_is_asked_until_it_says_yes(rig: Rig):
    answers = iter([(1, "not yet"), (1, "not yet"), (0, "")])
    rig.workshop.answers_to = lambda command: next(answers) if command == "ok?" else (0, "")
    job = await rig.build(start_command="serve", ready_command="ok?")
    assert job.status == "ready"
    assert next(answers, None) is None


async def test_never_ready_says_what_it_said_last(rig: Rig):
    """F13, F16: the reason is in the error."""
    rig.workshop.answers_to = lambda command: (3, "port closed") if command == "ok?" else (0, "")
    job = await rig.build(start_command="serve", ready_command="ok?")
    assert (job.status, job.failure.step) == ("error", "finalize")
    assert "was not ready within 600 s: ready command 'ok?': exit status 3\nport closed" in job.failure.message


async def test_a_start_command_that_fails(rig: Rig):
    """F13, F16: the reason is in the error."""
    rig.workshop.answers_to = lambda command: (1, "no such module") if command == "serve" else (1, "") if command == "ok?" else (0, "")
    job = await rig.build(start_command="serve", ready_command="ok?")
    assert "the start command failed: exit status 1\nno such module" in job.failure.message
    job = await rig.build(start_command="serve")
    assert "the start command failed" in job.failure.message


async def test_a_start_command_may_end_well_or_go_on(rig: Rig):
    began_ms = rig.clock.now_ms()
    assert (await rig.build(start_command="echo")).status == "ready"
    assert rig.clock.now_ms() - began_ms >= 20_000  # what it is given without a ready command
    with rig.workshop.hold("serve"):
        assert (await rig.build(start_command="serve", ready_command="ok")).status == "ready"
        assert (await rig.build(start_command="serve")).status == "ready"


# --- images


async def test_a_base_from_an_image(rig: Rig):
    rig.images.contexts["debian:12"] = Context("root", "/", {"PATH": "/image"})
    job = await rig.build(Step("ENV", ("A", "$PATH")), from_image="debian:12")
    assert job.status == "ready"
    assert rig.template().builds[0].context == Context("root", "/", {"PATH": "/image", "A": "/image"})
    assert [cold for *_, cold in rig.workshop.opened] == [True]
    assert "pulled debian:12" in await rig.said(job)
    failed = await rig.build(from_image="nothing")
    assert (failed.status, failed.failure.step, failed.failure.message) == ("error", "base", "image 'nothing' not found")


async def test_what_an_image_asks_for_is_done_first_once_and_is_nobodys_step(rig: Rig):
    rig.images.contexts["alpine"] = Context("root", "/", {"HOME_OF": "$A"})
    rig.images.preparation = (Step("USER", ("app",)), Step("WORKDIR", (r"/srv/\$A",)))
    job = await rig.build(run("one"), from_image="alpine")
    assert (job.status, rig.template().builds[0].user, rig.template().builds[0].workdir) == ("ready", "app", "/srv/$A")
    assert rig.disk()[0] == "image alpine"
    assert rig.disk()[-1] == "one"
    assert [line for line in await rig.said(job) if line.startswith("[1/1]")] == ["[1/1] RUN one"]
    rig.workshop.ran.clear()
    rig.images.preparation = (*rig.images.preparation, Step("USER", ("not a name",)))
    failed = await rig.build(run("one"), from_image="alpine")
    assert (failed.failure.step, "not a user's name" in failed.failure.message) == ("base", True)
    rig.images.preparation = rig.images.preparation[:2]
    again = await rig.build(run("one"), run("two"), from_image="alpine", name="second")
    assert again.status == "ready"
    assert (await rig.said(again))[2] == "[1/2] CACHED RUN one"


# --- several, and their ends


async def test_a_few_at_once_and_the_others_wait(tmp_path: Path):
    rig = Rig(tmp_path, builds_at_once=2)
    await rig.builds.open()
    with rig.workshop.hold("x") as reached:
        jobs = [await rig.begin(run("x"), name=f"n{n}", force=True) for n in range(4)]
        await reached.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(rig.workshop.open_benches) == 2
        assert {rig.builds.job(job.name, job.build_id).status for job in jobs} == {"building"}
        assert "wait for other builds to end" in await rig.said(jobs[3])
    await rig.finish()
    assert {rig.builds.job(job.name, job.build_id).status for job in jobs} == {"ready"}
    rig.assert_rests()


async def test_a_newer_build_of_the_same_tag_ends_the_older(rig: Rig):
    with rig.workshop.hold("slow") as reached:
        older = await rig.begin(run("slow"))
        apart = await rig.begin(run("slow"), tags=("other",))
        await reached.wait()
        newer = await rig.begin(run("quick"))
        ended = rig.builds.job("mine", older.build_id)
        assert (ended.status, f"build {newer.build_id}" in ended.failure.message) == ("error", True)
    await rig.finish()
    assert [rig.builds.job("mine", job.build_id).status for job in (apart, newer)] == ["ready", "ready"]


async def test_giving_up_ends_what_waits_and_what_goes_on(rig: Rig):
    waiting = await rig.builds.request("mine", ("a",))
    at_once = await rig.begin(run("never begun"), tags=("b",))
    await rig.builds.give_up(rig.builds.unfinished("mine"), "it was deleted")
    with rig.workshop.hold("slow") as reached:
        running = await rig.begin(run("slow"), tags=("c",))
        await reached.wait()
        await rig.builds.give_up(rig.builds.unfinished(running.template_id), "it was deleted")
    jobs = [rig.builds.job("mine", job.build_id) for job in (waiting, at_once, running)]
    assert [(job.status, job.failure.message) for job in jobs] == [("error", "it was deleted")] * 3
    assert rig.builds.unfinished("mine") == []
    rig.assert_rests()


async def test_a_server_that_is_killed_or_stopped(rig: Rig):
    """F14: a build that nobody goes on with says so."""
    with rig.workshop.hold("slow") as reached:
        stopped = await rig.begin(run("slow"))
        await reached.wait()
        await rig.builds.close()
    killed = await rig.builds.request("killed", ())
    waiting = await rig.builds.request("waiting", ())
    await rig.book.builds.put(builds.replace(killed, status="building"))
    await rig.restart()
    for job in (stopped, killed):
        now = rig.builds.job(job.name, job.build_id)
        assert (now.status, "start it again" in now.failure.message) == ("error", True)
    assert rig.builds.job("waiting", waiting.build_id).status == "waiting"
    assert any("RUN slow" in line for line in await rig.said(rig.builds.job("mine", stopped.build_id)))


async def test_a_build_that_lasts_too_long(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rig.builds, "_limits", rig._limits.model_copy(update={"build_minutes": 0.002}))
    with rig.workshop.hold("slow"):
        job = await rig.build(run("slow"))
    assert (job.status, job.failure.step) == ("error", "1")
    assert "limits.build_minutes" in job.failure.message


async def test_builds_of_long_ago_are_forgotten_with_their_logs(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builds, "KEPT_MAX", 2)
    jobs = []
    for _ in range(4):
        jobs.append(await rig.build(run("x")))
        rig.clock.advance_ms(1000)
    assert {job.build_id for job in rig.book.builds.all()} == {job.build_id for job in jobs[2:]}
    assert {path.stem for path in rig._paths.build_logs.iterdir()} == {job.build_id for job in jobs[2:]}
    assert build_log.read(rig._paths.build_logs / f"{jobs[3].build_id}.jsonl")
