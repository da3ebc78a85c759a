"""REST files: upload, download, conditions, encodings, compose."""

import functools
import gzip
import hashlib
import http.client
import json
import os
import threading
import time
from urllib.parse import quote

import pytest
from envd_rig import USER_ID, multipart

OCTETS = {"Content-Type": "application/octet-stream"}


def put(envd, path, data, user=None, **headers):
    query = f"/files?path={quote(path)}" + (f"&username={user}" if user else "")
    return envd.request("POST", query, data, {**OCTETS, **headers})


def get(envd, path, user=None, **headers):
    query = f"/files?path={quote(path)}" + (f"&username={user}" if user else "")
    return envd.request("GET", query, None, {name.replace("_", "-"): value for name, value in headers.items()})


def message(body):
    return json.loads(body)["message"]


SIZES = [0, 1, 4095, 4096, 4097, 16383, 16385, 18432, 65535, 65537, 131071, 131072, 131073, 1 << 20, 5_000_001]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_every_size_comes_back(envd, size_bytes):
    """Case B01, by both upload forms."""
    data = os.urandom(size_bytes)
    path = f"/home/user/sizes/{size_bytes}"
    status, _, body = put(envd, path, data)
    assert (status, json.loads(body)) == (200, [{"path": path, "name": str(size_bytes), "type": "file"}])
    assert get(envd, path)[2] == data
    body, headers = multipart(('name="file"', data))
    assert envd.request("POST", f"/files?path={path}-m", body, headers)[0] == 200
    status, headers, body = get(envd, path + "-m")
    assert (status, body) == (200, data)
    if size_bytes:
        assert headers["content-length"] == str(size_bytes)
    assert envd.run(f"sha256sum < {path}").stdout.decode().split()[0] == hashlib.sha256(data).hexdigest()


def test_chunked_upload_and_expect_continue(envd):
    connection = http.client.HTTPConnection("127.0.0.1", envd.port, timeout=20)
    connection.request("POST", "/files?path=chunked", iter([b"ab", b"c" * 70_000, b"d"]), OCTETS, encode_chunked=True)
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())[0]["path"]) == (200, "/home/user/chunked")
    connection.putrequest("POST", "/files?path=expect")
    for name, value in {**OCTETS, "Content-Length": "3", "Expect": "100-continue"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    line = connection.sock.recv(64)
    assert line.startswith(b"HTTP/1.1 100")
    connection.send(b"xyz")
    assert connection.getresponse().status == 200
    assert get(envd, "expect")[2] == b"xyz"


def test_paths_are_read_by_the_rules(fresh):
    fresh.init(defaultWorkdir="/var/tmp")
    for given, real in (("rel/a", "/home/user/rel/a"), ("~/b", "/home/user/b"), ("/tmp/../home/user/c", "/home/user/c")):
        status, _, body = put(fresh, given, b"x")
        assert (status, json.loads(body)[0]["path"]) == (200, real)
    status, _, body = put(fresh, "~other/x", b"x")
    assert status == 400
    status, _, body = get(fresh, "")
    assert (status, message(body)) == (400, "path '/var/tmp' is a directory")


def test_new_files_and_folders_belong_to_the_user(envd):
    """Case A16."""
    assert put(envd, "own/deep/file", b"x")[0] == 200
    for path, mode in (("own", 0o755), ("own/deep", 0o755), ("own/deep/file", 0o644)):
        info = envd.path(f"/home/user/{path}").stat()
        assert (info.st_uid, info.st_gid, info.st_mode & 0o777) == (USER_ID, USER_ID, mode)
    assert envd.run("echo more >> own/deep/file; cat own/deep/file").stdout == b"xmore\n"
    assert put(envd, "/home/user/own/deep/file", b"z", user="root")[0] == 200
    assert envd.path("/home/user/own/deep/file").stat().st_uid == USER_ID


def test_uploads_have_the_rights_of_the_user(envd):
    """Case B08: a planted link leads nowhere the user could not go."""
    assert envd.run("mkdir -p up; ln -s /etc/shadow up/a; ln -s /root up/d; ln -s /etc/hostname up/h").code == 0
    before = envd.path("/etc/shadow").read_bytes()
    for path in ("up/a", "up/d/x", "up/d/new/x", "up/h"):
        status, _, body = put(envd, path, b"x")
        assert (status, "permission denied" in message(body)) == (403, True), path
    assert envd.path("/etc/shadow").read_bytes() == before
    assert get(envd, "up/a")[0] == 403
    assert get(envd, "/etc/shadow", user="root")[2] == before


def test_what_is_no_file_is_refused_without_waiting(envd):
    """Case L04."""
    envd.run("mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'; mkdir folder")
    before = time.monotonic()
    for path in ("pipe", "sock", "folder", "/dev/zero", "/dev/null"):
        target = f"/home/user/{path}" if path[0] != "/" else path
        assert get(envd, target)[0] == 400, path
        assert put(envd, target, b"x", user="root")[0] == 400, path
    assert time.monotonic() - before < 5
    status, _, body = get(envd, "nope")
    assert (status, json.loads(body)) == (404, {"code": 404, "message": "path '/home/user/nope' does not exist"})
    assert get(envd, "folder/../pipe/x")[0] == 400
    status, _, body = get(envd, "x", user="nobody-here")
    assert status == 401
    assert message(body).startswith("error looking up user")


NAMES = ["a b", "ü", "日本", "%2e%2e", 'a"b', "a\\", "a'b", "a#b?c&d=e", "-rf", ".hidden", "n" * 255, "a\nb", "a;b=c", "a\\b"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_odd_names_round_trip(envd, name):
    """Case B04, as httpx and browsers write them."""
    data = name.encode()
    escaped = name.replace("\\", "\\\\").replace('"', "%22").replace("\n", "%0A")
    body, headers = multipart((f'name="file"; filename="/home/user/odd/{escaped}"', data))
    status, _, answer = envd.request("POST", "/files", body, headers)
    assert status == 200, answer
    assert json.loads(answer)[0] == {"path": f"/home/user/odd/{name}", "name": name, "type": "file"}
    status, headers, body = get(envd, f"odd/{name}")
    assert (status, body) == (200, data)
    assert headers["content-disposition"].startswith("inline; filename=")
    assert (envd.path("/home/user/odd") / name).exists()


def test_multipart_variants(envd):
    body, headers = multipart(
        ('name="other"; filename="ignored"', b"no"),
        ('name="file"; filename="m/one"', b"1" * 200_000 + b"\r\n--edg\r\n--edge"[:9]),
        ('name="file"; filename="/home/user/m/two"', b""),
        ('name="file"; filename="m/three"', b"\r\n\r\n--"),
    )
    status, _, answer = envd.request("POST", "/files", body, headers)
    assert status == 200, answer
    assert [entry["name"] for entry in json.loads(answer)] == ["one", "two", "three"]
    assert get(envd, "m/one")[2] == b"1" * 200_000 + b"\r\n--edg\r\n"
    assert get(envd, "m/two")[2] == b""
    assert get(envd, "m/three")[2] == b"\r\n\r\n--"


def test_multipart_is_read_the_same_in_any_pieces(envd):
    body, headers = multipart(('name="file"; filename="p/x"', b"\r\n--edg" * 3), ('name="file"; filename="p/y"', b"y" * 50))
    for size_bytes in (1, 2, 3, 7, 64):
        pieces = [body[at : at + size_bytes] for at in range(0, len(body), size_bytes)]
        connection = http.client.HTTPConnection("127.0.0.1", envd.port, timeout=20)
        connection.request("POST", "/files", iter(pieces), headers, encode_chunked=True)
        assert connection.getresponse().status == 200
        assert get(envd, "p/x")[2] == b"\r\n--edg" * 3
        assert get(envd, "p/y")[2] == b"y" * 50


def test_multipart_mistakes_are_named(envd):
    def refused(body, headers, words, query=""):
        status, _, answer = envd.request("POST", f"/files{query}", body, headers)
        assert status == 400, answer
        assert words in message(answer)

    one = ('name="file"; filename="dup"', b"1")
    refused(*multipart(one, one), "given twice")
    refused(*multipart(one, ('name="file"', b"2")), "given twice", "?path=dup")
    refused(*multipart(('name="file"', b"1")), "no filename")
    refused(*multipart(('name="x"', b"1")), "no part named 'file'")
    body, headers = multipart(one)
    refused(body[:-8], headers, "before its last boundary")
    refused(body, {"Content-Type": "multipart/form-data"}, "boundary")
    refused(b"x", {"Content-Type": "text/plain"}, "not supported", "?path=a")
    refused(b"x", OCTETS, "needs the query parameter path")
    refused(b"x", {**OCTETS, "Content-Encoding": "br"}, "br", "?path=a")
    refused(b"not gzip", {**OCTETS, "Content-Encoding": "gzip"}, "gzip", "?path=a")
    refused(gzip.compress(b"x" * 1000)[:-9], {**OCTETS, "Content-Encoding": "gzip"}, "gzip", "?path=a")


def test_a_refusal_of_a_large_upload_is_readable(envd):
    assert envd.run("ln -s /root large").code == 0
    status, _, body = put(envd, "large/no", b"x" * 20_000_000)
    assert (status, "permission denied" in message(body)) == (403, True)


def test_gzip_both_ways(envd):
    data = b"hello gzip " * 100_000
    assert put(envd, "packed", gzip.compress(data), Content_Encoding="x")[0] == 200
    assert put(envd, "packed", gzip.compress(data), **{"Content-Encoding": "gzip"})[0] == 200
    assert get(envd, "packed")[2] == data
    body, headers = multipart(('name="file"', data))
    packed = {**headers, "Content-Encoding": "gzip"}
    assert envd.request("POST", "/files?path=packed2", gzip.compress(body), packed)[0] == 200
    status, headers, body = get(envd, "packed2", Accept_Encoding="gzip")
    assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "Accept-Encoding")
    assert len(body) < len(data) // 10
    assert gzip.decompress(body) == data
    assert "content-encoding" not in get(envd, "packed2", Accept_Encoding="gzip", Range="bytes=0-3")[1]
    assert "content-encoding" not in get(envd, "packed2", Accept_Encoding="gzip;q=0")[1]
    assert get(envd, "packed2", Accept_Encoding="br, identity;q=0")[0] == 406
    assert put(envd, "empty", b"")[0] == 200
    assert gzip.decompress(get(envd, "empty", Accept_Encoding="gzip")[2]) == b""


def test_a_gzip_bomb_does_not_fill_memory(envd):
    bomb = gzip.compress(bytes(300_000_000), 9)
    before = envd.rss_bytes()
    assert put(envd, "/tmp/envd-bomb", bomb, **{"Content-Encoding": "gzip"})[0] == 200
    assert envd.rss_bytes() - before < 16 << 20
    assert envd.path("/tmp/envd-bomb").stat().st_size == 300_000_000
    envd.path("/tmp/envd-bomb").unlink()


def test_ranges_and_conditions(envd):
    put(envd, "letters.txt", b"abcdefghij")
    status, headers, body = get(envd, "letters.txt", Range="bytes=2-4")
    assert (status, headers["content-range"], headers["content-length"], body) == (206, "bytes 2-4/10", "3", b"cde")
    assert get(envd, "letters.txt", Range="bytes=-3")[2] == b"hij"
    status, headers, _ = get(envd, "letters.txt", Range="bytes=10-")
    assert (status, headers["content-range"]) == (416, "bytes */10")
    status, headers, body = get(envd, "letters.txt")
    assert (headers["accept-ranges"], headers["content-type"]) == ("bytes", "text/plain; charset=utf-8")
    assert headers["content-disposition"] == 'inline; filename="letters.txt"'
    modified = headers["last-modified"]
    status, headers, body = get(envd, "letters.txt", If_Modified_Since=modified)
    assert (status, body) == (304, b"")
    assert get(envd, "letters.txt", If_Unmodified_Since="Thu, 01 Jan 1970 00:00:00 GMT")[0] == 412
    status, headers, body = envd.request("HEAD", "/files?path=letters.txt")
    assert (status, headers["content-length"], body) == (200, "10", b"")


def test_all_byte_values(envd):
    """Case B06."""
    data = bytes(range(256)) * 4096
    put(envd, "bytes.bin", data)
    _, headers, body = get(envd, "bytes.bin")
    assert (body == data, headers["content-length"]) == (True, str(1 << 20))


def test_procfs_files_have_contents_though_their_size_is_zero(envd):
    status, headers, body = get(envd, "/proc/sys/kernel/random/boot_id")
    assert (status, len(body)) == (200, 37)
    assert "content-length" not in headers
    assert get(envd, "/proc/sys/kernel/random/boot_id", Range="bytes=0-1")[2] == body
    assert gzip.decompress(get(envd, "/proc/cpuinfo", Accept_Encoding="gzip")[2]).startswith(b"processor")


def test_metadata(envd):
    _, _, body = put(envd, "meta", b"x", **{"X-Metadata-Author": "me", "X-METADATA-two": "a b"})
    assert json.loads(body) == [{"path": "/home/user/meta", "name": "meta", "type": "file", "metadata": {"author": "me", "two": "a b"}}]

    def kept(path):
        return envd.call("filesystem.Filesystem/Stat", {"path": path})[1]["entry"].get("metadata")

    assert kept("meta") == {"author": "me", "two": "a b"}
    envd.call("filesystem.Filesystem/Move", {"source": "meta", "destination": "meta2"})
    assert kept("meta2") == {"author": "me", "two": "a b"}
    put(envd, "meta2", b"y", **{"X-Metadata-Three": "3"})
    assert kept("meta2") == {"three": "3"}
    put(envd, "meta2", b"y")
    assert kept("meta2") is None
    for headers in ({"X-Metadata-" + "k" * 247: "v"}, {"X-Metadata-a": "ü"}, {"X-Metadata-a": "v" * 4097}):
        assert put(envd, "meta3", b"x", **headers)[0] == 400
    assert not envd.path("/home/user/meta3").exists()


def test_full_disk_is_507(envd):
    assert envd.run("true").code == 0
    mount = envd.shell("mkdir -p /run/small && mount -t tmpfs -o size=1m,mode=1777 tmpfs /run/small", user="root").result()
    assert mount.code == 0, mount.stderr
    status, _, body = put(envd, "/run/small/big", b"x" * 3_000_000)
    assert status == 507
    assert "no space left" in message(body)


def test_compose(envd):
    for index, data in enumerate((b"aa", b"b" * 300_000, b"")):
        put(envd, f"part{index}", data)
    request = {"source_paths": ["part0", "~/part1", "/home/user/part2"], "destination": "whole/file"}
    status, _, body = envd.request("POST", "/files/compose", json.dumps(request), {"Content-Type": "application/json"})
    assert (status, json.loads(body)) == (200, {"path": "/home/user/whole/file", "name": "file", "type": "file"})
    assert get(envd, "whole/file")[2] == b"aa" + b"b" * 300_000
    assert get(envd, "part0")[0] == 404

    def refused(status, **request):
        got, _, body = envd.request("POST", "/files/compose", json.dumps(request))
        assert got == status, body

    put(envd, "keep", b"k")
    refused(404, source_paths=["keep", "gone"], destination="new")
    refused(400, source_paths=["keep"], destination="keep")
    refused(400, source_paths=[], destination="new")
    assert envd.run("ln -s /root away").code == 0
    refused(403, source_paths=["keep"], destination="away/new")
    assert get(envd, "keep")[2] == b"k"
    assert get(envd, "new")[0] == 404


def test_ten_writers_of_one_file_do_not_mix(envd):
    """Case L03: what is there afterwards is one of the inputs, each of another length."""
    inputs = [bytes([65 + index]) * (400_000 - index * 30_000) for index in range(10)]
    for _ in range(5):
        statuses = []
        write = functools.partial(lambda statuses, data: statuses.append(put(envd, "shared", data)[0]), statuses)
        threads = [threading.Thread(target=write, args=(data,)) for data in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert statuses == [200] * 10
        assert get(envd, "shared")[2] in inputs


def test_large_transfers_keep_memory_flat(envd):
    """Case B05, scaled: four uploads and four downloads of 100 MB at once."""
    size_bytes = 100_000_000
    block = os.urandom(1 << 20)
    expected = hashlib.sha256((block * (size_bytes // len(block) + 1))[:size_bytes]).hexdigest()

    def blocks():
        left = size_bytes
        while left:
            piece = block[:left]
            left -= len(piece)
            yield piece

    def transfer(index):
        connection = http.client.HTTPConnection("127.0.0.1", envd.port, timeout=120)
        connection.request("POST", f"/files?path=/tmp/envd-large-{index}", blocks(), {**OCTETS, "Content-Length": str(size_bytes)})
        assert connection.getresponse().read()
        connection.request("GET", f"/files?path=/tmp/envd-large-{index}")
        digest = hashlib.sha256()
        reply = connection.getresponse()
        while piece := reply.read(1 << 20):
            digest.update(piece)
        digests.append(digest.hexdigest())

    digests, peak = [], [0]
    threads = [threading.Thread(target=transfer, args=(index,)) for index in range(4)]
    base = envd.rss_bytes()
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak[0] = max(peak[0], envd.rss_bytes())
            time.sleep(0.02)
        assert digests == [expected] * 4
        assert peak[0] < 64 << 20, f"from {base} to {peak[0]}"
    finally:
        for index in range(4):
            envd.path(f"/tmp/envd-large-{index}").unlink(missing_ok=True)
