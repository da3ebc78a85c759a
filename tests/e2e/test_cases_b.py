"""Files in real guests: sizes, names, bytes, planted links and watches (cases B)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import urllib.error
import urllib.request
from urllib.parse import quote

import pytest
from e2b import FileNotFoundException, FilesystemEventType, FileType, InvalidArgumentException, Sandbox, SandboxException
from e2b.sandbox.filesystem.filesystem import WriteEntry
from guest_programs import wait_for


@pytest.fixture(scope="module")
def box(node):
    """One sandbox for all: each test has a folder of its own."""
    made = Sandbox.create("base", timeout=1800, **node.options)
    yield made
    made.kill()


def pattern(size_bytes: int) -> bytes:
    return (bytes(range(256)) * (size_bytes // 256 + 1))[:size_bytes]


def raw(node, box, method: str, target: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """A call to the agent that no client library has touched."""
    request = urllib.request.Request(node.url + target, data=body, method=method)
    names = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": box._envd_access_token}
    for name, value in (names | {name.replace("_", "-"): value for name, value in headers.items()}).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, dict((name.lower(), value) for name, value in reply.headers.items()), reply.read()
    except urllib.error.HTTPError as refused:
        return refused.code, dict((name.lower(), value) for name, value in refused.headers.items()), refused.read()


# --- B01, B06 ----------------------------------------------------------------------------------------------------------

SIZES = [0, 1, 4095, 4096, 4097, 16383, 16385, 18431, 18433, 65535, 65537, 131071, 131073, 1 << 20, (8 << 20) + 1]


def test_every_size_arrives_and_comes_back(box):
    """Acknowledged is written: as the guest's own programs see it, by each way of uploading."""
    ways = {"whole": lambda data: data, "stream": io.BytesIO}
    expected = {}
    for size_bytes in SIZES:
        data = pattern(size_bytes)
        for way, given in ways.items():
            path = f"/home/user/sizes/{way}-{size_bytes}"
            assert box.files.write(path, given(data)).path == path
            expected[path] = hashlib.sha256(data).hexdigest()
    box.files.write_files([WriteEntry(path=f"/home/user/sizes/many-{size}", data=pattern(size)) for size in SIZES[:-1]])
    expected |= {f"/home/user/sizes/many-{size}": hashlib.sha256(pattern(size)).hexdigest() for size in SIZES[:-1]}
    sums = box.commands.run("sha256sum /home/user/sizes/*").stdout.splitlines()
    assert {line.split()[1]: line.split()[0] for line in sums} == expected
    for size_bytes in SIZES:
        assert (
            hashlib.sha256(box.files.read(f"sizes/stream-{size_bytes}", format="bytes")).hexdigest()
            == expected[f"/home/user/sizes/stream-{size_bytes}"]
        )
    shorter = box.files.write("sizes/whole-1048576", b"short")
    assert box.files.read(shorter.path) == "short"


def test_all_bytes_whole_in_part_and_compressed(node, box):
    data = pattern(1 << 20)
    box.files.write("bytes", data)
    status, headers, body = raw(node, box, "GET", "/files?path=bytes")
    assert (status, headers["content-length"], body == data) == (200, str(1 << 20), True)
    status, headers, body = raw(node, box, "GET", "/files?path=bytes", Range="bytes=1000-1999")
    assert (status, headers["content-range"], body == data[1000:2000]) == (206, f"bytes 1000-1999/{1 << 20}", True)
    status, headers, body = raw(node, box, "GET", "/files?path=bytes", Accept_Encoding="gzip")
    assert (headers["content-encoding"], gzip.decompress(body) == data) == ("gzip", True)
    box.files.write("packed", data, gzip=True)
    assert box.files.read("packed", format="bytes", gzip=True) == data
    assert raw(node, box, "GET", "/files?path=bytes", Range=f"bytes={1 << 20}-")[0] == 416
    assert box.commands.run("base64 -w0 bytes | base64 -d | cmp - bytes && cat bytes | wc -c").stdout == f"{1 << 20}\n"


def test_files_of_the_kernel(box):
    assert len(box.files.read("/proc/sys/kernel/random/boot_id").strip()) == 36
    assert box.files.read("/sys/class/net/lo/mtu") == "65536\n"
    assert "MemTotal" in box.files.read("/proc/meminfo")
    assert box.files.read("/sys/fs/cgroup/cgroup.controllers").strip()


# --- B04 ---------------------------------------------------------------------------------------------------------------

NAMES = ["a b", "ü", "日本", "%2e%2e", 'a"b', "a\\", "a'b", "a#b?c&d=e", "-rf", ".hidden", "n" * 255, "a\nb", "a+b", "~x", " ", "*"]


def test_odd_names_round_trip(box):
    box.files.make_dir("/home/user/odd")
    watch = box.files.watch_dir("/home/user/odd")
    for name in NAMES:
        path = f"/home/user/odd/{name}"
        data = name.encode()
        assert box.files.write(path, data).name == name
        assert box.files.read(path, format="bytes") == data
        assert box.files.get_info(path).name == name
        box.files.rename(path, f"/home/user/odd/{name[:200]}.moved")
        assert not box.files.exists(path)
        box.files.rename(f"/home/user/odd/{name[:200]}.moved", path)
    assert sorted(entry.name for entry in box.files.list("odd")) == sorted(NAMES)
    assert {event.name for event in watch.get_new_events()} >= set(NAMES)
    watch.stop()
    listed = box.commands.run("python3 -c \"import os; print(sorted(os.listdir(b'/home/user/odd')))\"").stdout
    assert listed.strip() == str(sorted(name.encode() for name in NAMES))
    for name in NAMES:
        box.files.remove(f"/home/user/odd/{name}")
    assert box.files.list("odd") == []


def test_names_that_are_not_text_are_refused_and_can_be_removed(node, box):
    box.commands.run("mkdir bad; cd bad; touch \"$(printf 'x\\377')\"; touch plain")
    assert len(box.files.list("bad")) == 2
    path = quote("/home/user/bad/x") + "%FF"
    for method, body in (("GET", None), ("POST", b"data")):
        status, _, answer = raw(node, box, method, f"/files?path={path}", body, Content_Type="application/octet-stream")
        assert (status, json.loads(answer)["code"]) == (400, 400)
        assert "UTF-8" in json.loads(answer)["message"]
    for bad in ("bad/" + "n" * 256, "bad/nul\0byte", "bad/" + "d/" * 3000):
        with pytest.raises((InvalidArgumentException, SandboxException)):
            box.files.write(bad, "x")
    assert len(box.files.list("bad")) == 2, "a refused name left a file"
    box.files.remove("bad")
    assert not box.files.exists("bad")


# --- B08 ---------------------------------------------------------------------------------------------------------------


def test_planted_links_lead_nowhere_the_user_could_not_go(box):
    box.commands.run("mkdir up; cd up; ln -s /etc/shadow a; ln -s /root d; ln -s ../../../root/x up; ln -s / top; ln -s loop loop")
    box.commands.run("mkdir -m 755 /root/open; echo secret > /root/open/f; chmod 644 /root/open/f; chmod 700 /root", user="root")
    before = box.commands.run("sha256sum /etc/shadow; ls -A /root", user="root").stdout
    keeper = box.commands.run("cd /root/open && exec sleep 819", background=True, user="root", timeout=0)
    targets = ["up/a", "up/d/x", "up/up", "up/top/etc/new", f"/proc/{keeper.pid}/cwd/f", "up/loop"]
    for path in targets:
        with pytest.raises(SandboxException):
            box.files.write(path, "taken over")
        with pytest.raises((SandboxException, FileNotFoundException)):
            box.files.read(path)
    for call in (
        lambda: box.files.list("up/d"),
        lambda: box.files.list(f"/proc/{keeper.pid}/cwd"),
        lambda: box.files.make_dir("up/d/new"),
        lambda: box.files.rename("up/a", "up/d/a"),
        lambda: box.files.remove("up/d/open"),
        lambda: box.files.remove("up/top/etc/hostname"),
    ):
        with pytest.raises(SandboxException):
            call()
    assert box.commands.run("sha256sum /etc/shadow; ls -A /root", user="root").stdout == before
    # Removing the folder removes the links, not what they lead to.
    box.files.remove("up")
    assert box.commands.run("ls -A /root; test -f /etc/hostname", user="root").exit_code == 0
    keeper.kill()


def test_an_upload_that_does_not_fit_is_told_so(node, box):
    """An upload that does not fit is 507, and the sandbox goes on."""
    box.commands.run("mkdir /small && mount -t tmpfs -o size=1m,mode=777 tmpfs /small", user="root")
    status, _, answer = raw(node, box, "POST", "/files?path=/small/f", bytes(2 << 20), Content_Type="application/octet-stream")
    assert (status, json.loads(answer)["code"]) == (507, 507)
    assert "no space" in json.loads(answer)["message"]
    box.commands.run("umount /small", user="root")


# --- B09 ---------------------------------------------------------------------------------------------------------------


def test_every_file_of_a_tree_made_at_once_is_seen(box):
    """By a create event, or by an error that says to look again."""
    box.commands.run("mkdir -p /home/user/w")
    watch = box.files.watch_dir("/home/user/w", recursive=True)
    rounds, files = 10, 100
    wanted = {f"r{index}/b/c/{number}" for index in range(rounds) for number in range(1, files + 1)}
    box.commands.run(f"for i in $(seq 0 {rounds - 1}); do mkdir -p w/r$i/b/c && touch w/r$i/b/c/{{1..{files}}}; done")
    seen: set[str] = set()

    def complete() -> bool:
        seen.update(event.name for event in watch.get_new_events() if event.type == FilesystemEventType.CREATE)
        return wanted <= seen

    wait_for(complete, "files were missed")
    watch.stop()


def test_the_watched_folder_itself(box):
    for command, last in (("mv wr wr-moved", FilesystemEventType.RENAME), ("rm -rf wr", FilesystemEventType.REMOVE)):
        box.commands.run("mkdir -p wr; touch wr/f")
        watch = box.files.watch_dir("/home/user/wr")
        box.commands.run(command)
        events = []

        def told(watch=watch, events=events, last=last) -> bool:
            events.extend(watch.get_new_events())
            return any((event.name, event.type) == (".", last) for event in events)

        wait_for(told, f"nothing was said about {command}")
        box.commands.run("mkdir -p wr; touch wr/later")
        assert watch.get_new_events() == [], "a watch went on in another folder"
        watch.stop()
    assert box.files.get_info("wr").type == FileType.DIR


def test_a_watch_outlives_a_pause(sandbox):
    sandbox.commands.run("mkdir -p /home/user/w")
    watch = sandbox.files.watch_dir("/home/user/w", recursive=True)
    sandbox.commands.run("touch w/before")
    sandbox.pause()
    sandbox.connect(timeout=600)
    sandbox.commands.run("mkdir -p w/deep; touch w/deep/after")
    names: set[str] = set()

    def told() -> bool:
        names.update(event.name for event in watch.get_new_events())
        return names >= {"before", "deep", "deep/after"}

    wait_for(told, "the watch is gone")
    watch.stop()
