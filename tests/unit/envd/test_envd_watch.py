"""filesystem.Filesystem: watching folders, streamed and polled (contract section 3.6)."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from envd_rig import Stream, basic, can_make_spaces

SERVICE = "filesystem.Filesystem"
LIMIT_S = 30


class Watch:
    """The events of one WatchDir stream as (type, name)."""

    def __init__(self, envd, path, user=None, headers=None, **options):
        headers = {**(basic(user) if user else {}), **(headers or {})}
        self.stream = Stream(envd.port, f"{SERVICE}/WatchDir", {"path": path, **options}, headers, LIMIT_S)
        self.first = self.stream.message()
        self.entries = []

    def next(self):
        """The next event; None after the end frame. Keepalives are passed over."""
        while (message := self.stream.message()) is not None:
            if "filesystem" in message:
                event = message["filesystem"]
                self.entries.append(event.get("entry"))
                return short(event)
            assert message == {"keepalive": {}}
        return None

    def take(self, count):
        return [self.next() for _ in range(count)]

    def until(self, last):
        events = [self.next()]
        while events[-1] != last:
            assert events[-1] is not None, events
            events.append(self.next())
        return events

    def close(self):
        self.stream.close()


class Polled:
    """The same by polling."""

    def __init__(self, envd, path, user=None, **options):
        status, answer = envd.call(f"{SERVICE}/CreateWatcher", {"path": path, **options}, user)
        assert status == 200, answer
        self.envd = envd
        self.id = answer["watcherId"]

    def raw(self):
        status, answer = self.envd.call(f"{SERVICE}/GetWatcherEvents", {"watcherId": self.id})
        assert status == 200, answer
        return answer["events"]

    def events(self):
        return [short(event) for event in self.raw()]

    def remove(self):
        return self.envd.call(f"{SERVICE}/RemoveWatcher", {"watcherId": self.id})


def short(event):
    return event["type"].removeprefix("EVENT_TYPE_"), event["name"]


def refusal(envd, path, user=None, **options):
    """The one error both ways of watching give."""
    stream = Watch(envd, path, user, **options).stream
    status, answer = envd.call(f"{SERVICE}/CreateWatcher", {"path": path, **options}, user)
    assert stream.end_frame["error"] == answer
    assert status >= 400
    return answer["code"], answer["message"]


def upload(envd, path, data=b"text", user=None):
    body = envd.request("POST", f"/files?path={path}", data, {"Content-Type": "application/octet-stream", **(basic(user) if user else {})})
    assert body[0] == 200, body


def inotify_count(envd):
    """Descriptors of inotify the agent holds."""
    count = 0
    for fd in Path(f"/proc/{envd.child.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "inotify" in str(fd.readlink())
    # Each watch has two: one to read, one to wait on.
    return count / 2


def folder_count(envd):
    """Folders the kernel watches for the agent."""
    folder = Path(f"/proc/{envd.child.pid}/fdinfo")
    return sum(path.read_text().count("inotify wd:") for path in folder.iterdir()) / 2


def wait_for(condition, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(envd, request):
    """A folder of the test's own in the home of the user, by its relative name."""
    name = "w-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    assert envd.run(f"mkdir -p {name}").code == 0
    return name


def test_a_new_file_is_create_chmod_write(envd, folder):
    watch, polled = Watch(envd, folder), Polled(envd, folder)
    assert watch.first == {"start": {}}
    expected = [("CREATE", "new.txt"), ("CHMOD", "new.txt"), ("WRITE", "new.txt")]
    upload(envd, f"{folder}/new.txt")
    assert polled.events() == expected
    assert watch.take(3) == expected
    assert polled.events() == []
    upload(envd, f"{folder}/new.txt", b"other")
    assert set(polled.events()) == {("WRITE", "new.txt")}
    envd.run(f"rm {folder}/new.txt")
    assert polled.events() == [("REMOVE", "new.txt")]
    assert watch.until(("REMOVE", "new.txt"))[0] == ("WRITE", "new.txt")
    watch.close()
    assert polled.remove() == (200, {})


def test_not_recursive_unless_asked(envd, folder):
    envd.run(f"mkdir {folder}/sub")
    plain, deep = Polled(envd, folder), Polled(envd, folder, recursive=True)
    upload(envd, f"{folder}/sub/f")
    assert plain.events() == []
    assert deep.events() == [("CREATE", "sub/f"), ("CHMOD", "sub/f"), ("WRITE", "sub/f")]
    envd.run(f"chmod 700 {folder}/sub; chmod 700 {folder}")
    assert plain.events() == [("CHMOD", "sub"), ("CHMOD", ".")]
    assert deep.events() == [("CHMOD", "sub"), ("CHMOD", ".")]


def test_a_folder_made_after_the_start(envd, folder):
    """Written into straight away, through two requests."""
    watch, polled = Watch(envd, folder, recursive=True), Polled(envd, folder, recursive=True)
    for round_ in range(20):
        assert envd.call(f"{SERVICE}/MakeDir", {"path": f"{folder}/{round_}/in"})[0] == 200
        upload(envd, f"{folder}/{round_}/in/f")
        expected = {("CREATE", f"{round_}"), ("CREATE", f"{round_}/in"), ("CREATE", f"{round_}/in/f"), ("WRITE", f"{round_}/in/f")}
        events = polled.events()
        assert expected <= set(events)
        assert max(Counter(events).values()) == 1
        assert expected <= set(watch.until(("WRITE", f"{round_}/in/f")))
    watch.close()


def test_trees_made_and_filled_in_one_go(envd, folder):
    """Case B09: every file of every tree, once, by both ways."""
    rounds, files = 50, 100
    watch, polled = Watch(envd, folder, recursive=True), Polled(envd, folder, recursive=True)
    script = f"cd {folder}; for r in $(seq {rounds}); do mkdir -p $r/a/b/c && touch $r/a/b/c/{{1..{files}}}; done; touch last"
    assert envd.run(script, timeout_s=LIMIT_S).code == 0
    expected = {f"{r}{below}" for r in range(1, rounds + 1) for below in ("", "/a", "/a/b", "/a/b/c")}
    expected |= {f"{r}/a/b/c/{file}" for r in range(1, rounds + 1) for file in range(1, files + 1)}
    for events in (polled.events(), watch.until(("CREATE", "last"))):
        created = Counter(name for kind, name in events if kind == "CREATE")
        assert set(created) == expected | {"last"}
        assert max(created.values()) == 1
        place = {name: index for index, (kind, name) in reversed(list(enumerate(events))) if kind == "CREATE"}
        assert all(place[str(Path(name).parent)] < place[name] for name in expected if "/" in name)
    watch.close()


def test_mkdir_and_write_at_once(envd, folder):
    polled = Polled(envd, folder, recursive=True)
    for round_ in range(50):
        assert envd.run(f"cd {folder}; mkdir -p {round_}/a/b/c && echo hi > {round_}/a/b/c/f").code == 0
        counts = Counter(polled.events())
        for below in ("", "/a", "/a/b", "/a/b/c", "/a/b/c/f"):
            assert counts["CREATE", f"{round_}{below}"] == 1
        # A write that meets the first look at a new folder may be told by both; it is never missed.
        assert counts["WRITE", f"{round_}/a/b/c/f"] in (1, 2)


def test_five_thousand_files_and_a_client_that_reads_late(envd, folder):
    watch, polled = Watch(envd, folder), Polled(envd, folder)
    assert envd.run(f"cd {folder}; seq 5000 | xargs touch; touch last", timeout_s=LIMIT_S).code == 0
    expected = Counter({str(number): 1 for number in range(1, 5001)}) + Counter(["last"])
    for events in (polled.events(), watch.until(("CREATE", "last"))):
        assert Counter(name for kind, name in events if kind == "CREATE") == expected
        # touch sets the times of each.
        assert sum(kind == "CHMOD" for kind, _ in events) >= 5000
    watch.close()


def test_moves(envd, folder):
    envd.run(f"cd {folder}; mkdir -p top/a/b top/c out")
    watch, polled = Watch(envd, f"{folder}/top", recursive=True), Polled(envd, f"{folder}/top", recursive=True)
    envd.run(f"cd {folder}/top; touch a/b/f; mv a/b/f a/g; mv a c/x; touch c/x/b/h")
    within = [
        ("CREATE", "a/b/f"),
        ("CHMOD", "a/b/f"),
        ("RENAME", "a/b/f"),
        ("CREATE", "a/g"),
        ("RENAME", "a"),
        ("CREATE", "c/x"),
        ("CREATE", "c/x/b/h"),
        ("CHMOD", "c/x/b/h"),
    ]
    assert polled.events() == within
    assert watch.take(len(within)) == within
    envd.run(f"cd {folder}; mv top/c/x out/x; touch out/x/unseen; mkdir out/x/new; mv out/x/g out/g; mv out/g top/g")
    out = [("RENAME", "c/x"), ("CREATE", "g")]
    assert polled.events() == out
    assert watch.take(2) == out
    envd.run(f"cd {folder}; mv out/x top/x; touch top/x/new/seen")
    back = polled.events()
    assert back[0] == ("CREATE", "x")
    assert Counter(name for kind, name in back if kind == "CREATE") == Counter(["x", "x/b", "x/b/h", "x/new", "x/new/seen", "x/unseen"])
    watch.close()


def test_saving_by_rename(envd, folder):
    envd.run(f"echo old > {folder}/doc")
    polled = Polled(envd, folder)
    envd.run(f"cd {folder}; echo new > doc.tmp; mv doc.tmp doc")
    assert polled.events() == [("CREATE", "doc.tmp"), ("WRITE", "doc.tmp"), ("RENAME", "doc.tmp"), ("CREATE", "doc")]


@pytest.mark.parametrize(("command", "last"), [("rm -r", "REMOVE"), ("mv -t {folder}/other", "RENAME")])
def test_the_watch_ends_with_its_folder(envd, folder, command, last):
    envd.run(f"cd {folder}; mkdir -p top/sub other; touch top/sub/f")
    watch, polled = Watch(envd, f"{folder}/top", recursive=True), Polled(envd, f"{folder}/top", recursive=True)
    before = inotify_count(envd)
    assert envd.run(f"{command.format(folder=folder)} {folder}/top").code == 0
    removals = [("REMOVE", "sub/f"), ("REMOVE", "sub")] if last == "REMOVE" else []
    assert polled.events() == [*removals, (last, ".")]
    assert watch.take(len(removals) + 2) == [*removals, (last, "."), None]
    assert watch.stream.end_frame == {}
    # Made again it is another folder.
    envd.run(f"mkdir -p {folder}/top; touch {folder}/top/f")
    assert polled.events() == []
    wait_for(lambda: inotify_count(envd) <= before - 2)
    assert polled.remove()[0] == 200


def test_links(envd, folder):
    envd.run(f"cd {folder}; mkdir -p real/sub tree elsewhere; ln -s real link; ln -s ../elsewhere tree/out")
    by_link, tree = Polled(envd, f"{folder}/link", recursive=True, includeEntry=True), Polled(envd, f"{folder}/tree", recursive=True)
    envd.run(f"cd {folder}; touch real/sub/f elsewhere/f; ln -s .. tree/loop; ln -s nowhere tree/broken; chmod 755 tree/out")
    raw = by_link.raw()
    assert [short(event) for event in raw] == [("CREATE", "sub/f"), ("CHMOD", "sub/f")]
    assert raw[0]["entry"]["path"] == f"/home/user/{folder}/link/sub/f"
    assert tree.events() == [("CREATE", "loop"), ("CREATE", "broken")]


def test_two_watches_of_one_folder(envd, folder):
    first, second, root = Watch(envd, folder), Watch(envd, folder, recursive=True), Polled(envd, f"/home/user/{folder}", "root")
    upload(envd, f"{folder}/f")
    expected = [("CREATE", "f"), ("CHMOD", "f"), ("WRITE", "f")]
    assert first.take(3) == second.take(3) == root.events() == expected
    first.close()
    envd.run(f"rm {folder}/f")
    assert second.next() == ("REMOVE", "f")
    assert root.events() == [("REMOVE", "f")]
    second.close()


def test_entries(envd, folder):
    watch = Watch(envd, folder, includeEntry=True)
    envd.run(f"cd {folder}; printf 12345 > f; chmod 640 f; mkdir d; ln -s f l; touch gone; rm gone")
    events = watch.until(("REMOVE", "gone"))
    entries = dict(zip(events, watch.entries, strict=True))
    assert entries["CHMOD", "f"]["path"] == f"/home/user/{folder}/f"
    assert (entries["CHMOD", "f"]["size"], entries["CHMOD", "f"]["permissions"]) == ("5", "-rw-r-----")
    assert entries["CREATE", "d"]["type"] == "FILE_TYPE_DIRECTORY"
    assert entries["CREATE", "l"]["symlinkTarget"] == f"/home/user/{folder}/f"
    assert entries["REMOVE", "gone"] is None
    envd.run(f"chmod 750 {folder}")
    assert watch.next() == ("CHMOD", ".")
    assert watch.entries[-1]["path"] == f"/home/user/{folder}"
    watch.close()
    plain = Polled(envd, folder)
    upload(envd, f"{folder}/h")
    assert all("entry" not in event for event in plain.raw())


def test_names(envd, folder):
    names = ["a b", "ü", "日本", "%2e%2e", 'a"b', "a\\", "a'b", "a#b?c&d=e", "-rf", ".hidden", "x" * 255, "new\nline"]
    polled = Polled(envd, folder)
    for name in names:
        (envd.path("/home/user") / folder / name).touch()
    assert [name for kind, name in polled.events() if kind == "CREATE"] == names
    (Path(os.fsdecode(bytes(envd.path("/home/user") / folder) + b"/bad-\xff"))).touch()
    assert ("CREATE", "bad-�") in polled.events()


def test_rights_are_those_of_the_user(envd, folder):
    assert refusal(envd, "/root")[0] == "permission_denied"
    assert refusal(envd, "/root/none")[0] == "permission_denied"
    assert refusal(envd, folder, "nobody-here") == ("unauthenticated", "invalid username: 'nobody-here'")
    Polled(envd, "/root", "root")
    envd.run(f"mkdir -p {folder}/open {folder}/closed; chmod 777 {folder}; chmod 700 {folder}/closed; touch {folder}/closed/old")
    other = Polled(envd, f"/home/user/{folder}", "app", recursive=True)
    envd.run(f"touch {folder}/closed/secret {folder}/open/f")
    assert other.events() == [("CREATE", "open/f"), ("CHMOD", "open/f")]
    envd.run(f"chmod 755 {folder}/closed; touch {folder}/closed/later")
    events = other.events()
    assert events[0] == ("CHMOD", "closed")
    assert Counter(name for kind, name in events if kind == "CREATE") == Counter(["closed/old", "closed/secret", "closed/later"])


def test_refusals(envd, folder):
    envd.run(f"touch {folder}/file")
    code, message = refusal(envd, f"{folder}/file")
    assert (code, "not a directory" in message) == ("invalid_argument", True)
    code, message = refusal(envd, f"{folder}/none")
    assert (code, "does not exist" in message) == ("not_found", True)
    assert refusal(envd, "~other/x")[0] == "invalid_argument"
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        status, answer = envd.call(f"{SERVICE}/{method}", {"watcherId": "w-none"})
        assert (status, answer["code"]) == (404, "not_found")
        assert "w-none" in answer["message"]
    polled = Polled(envd, folder)
    assert polled.remove() == (200, {})
    assert polled.remove()[0] == 404
    assert envd.call(f"{SERVICE}/GetWatcherEvents", {"watcherId": polled.id})[0] == 404


def test_network_mounts(fresh):
    if not Path("/dev/fuse").exists() or not can_make_spaces():
        pytest.skip("needs /dev/fuse and mount namespaces")
    fresh.run("mkdir -p w/net")
    server = Path(__file__).parent / "tiny_fuse.py"
    mounted = "/home/user/w/net"
    daemon = subprocess.Popen([sys.executable, str(server), str(fresh.child.pid), mounted], stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout.readline() == "mounted\n"
        code, message = refusal(fresh, "w/net")
        assert (code, "network file system (fuse)" in message, "allowNetworkMounts" in message) == ("invalid_argument", True, True)
        above = Watch(fresh, "w", recursive=True)
        assert folder_count(fresh) == 1
        allowed = Watch(fresh, "w/net", recursive=True, allowNetworkMounts=True)
        assert allowed.first == {"start": {}}
        both = Watch(fresh, "w", recursive=True, allowNetworkMounts=True)
        assert folder_count(fresh) == 1 + 1 + 2
        fresh.run("touch w/f")
        assert above.next() == both.next() == ("CREATE", "f")
        for watch in (allowed, above, both):
            watch.close()
    finally:
        daemon.kill()
        daemon.wait(10)
        assert fresh.run(f"umount -l {mounted}", user="root").code == 0


def test_an_unmounted_folder_is_an_error(envd, folder):
    mounted = f"/home/user/{folder}/m"
    assert envd.run(f"mkdir {mounted}; mount -t tmpfs tmpfs {mounted}", user="root").code == 0
    watch, polled = Watch(envd, mounted, user="root"), Polled(envd, mounted, "root")
    assert envd.run(f"umount {mounted}", user="root").code == 0
    assert watch.next() is None
    status, answer = envd.call(f"{SERVICE}/GetWatcherEvents", {"watcherId": polled.id})
    assert (status, answer["code"]) == (400, "failed_precondition")
    assert watch.stream.end_frame["error"] == answer
    assert polled.remove()[0] == 200


def test_keepalives_and_deadline(envd, folder):
    watch = Watch(envd, folder, headers={"Keepalive-Ping-Interval": "1", "Connect-Timeout-Ms": "2500"})
    before = time.monotonic()
    assert [watch.stream.message(), watch.stream.message()] == [{"keepalive": {}}] * 2
    assert 1.9 < time.monotonic() - before < 2.4
    assert watch.stream.message() is None
    assert watch.stream.end_frame["error"]["code"] == "deadline_exceeded"
    assert 2.4 < time.monotonic() - before < 4


def test_a_client_that_leaves_ends_its_watch(fresh):
    assert inotify_count(fresh) == 0
    fresh.run("mkdir -p w/a/b")
    watches = [Watch(fresh, "w", recursive=True) for _ in range(5)]
    polled = Polled(fresh, "w")
    assert inotify_count(fresh) == 6
    for watch in watches:
        watch.close()
    wait_for(lambda: inotify_count(fresh) == 1)
    polled.remove()
    wait_for(lambda: inotify_count(fresh) == 0)


def test_the_number_of_watches_is_limited(fresh):
    fresh.run("mkdir w")
    ids = []
    for _ in range(200):
        status, answer = fresh.call(f"{SERVICE}/CreateWatcher", {"path": "w"})
        if status != 200:
            break
        ids.append(answer["watcherId"])
    assert (status, answer["code"]) == (429, "resource_exhausted")
    assert "stop" in answer["message"]
    assert len(ids) <= 96
    assert fresh.call(f"{SERVICE}/RemoveWatcher", {"watcherId": ids[0]})[0] == 200
    wait_for(lambda: fresh.call(f"{SERVICE}/CreateWatcher", {"path": "w"})[0] == 200)


def test_a_flood_is_complete_or_an_error(envd, folder):
    """A hundred thousand changes: either all are told, or the watch says that some are not."""
    polled = Polled(envd, folder, recursive=True)
    assert envd.run(f"cd {folder}; seq 50000 | xargs touch; touch last", timeout_s=60).code == 0
    status, answer = envd.call(f"{SERVICE}/GetWatcherEvents", {"watcherId": polled.id})
    assert status == 200
    names = Counter(event["name"] for event in answer["events"] if event["type"] == "EVENT_TYPE_CREATE")
    assert max(names.values()) == 1
    if len(names) != 50_001:
        status, answer = envd.call(f"{SERVICE}/GetWatcherEvents", {"watcherId": polled.id})
        assert (status, answer["code"], "lost" in answer["message"]) == (429, "resource_exhausted", True)
    assert polled.remove()[0] == 200
    assert envd.rss_bytes() < 128 << 20


# The official client.


@pytest.fixture
def sandbox(envd, monkeypatch):
    e2b = pytest.importorskip("e2b")
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setenv("E2B_SANDBOX_URL", envd.url)
    return e2b.Sandbox.create()


def told(events):
    return [(event.type.name, event.name) for event in events]


def test_sdk_polling(sandbox, folder):
    import e2b

    handle = sandbox.files.watch_dir(folder)
    sandbox.files.write(f"{folder}/f.txt", "This file will be watched.")
    assert told(handle.get_new_events()) == [("CREATE", "f.txt"), ("CHMOD", "f.txt"), ("WRITE", "f.txt")]
    sandbox.files.write(f"{folder}/f.txt", "again")
    assert ("WRITE", "f.txt") in told(handle.get_new_events())
    handle.stop()
    deep = sandbox.files.watch_dir(folder, recursive=True, include_entry=True)
    sandbox.files.make_dir(f"{folder}/nested")
    sandbox.files.write(f"{folder}/nested/g", "x")
    events = deep.get_new_events()
    assert ("WRITE", "nested/g") in told(events)
    assert events[-1].entry.path == f"/home/user/{folder}/nested/g"
    sandbox.files.remove(folder)
    assert told(deep.get_new_events())[-1] == ("REMOVE", ".")
    assert deep.get_new_events() == []
    deep.stop()
    with pytest.raises(e2b.NotFoundException):
        sandbox.files.watch_dir(f"{folder}/none")
    sandbox.files.write(folder, "a file")
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.watch_dir(folder)


async def test_sdk_streaming(envd, folder, monkeypatch):
    e2b = pytest.importorskip("e2b")
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setenv("E2B_SANDBOX_URL", envd.url)
    sandbox = await e2b.AsyncSandbox.create()
    queue, exits = asyncio.Queue(), asyncio.Queue()
    handle = await sandbox.files.watch_dir(folder, queue.put_nowait, exits.put_nowait, recursive=True, include_entry=True)
    await sandbox.files.write(f"{folder}/f.txt", "text")
    events = [await asyncio.wait_for(queue.get(), LIMIT_S) for _ in range(3)]
    assert told(events) == [("CREATE", "f.txt"), ("CHMOD", "f.txt"), ("WRITE", "f.txt")]
    assert events[2].entry.size == 4
    await sandbox.files.make_dir(f"{folder}/nested")
    await sandbox.files.write(f"{folder}/nested/g", "x")
    seen = []
    while ("WRITE", "nested/g") not in seen:
        seen += told([await asyncio.wait_for(queue.get(), LIMIT_S)])
    before = inotify_count(envd)
    await handle.stop()
    assert await asyncio.wait_for(exits.get(), LIMIT_S) is None
    await asyncio.to_thread(wait_for, lambda: inotify_count(envd) <= before - 1)
    ended = await sandbox.files.watch_dir(folder, queue.put_nowait, exits.put_nowait)
    await sandbox.files.remove(folder)
    assert await asyncio.wait_for(exits.get(), LIMIT_S) is None
    await ended.stop()
    with pytest.raises(e2b.NotFoundException):
        await sandbox.files.watch_dir(folder, queue.put_nowait)
