"""The volume server against a client that is honest, and one that is not."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nfs_client as nfs
import pytest
from nfs_client import NfsClient, Refused, opaque, u32, u64

from agentenv.host import native

OUTSIDE = "this is the host's"
Connect = Callable[..., NfsClient]


class Volumed:
    """A running server of the folders `one` and `two`."""

    def __init__(self, folder: Path, keys: tuple[str, str] = ("k1", "k2"), reserve_mb: int = 0) -> None:
        self.folder = folder
        exports = [{"name": n, "folder": str(folder / n), "key": k} for n, k in zip(("one", "two"), keys, strict=True)]
        (folder / "exports.json").write_text(json.dumps(exports))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = probe.getsockname()[:2]
        self.reserve_mb = reserve_mb
        self.start()

    def start(self) -> None:
        listen = "{}:{}".format(*self.address)
        argv = [native.program("volumed"), "--listen", listen, "--exports", "exports.json", "--reserve-mb", str(self.reserve_mb)]
        self.process = subprocess.Popen(argv, cwd=self.folder, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()  # it listens before it says so

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two", "host"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "host" / "file").write_text(OUTSIDE)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Volumed]:
    server = Volumed(folder)
    yield server
    server.stop()


@pytest.fixture
def connect(server: Volumed) -> Iterator[Connect]:
    clients: list[NfsClient] = []

    def make(uid: int = 0, gid: int = 0, groups: tuple[int, ...] = ()) -> NfsClient:
        clients.append(NfsClient(server.address, uid, gid, groups))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Connect) -> NfsClient:
    return connect()


@pytest.fixture
def root(client: NfsClient) -> bytes:
    handle = client.mount("/one")
    assert handle is not None
    return handle


# -- an honest client


def test_a_file_is_made_written_read_and_removed(client: NfsClient, root: bytes, folder: Path):
    status, file = client.create(root, b"a", 0o640)
    assert status == nfs.OK
    assert client.write(file, b"hello", stable=2) == nfs.OK
    assert client.write(file, b"world", offset=5) == nfs.OK
    assert client.commit(file) == nfs.OK
    assert client.read(file) == (nfs.OK, b"helloworld", True)
    assert client.read(file, 2, 3) == (nfs.OK, b"llo", False)
    assert client.read(file, 99) == (nfs.OK, b"", True)
    assert (folder / "one" / "a").read_text() == "helloworld"
    status, facts = client.getattr(file)
    assert (facts.kind, facts.mode, facts.size, facts.links) == (1, 0o640, 10, 1)
    assert client.lookup(root, b"a") == (nfs.OK, file)
    assert client.remove(root, b"a") == nfs.OK
    assert client.lookup(root, b"a")[0] == nfs.NO_ENTRY
    assert client.getattr(file)[0] == nfs.STALE
    assert client.fsinfo(root) == nfs.OK


def test_folders_links_and_moves(client: NfsClient, root: bytes, folder: Path):
    _, below = client.mkdir(root, b"d", 0o750)
    assert client.mkdir(root, b"d")[0] == nfs.EXISTS
    _, file = client.create(below, b"f")
    assert client.rename(below, b"f", root, b"g") == nfs.OK
    assert client.link(file, below, b"h") == nfs.OK
    assert client.getattr(file)[1].links == 2
    _, link = client.symlink(root, b"l", b"/etc/passwd")
    assert client.readlink(link) == (nfs.OK, b"/etc/passwd")
    assert client.getattr(link)[1].kind == 5
    assert client.rmdir(root, b"d") == nfs.NOT_EMPTY
    assert client.remove(root, b"d") in (nfs.IS_FOLDER, nfs.PERMISSION)
    assert client.remove(below, b"h") == nfs.OK
    assert client.rmdir(root, b"d") == nfs.OK
    assert sorted(os.listdir(folder / "one")) == ["g", "l"]  # noqa: PTH208


@pytest.mark.parametrize("plus", [False, True])
def test_a_large_folder_is_read_whole(client: NfsClient, root: bytes, folder: Path, plus: bool):
    names = {f"{number:04}-{'x' * (number % 90)}" for number in range(1500)}
    for name in names:
        (folder / "one" / name).touch()
    status, found = client.readdir(root, plus=plus)
    assert (status, {os.fsdecode(name) for name in found}) == (nfs.OK, names | {".", ".."})
    if plus:
        some = os.fsencode(sorted(names)[77])
        assert client.lookup(root, some)[1] == found[some]


def test_attributes_are_set(client: NfsClient, root: bytes):
    _, file = client.create(root, b"a")
    client.write(file, b"0123456789")
    assert client.setattr(file, nfs.sattr(mode=0o600, uid=7, gid=8, size=4)) == nfs.OK
    _, facts = client.getattr(file)
    assert (facts.mode, facts.uid, facts.gid, facts.size) == (0o600, 7, 8, 4)
    assert client.setattr(file, nfs.sattr(mode=0o644), u32(1, 1, 1)) == nfs.NOT_SYNCHRONISED
    guard = u32(1, *facts.times[4:])
    assert client.setattr(file, nfs.sattr(mode=0o644), guard) == nfs.OK
    times = u32(0, 0, 0, 0) + u32(2, 1_000_000, 5) + u32(2, 2_000_000, 6)
    assert client.setattr(file, times) == nfs.OK
    assert client.getattr(file)[1].times[:4] == [1_000_000, 5, 2_000_000, 6]


def test_kinds_of_creation(client: NfsClient, root: bytes):
    _, first = client.create(root, b"a", how=1)
    client.write(first, b"kept")
    assert client.create(root, b"a", how=1)[0] == nfs.EXISTS
    assert client.create(root, b"a", 0o600) == (nfs.OK, first)
    assert client.read(first)[1] == b"kept"
    _, exclusive = client.create(root, b"b", how=2, mark=b"12345678")
    assert client.create(root, b"b", how=2, mark=b"12345678") == (nfs.OK, exclusive)
    assert client.create(root, b"b", how=2, mark=b"87654321")[0] == nfs.EXISTS


def test_users_are_told_apart(connect: Connect, client: NfsClient, root: bytes):
    user, other, friend = connect(1000, 1000), connect(2000, 2000), connect(3000, 3000, (1000,))
    _, file = user.create(root, b"a", 0o640)
    user.write(file, b"private")
    _, facts = user.getattr(file)
    assert (facts.uid, facts.gid) == (1000, 1000)
    assert other.read(file)[0] == nfs.ACCESS
    assert friend.read(file)[:2] == (nfs.OK, b"private")
    assert friend.write(file, b"x") == nfs.ACCESS
    assert client.read(file)[:2] == (nfs.OK, b"private")
    assert other.setattr(file, nfs.sattr(mode=0o777)) == nfs.PERMISSION
    assert user.setattr(file, nfs.sattr(uid=0)) == nfs.PERMISSION
    assert [one.access(file)[1] & 0x05 for one in (user, other, friend)] == [0x05, 0, 0x01]
    _, below = user.mkdir(root, b"d", 0o700)
    assert other.lookup(below, b"x")[0] == nfs.ACCESS
    assert other.create(below, b"x")[0] == nfs.ACCESS
    assert other.readdir(below)[0] == nfs.ACCESS
    # After all that acting for users, root is root again on the same threads.
    assert client.setattr(file, nfs.sattr(uid=0)) == nfs.OK


def test_an_owner_goes_on_with_what_it_had_opened(connect: Connect, root: bytes):
    user = connect(1000, 1000)
    status, file = user.create(root, b"a", 0o400)
    assert status == nfs.OK
    assert user.write(file, b"first") == nfs.OK
    assert user.setattr(file, nfs.sattr(mode=0o000)) == nfs.OK
    assert user.read(file)[:2] == (nfs.OK, b"first")
    assert user.setattr(file, nfs.sattr(size=0)) == nfs.OK


def test_handles_outlive_the_server(server: Volumed, connect: Connect, root: bytes):
    _, file = connect().create(root, b"a")
    server.stop()
    server.start()
    again = NfsClient(server.address)
    assert again.getattr(file)[0] == again.getattr(root)[0] == nfs.OK
    assert again.lookup(root, b"a") == (nfs.OK, file)
    again.close()


def test_a_repeated_call_is_done_once(connect: Connect, root: bytes):
    first, second = connect(), connect()
    first.create(root, b"a", xid=700)
    first.write(first.lookup(root, b"a")[1], b"kept")
    assert first.remove(root, b"a", xid=701) == nfs.OK
    assert second.remove(root, b"a", xid=701) == nfs.OK  # as after a lost answer
    assert second.remove(root, b"a", xid=702) == nfs.NO_ENTRY


def test_large_transfers(client: NfsClient, root: bytes, folder: Path):
    _, file = client.create(root, b"a")
    data = os.urandom(1 << 20)
    for part in range(3):
        assert client.write(file, data, offset=part << 20) == nfs.OK
    assert (folder / "one" / "a").read_bytes() == data * 3
    assert client.read(file, 1 << 20, 1 << 31)[1] == data


def test_a_nearly_full_disk_takes_nothing_more(folder: Path):
    server = Volumed(folder, reserve_mb=1 << 40)
    client = NfsClient(server.address)
    root = client.mount("/one")
    try:
        assert client.create(root, b"a")[0] == nfs.NO_SPACE
        (folder / "one" / "a").write_text("there")
        _, file = client.lookup(root, b"a")
        assert client.write(file, b"x") == nfs.NO_SPACE
        assert client.setattr(file, nfs.sattr(size=1 << 40)) == nfs.NO_SPACE
        assert client.setattr(file, nfs.sattr(size=0)) == nfs.OK
        assert client.remove(root, b"a") == nfs.OK
    finally:
        client.close()
        server.stop()


# -- a hostile one


def test_only_whole_names_are_mounted(client: NfsClient):
    for path in ("/", "", "/one/", "/one/..", "one/../two", "/host", "/../host", "/one\0"):
        assert client.mount(path) is None, path
    assert client.mount("one") == client.mount("/one")
    assert client.call(nfs.MOUNT, 5, b"").data == u32(0)  # says not even what there is


def test_no_name_leads_out(client: NfsClient, root: bytes, folder: Path):
    _, below = client.mkdir(root, b"d")
    _, facts = client.getattr(root)
    status, upper = client.lookup(below, b"..")
    assert (status, client.getattr(upper)[1].fileid) == (nfs.OK, facts.fileid)
    status, top = client.lookup(root, b"..")
    assert (status, client.getattr(top)[1].fileid) == (nfs.OK, facts.fileid)
    for name in (b"../host", b"d/..", b"/", b"/etc/passwd", b"", b"a\0b"):
        assert client.lookup(root, name)[0] == nfs.INVALID, name
        assert client.create(root, name)[0] == nfs.INVALID
        assert client.remove(root, name) == nfs.INVALID
    for name in (b".", b".."):
        assert client.create(root, name)[0] == nfs.INVALID
        assert client.rmdir(root, name) == nfs.INVALID
        assert client.rename(root, name, below, b"x") == nfs.INVALID
        assert client.rename(below, b"x", root, name) == nfs.INVALID
    assert client.lookup(root, b"n" * 256)[0] == nfs.NAME_TOO_LONG
    assert (folder / "host" / "file").read_text() == OUTSIDE


def test_no_link_is_followed(client: NfsClient, root: bytes, folder: Path):
    _, link = client.symlink(root, b"l", os.fsencode(folder / "host"))
    _, to_file = client.symlink(root, b"f", os.fsencode(folder / "host" / "file"))
    for handle in (link, to_file):
        assert client.lookup(handle, b"file")[0] == nfs.NOT_FOLDER
        assert client.read(handle)[0] == nfs.INVALID
        assert client.write(handle, b"x") == nfs.INVALID
        assert client.create(handle, b"x")[0] == nfs.NOT_FOLDER
        assert client.readdir(handle)[0] == nfs.NOT_FOLDER
        assert client.setattr(handle, nfs.sattr(size=0)) == nfs.INVALID
        client.setattr(handle, nfs.sattr(mode=0o777, uid=5))
    assert client.create(root, b"f")[0] == nfs.OK  # opens what is there: the link itself
    facts = (folder / "host" / "file").stat()
    assert ((folder / "host" / "file").read_text(), facts.st_uid, stat.S_IMODE(facts.st_mode) & 0o111) == (OUTSIDE, 0, 0)
    assert client.getattr(link)[1].uid == 5


def test_no_handle_is_made_up(client: NfsClient, root: bytes, folder: Path):
    inode = (folder / "host" / "file").stat().st_ino
    forged = [
        b"",
        root[:-1],
        root + b"\0",
        bytes(len(root)),
        root[:8] + bytes([8]) + root[9:13] + struct.pack("<II", inode, 0) + root[-16:],
        *(root[:at] + bytes([root[at] ^ 1]) + root[at + 1 :] for at in range(len(root))),
    ]
    for handle in forged:
        assert client.getattr(handle)[0] in (nfs.BAD_HANDLE, nfs.STALE)
        assert client.lookup(handle, b"file")[0] in (nfs.BAD_HANDLE, nfs.STALE)
    with pytest.raises(Refused):
        client.getattr(b"x" * 65)


def test_a_handle_is_of_one_volume(client: NfsClient, root: bytes, folder: Path):
    other = client.mount("/two")
    assert other is not None
    client.create(other, b"a")
    _, foreign = client.lookup(other, b"a")
    assert client.link(foreign, root, b"a") == nfs.CROSS_DEVICE
    assert client.rename(other, b"a", root, b"a") == nfs.CROSS_DEVICE
    # A server with another key for the volume, as another sandbox's volume of the same name would have.
    server = Volumed(folder, keys=("another", "k2"))
    stranger = NfsClient(server.address)
    try:
        assert stranger.getattr(root)[0] == nfs.BAD_HANDLE
        assert stranger.getattr(other)[0] == nfs.OK
    finally:
        stranger.close()
        server.stop()


def test_device_nodes_are_neither_made_nor_opened(client: NfsClient, root: bytes, folder: Path):
    for kind in (3, 4):
        assert client.mknod(root, b"null", kind)[0] == nfs.PERMISSION
    assert client.mknod(root, b"x", 1)[0] == nfs.BAD_TYPE
    assert client.mknod(root, b"pipe", 7)[0] == client.mknod(root, b"socket", 6)[0] == nfs.OK
    os.mknod(folder / "one" / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    for name in (b"pipe", b"socket", b"zero"):
        _, handle = client.lookup(root, name)
        assert client.read(handle)[0] != nfs.OK
        assert client.write(handle, b"x") != nfs.OK
        assert client.setattr(handle, nfs.sattr(size=0)) != nfs.OK
        assert client.commit(handle) != nfs.OK


def test_the_server_keeps_few_privileges(server: Volumed):
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines() if ":\t" in line)
    kept = {0, 1, 2, 3, 4, 6, 7}  # over files, and over whom it acts for
    assert int(status["CapPrm"], 16) == int(status["CapBnd"], 16) & sum(1 << number for number in kept)
    assert status["NoNewPrivs"].strip() == "1"


def test_malformed_calls_get_an_answer_or_a_closed_connection(connect: Connect, root: bytes):
    client = connect()
    for arguments in (b"", u32(64), opaque(root) + u32(5) + b"abc", u32(0xFFFFFFFF)):
        with pytest.raises(Refused, match="4"):
            client.call(nfs.NFS, 3, arguments)
    for (program, procedure, version), refusal in {
        (nfs.NFS, 22, 3): "3",
        (nfs.NFS, 1, 4): "2",
        (100227, 1, 3): "1",
        (nfs.MOUNT, 9, 3): "3",
    }.items():
        with pytest.raises(Refused, match=refusal):
            client.call(program, procedure, b"", version)
    for record in (b"", u32(1, 1), u32(1, 0, 3, 0, 0, 0)):
        other = connect()
        other.send_raw(record)
        with pytest.raises(ConnectionError):
            other.receive()
    other = connect()
    other.socket.sendall(u32(0x80000000 | (2 << 20)))
    with pytest.raises(ConnectionError):
        other.receive()
    assert client.getattr(root)[0] == nfs.OK


def test_noise_breaks_nothing(server: Volumed, connect: Connect, root: bytes, folder: Path):
    """Honest calls with random bytes changed: the server lives on, and nothing outside changes."""
    rng = random.Random(20)
    client = connect(1000, 1000)
    _, file = client.create(root, b"a")
    honest = [
        (2, opaque(file) + nfs.sattr(mode=0o644) + u32(0)),
        (3, opaque(root) + opaque(b"a")),
        (6, opaque(file) + u64(0) + u32(100)),
        (7, opaque(file) + u64(0) + u32(4, 0) + opaque(b"data")),
        (8, opaque(root) + opaque(b"b") + u32(0) + nfs.sattr(0o644)),
        (10, opaque(root) + opaque(b"l") + nfs.sattr() + opaque(b"../host/file")),
        (14, opaque(root) + opaque(b"b") + opaque(root) + opaque(b"c")),
        (16, opaque(root) + u64(0) + u64(0) + u32(4096)),
        (17, opaque(root) + u64(0) + u64(0) + u32(4096, 4096)),
    ]
    for _ in range(2000):
        procedure, arguments = rng.choice(honest)
        noisy = bytearray(arguments)
        for _ in range(rng.randint(0, 3)):
            noisy[rng.randrange(len(noisy))] = rng.randrange(256)
        with suppress(Refused):
            client.call(nfs.NFS, procedure, bytes(noisy[: rng.choice([len(noisy), rng.randrange(len(noisy) + 1)])]))
    assert server.process.poll() is None
    assert sorted(path.name for path in (folder / "host").iterdir()) == ["file"]
    assert (folder / "host" / "file").read_text() == OUTSIDE


def test_connections_have_a_limit(server: Volumed, root: bytes):
    clients = []
    try:
        for _ in range(40):
            clients.append(NfsClient(server.address))
        answered = 0
        for one in clients:
            with suppress(ConnectionError, OSError):
                answered += one.getattr(root)[0] == nfs.OK
        assert 1 <= answered <= 16
    finally:
        for one in clients:
            one.close()
    end = time.monotonic() + 20
    while True:  # closed ones make room
        one = NfsClient(server.address)
        with suppress(ConnectionError, OSError):
            assert one.getattr(root)[0] == nfs.OK
            one.close()
            break
        one.close()
        assert time.monotonic() < end
        time.sleep(0.05)
