"""Every call in both encodings, compressed or not, by an independent client of the protocol (contract section 3.3)."""

import base64
import gzip
import http.client
import json
import struct

import pytest
from connectrpc.codec import proto_binary_codec, proto_json_codec
from connectrpc.compression.gzip import GzipCompression
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_pb as fs
from e2b.envd.filesystem.filesystem_connect import FilesystemClientSync
from e2b.envd.process import process_pb as ps
from e2b.envd.process.process_connect import ProcessClientSync
from envd_rig import Stream, frame
from protobuf import Oneof

CODECS = {"proto": proto_binary_codec, "json": proto_json_codec}
MIXED = bytes(range(256)) * 40
JSON_STREAM = "application/connect+json"


class Clients:
    """Both services in one format."""

    def __init__(self, envd, codec, is_packed):
        packing = GzipCompression() if is_packed else None
        options = {"codec": CODECS[codec](), "send_compression": packing, "accept_compression": [packing] if packing else []}
        self.processes = ProcessClientSync(envd.url, timeout_ms=60_000, **options)
        self.files = FilesystemClientSync(envd.url, timeout_ms=60_000, **options)

    def start(self, cmd, *args, **more):
        config = ps.ProcessConfig(cmd=cmd, args=list(args), envs=more.pop("envs", None), cwd=more.pop("cwd", None))
        return self.processes.start(ps.StartRequest(process=config, **more))


FORMATS = [(codec, is_packed) for codec in CODECS for is_packed in (False, True)]


@pytest.fixture(params=FORMATS, ids=lambda given: f"{given[0]}-{'gzip' if given[1] else 'plain'}")
def clients(request, envd):
    return Clients(envd, *request.param)


def kind(message):
    return message.event.event.field


def value(message):
    return message.event.event.value


def by_pid(pid):
    return ps.ProcessSelector(selector=Oneof("pid", pid))


def output(messages, name):
    return b"".join(value(m).output.value for m in messages if kind(m) == "data" and value(m).output.field == name)


def test_a_command(clients):
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 40); sys.stderr.write('e' * 3000); sys.exit(5)"
    messages = list(clients.start("python3", "-c", script, stdin=False, tag="t", envs={"A": "b"}))
    kinds = [kind(message) for message in messages]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert output(messages, "stdout") == MIXED
    assert output(messages, "stderr") == b"e" * 3000
    end = value(messages[-1])
    assert (end.exit_code, end.exited, end.status, end.error) == (5, True, "exit status 5", "exit status 5")
    end = value(list(clients.start("/bin/sh", "-c", "kill -9 $$"))[-1])
    assert (end.exit_code, end.exited, end.error) == (-1, False, "signal: killed")


def test_input_list_signal_and_late_connect(clients):
    stream = clients.start("/bin/cat", stdin=True, tag="typed", cwd="/tmp", envs={"A": "b"})
    pid = value(next(stream)).pid
    [listed] = [process for process in clients.processes.list(ps.ListRequest()).processes if process.pid == pid]
    assert (listed.config.cmd, listed.config.envs, listed.config.cwd, listed.tag) == ("/bin/cat", {"A": "b"}, "/tmp", "typed")
    given = ps.ProcessInput(input=Oneof("stdin", MIXED))
    clients.processes.send_input(ps.SendInputRequest(process=by_pid(pid), input=given))
    pieces = [
        ps.StreamInputRequest(event=Oneof("start", ps.StreamInputRequest.StartEvent(process=by_pid(pid)))),
        ps.StreamInputRequest(event=Oneof("keepalive", ps.StreamInputRequest.KeepAlive())),
        ps.StreamInputRequest(event=Oneof("data", ps.StreamInputRequest.DataEvent(input=given))),
    ]
    clients.processes.stream_input(iter(pieces))
    clients.processes.close_stdin(ps.CloseStdinRequest(process=by_pid(pid)))
    assert output(list(stream), "stdout") == MIXED * 2
    late = list(clients.processes.connect(ps.ConnectRequest(process=by_pid(pid))))
    assert [kind(message) for message in late] == ["start", "end"]
    sleeper = clients.start("/bin/sleep", "60")
    pid = value(next(sleeper)).pid
    clients.processes.send_signal(ps.SendSignalRequest(process=by_pid(pid), signal=ps.Signal.SIGTERM))
    assert value(list(sleeper)[-1]).status == "signal: terminated"
    with pytest.raises(ConnectError, match=f"process with pid {pid} not found") as missing:
        clients.processes.send_signal(ps.SendSignalRequest(process=by_pid(pid), signal=ps.Signal.SIGKILL))
    assert missing.value.code.value == "not_found"
    with pytest.raises(ConnectError, match="no signal"):
        clients.processes.send_signal(ps.SendSignalRequest(process=by_pid(pid)))


def test_a_terminal(clients):
    stream = clients.start("/bin/sh", pty=ps.PTY(size=ps.PTY.Size(cols=101, rows=33)))
    pid = value(next(stream)).pid
    clients.processes.update(ps.UpdateRequest(process=by_pid(pid), pty=ps.PTY(size=ps.PTY.Size(cols=132, rows=43))))
    given = ps.ProcessInput(input=Oneof("pty", b"stty size; exit\n"))
    clients.processes.send_input(ps.SendInputRequest(process=by_pid(pid), input=given))
    assert b"43 132" in output(list(stream), "pty")


def test_files(clients):
    calls = clients.files
    made = calls.make_dir(fs.MakeDirRequest(path="encodings/deep")).entry
    assert (made.name, made.type, made.mode, made.owner) == ("deep", fs.FileType.DIRECTORY, 0o755, "user")
    moved = calls.move(fs.MoveRequest(source="encodings/deep", destination="encodings/moved")).entry
    assert moved.path == "/home/user/encodings/moved"
    list(clients.start("/bin/sh", "-c", "cd encodings; for i in $(seq 100); do echo > file$i; done; ln -s file1 link"))
    entries = {entry.name: entry for entry in calls.list_dir(fs.ListDirRequest(path="encodings", depth=2)).entries}
    assert len(entries) == 102
    link = entries["link"]
    assert (link.type, link.is_symlink, link.symlink_target) == (fs.FileType.FILE, True, "/home/user/encodings/file1")
    about = calls.stat(fs.StatRequest(path="encodings/file7")).entry
    assert (about.size, about.permissions, about.group) == (1, "-rw-r--r--", "user")
    assert abs(about.modified_time.to_datetime().timestamp() - entries["file1"].modified_time.to_datetime().timestamp()) < 60
    calls.remove(fs.RemoveRequest(path="encodings"))
    with pytest.raises(ConnectError, match="does not exist"):
        calls.stat(fs.StatRequest(path="encodings"))


def test_watches(clients):
    calls = clients.files
    calls.make_dir(fs.MakeDirRequest(path="/tmp/envd-encodings"))
    try:
        watcher = calls.create_watcher(fs.CreateWatcherRequest(path="/tmp/envd-encodings", include_entry=True)).watcher_id
        stream = calls.watch_dir(fs.WatchDirRequest(path="/tmp/envd-encodings", recursive=True))
        assert next(stream).event.field == "start"
        list(clients.start("/bin/sh", "-c", "echo hi > /tmp/envd-encodings/new"))
        first = next(stream).event
        assert (first.field, first.value.name, first.value.type) == ("filesystem", "new", fs.EventType.CREATE)
        events = calls.get_watcher_events(fs.GetWatcherEventsRequest(watcher_id=watcher)).events
        assert [(event.name, event.type) for event in events][:1] == [("new", fs.EventType.CREATE)]
        assert (events[-1].entry.path, events[-1].entry.type) == ("/tmp/envd-encodings/new", fs.FileType.FILE)
        calls.remove_watcher(fs.RemoveWatcherRequest(watcher_id=watcher))
    finally:
        calls.remove(fs.RemoveRequest(path="/tmp/envd-encodings"))


def frames(body):
    """(flags, payload) of each frame."""
    found = []
    while body:
        flags, length = struct.unpack(">BI", body[:5])
        found.append((flags, body[5 : 5 + length]))
        body = body[5 + length :]
    return found


COMMAND = {"process": {"cmd": "/bin/sh", "args": ["-c", "seq 1 3000"]}, "stdin": False}


def stream_call(envd, **headers):
    headers = {"Content-Type": JSON_STREAM} | {name.replace("_", "-"): text for name, text in headers.items()}
    status, answered, body = envd.request("POST", "/process.Process/Start", frame(COMMAND), headers)
    assert status == 200
    return answered, frames(body)


def test_streams_are_compressed_only_when_asked_for(envd):
    """Contract section 1.5: what a library always sends in Accept-Encoding must not compress events."""
    for headers in ({}, {"Accept_Encoding": "gzip"}, {"Accept_Encoding": "zstd,gzip,br", "Connect_Accept_Encoding": "identity"}):
        answered, found = stream_call(envd, **headers)
        assert "connect-content-encoding" not in answered
        assert "content-encoding" not in answered
        assert {flags for flags, _ in found} == {0, 2}
    answered, found = stream_call(envd, Connect_Accept_Encoding="br, gzip")
    assert answered["connect-content-encoding"] == "gzip"
    assert found[0][0] == 0, "a small message grew"
    packed = [payload for flags, payload in found if flags == 1]
    text = b"".join(base64.b64decode(json.loads(gzip.decompress(payload))["event"]["data"]["stdout"]) for payload in packed)
    assert len(text) > 10_000
    assert found[-1] == (2, b"{}")


def test_unknown_compressions_are_refused(envd):
    _, found = stream_call(envd, Connect_Content_Encoding="zstd")
    assert json.loads(found[0][1])["error"]["code"] == "unimplemented"
    status, _, body = envd.request("POST", "/process.Process/List", b"{}", {"Content-Type": "application/json", "Content-Encoding": "br"})
    assert (status, json.loads(body)["code"]) == (501, "unimplemented")
    assert b"gzip" in body
    for flags in (0x01, 0x40, 0x80):
        body = struct.pack(">BI", flags, 2) + b"{}"
        _, _, answer = envd.request("POST", "/process.Process/Start", body, {"Content-Type": JSON_STREAM})
        assert json.loads(frames(answer)[0][1])["error"]["code"] == "invalid_argument"


def test_unary_answers_are_compressed_by_weight(envd):
    stream = envd.shell("sleep 60", envs={"LONG": "x" * 5000})
    pid = stream.pid()
    for accepted, is_packed in (("gzip", True), ("gzip, deflate", False), ("identity", False), ("gzip;q=0", False)):
        headers = {"Content-Type": "application/json", "Accept-Encoding": accepted}
        status, answered, body = envd.request("POST", "/process.Process/List", b"{}", headers)
        assert (status, answered.get("content-encoding") == "gzip") == (200, is_packed), accepted
        assert str(pid).encode() in (gzip.decompress(body) if is_packed else body)
    small = envd.request("POST", "/filesystem.Filesystem/Remove", b"{}", {"Content-Type": "application/json", "Accept-Encoding": "gzip"})
    assert "content-encoding" not in small[1]
    envd.call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9})
    stream.result()


def test_bombs_are_refused_with_little_memory(envd):
    before_bytes = envd.rss_bytes()
    bomb = gzip.compress(b'{"process":' + b" " * (64 << 20) + b"}", 6)
    status, _, body = envd.request("POST", "/process.Process/List", bomb, {"Content-Type": "application/json", "Content-Encoding": "gzip"})
    assert (status, json.loads(body)["code"]) == (429, "resource_exhausted")
    packed = struct.pack(">BI", 1, len(bomb)) + bomb
    headers = {"Content-Type": JSON_STREAM, "Connect-Content-Encoding": "gzip"}
    _, _, answer = envd.request("POST", "/process.Process/Start", packed, headers)
    assert json.loads(frames(answer)[0][1])["error"]["code"] == "resource_exhausted"
    assert envd.rss_bytes() - before_bytes < 64 << 20


def test_media_types(envd):
    for path, given, known in (
        ("/process.Process/List", "application/grpc", "application/json, application/proto"),
        ("/process.Process/Start", "application/json", "application/connect+json, application/connect+proto"),
    ):
        status, answered, _ = envd.request("POST", path, b"{}", {"Content-Type": given})
        assert (status, answered["accept-post"]) == (415, known)
    message = ps.StartRequest(process=ps.ProcessConfig(cmd="true")).to_binary()
    connection = http.client.HTTPConnection("127.0.0.1", envd.port, timeout=20)
    connection.request("POST", "/process.Process/Start", frame(message), {"Content-Type": "application/connect+proto"})
    reply = connection.getresponse()
    assert reply.headers["Content-Type"] == "application/connect+proto"
    found = frames(reply.read())
    assert ps.StartResponse.from_binary(found[0][1]).event.event.field == "start"
    assert found[-1] == (2, b"{}"), "the end frame is JSON in every encoding"


def test_a_timeout_of_zero_is_none(envd):
    """Case A06: 0 means no limit, as in the clients' own option."""
    headers = {"Connect-Timeout-Ms": "0"}
    assert envd.shell("sleep 0.5; echo ok", headers=headers).result().stdout == b"ok\n"
    assert envd.call("process.Process/List", headers=headers)[0] == 200
    for bad in ("-1", "x", "1.5"):
        assert envd.call("process.Process/List", headers={"Connect-Timeout-Ms": bad})[0] == 400


def test_a_message_larger_than_the_limit_is_told_so(envd):
    body = b'{"process":{"cmd":"' + b"x" * (17 << 20) + b'"}}'
    status, _, answer = envd.request("POST", "/process.Process/List", body, {"Content-Type": "application/json"})
    assert (status, json.loads(answer)["code"]) == (429, "resource_exhausted")
    assert Stream(envd.port, "process.Process/Start", body, {}, 60).error()["code"] == "resource_exhausted"
