"""Scenarios about files, folders and git."""

from __future__ import annotations

import io
import time
import urllib.error
import urllib.request

import e2b
from sdk import VERSION, Absent, api_url, eventually, need, need_option, raises, takes, value

MISSING = getattr(e2b, "FileNotFoundException", e2b.NotFoundException)
ODD_NAMES = ("a b", "ü", "日本", "%2e%2e", 'a"b', "a\\", "a'b", "a#b?c&d=e", "-rf", ".hidden", "x" * 255)


async def file_contents(sdk):
    async with sdk.sandbox() as sandbox:
        files = sandbox.files
        await value(files.write("/home/user/a/b/c.txt", "grüße\n"))
        assert await value(files.read("/home/user/a/b/c.txt")) == "grüße\n"
        every_byte = bytes(range(256)) * 400
        await value(files.write("relative.bin", every_byte))
        assert bytes(await value(files.read("/home/user/relative.bin", format="bytes"))) == every_byte
        await value(files.write("stream.bin", io.BytesIO(every_byte)))
        stream = await value(files.read("stream.bin", format="stream"))
        parts = [part async for part in stream] if sdk.asynchronous else list(stream)
        assert b"".join(parts) == every_byte
        await value(files.write("empty", ""))
        assert await value(files.read("empty")) == ""
        await value(files.write("relative.bin", "short"))
        assert await value(files.read("relative.bin")) == "short"
        assert (await sdk.run(sandbox, "stat -c %U:%a relative.bin")).stdout == "user:644\n"
        await value(files.write("/root/private", "x", "root"))
        assert await value(files.read("/root/private", user="root")) == "x"
        await raises(e2b.SandboxException, lambda: files.read("/root/private"))
        await raises(MISSING, lambda: files.read("/home/user/none"))
        assert len(await value(files.read("/proc/sys/kernel/random/boot_id"))) == 37
        for name in ODD_NAMES if VERSION >= (2, 0) else ():
            await value(files.write(f"/tmp/odd/{name}", name))
            assert await value(files.read(f"/tmp/odd/{name}")) == name


async def many_files(sdk):
    async with sdk.sandbox() as sandbox:
        content = {f"/tmp/many/{number}/f.txt": f"number {number}" for number in range(8)}
        entries = [{"path": path, "data": data} for path, data in content.items()]
        if hasattr(sandbox.files, "write_files"):
            written = await value(sandbox.files.write_files(entries))
        elif VERSION >= (1, 3):
            written = await value(sandbox.files.write(entries))
        else:
            raise Absent("writes one file a call")
        assert sorted(entry.path for entry in written) == sorted(content)
        for path, data in content.items():
            assert await value(sandbox.files.read(path)) == data


async def file_tree(sdk):
    async with sdk.sandbox() as sandbox:
        files = sandbox.files
        assert await value(files.make_dir("/tmp/tree/one/two")) is True
        assert await value(files.make_dir("/tmp/tree/one/two")) is False
        await value(files.write("/tmp/tree/f", "x"))
        found = {entry.name: entry for entry in await value(files.list("/tmp/tree"))}
        assert set(found) == {"one", "f"}
        assert (found["one"].type, found["f"].type) == (e2b.FileType.DIR, e2b.FileType.FILE)
        assert found["f"].path == "/tmp/tree/f"
        assert await value(files.exists("/tmp/tree/f")) is True
        moved = await value(files.rename("/tmp/tree/f", "/tmp/tree/one/g"))
        assert (moved.name, moved.path) == ("g", "/tmp/tree/one/g")
        assert await value(files.exists("/tmp/tree/f")) is False
        await value(files.remove("/tmp/tree/one"))
        assert await value(files.exists("/tmp/tree/one/g")) is False
        await raises(e2b.SandboxException, lambda: files.list("/tmp/none"))
        await raises(e2b.SandboxException, lambda: files.rename("/tmp/none", "/tmp/there"))
        if not takes(files.list, "depth"):
            return
        await value(files.write("/tmp/deep/a/b/c", "x"))
        assert [entry.path for entry in await value(files.list("/tmp/deep", depth=2))] == ["/tmp/deep/a", "/tmp/deep/a/b"]
        assert [entry.name for entry in await value(files.list("/tmp/deep", depth=5))] == ["a", "b", "c"]


async def file_details(sdk):
    async with sdk.sandbox() as sandbox:
        get_info = need(sandbox.files, "get_info")
        await value(sandbox.files.write("/tmp/d", "12345"))
        await sdk.run(sandbox, "chmod 640 /tmp/d; ln -s /tmp/d /tmp/link")
        entry = await value(get_info("/tmp/d"))
        assert (entry.name, entry.size, entry.mode & 0o777, entry.owner, entry.group) == ("d", 5, 0o640, "user", "user")
        assert entry.permissions == "-rw-r-----"
        assert abs(entry.modified_time.timestamp() - time.time()) < 600
        link = await value(get_info("/tmp/link"))
        assert link.symlink_target == "/tmp/d"
        await raises(MISSING, lambda: get_info("/tmp/none"))
        if not takes(sandbox.files.write, "metadata"):
            return
        await value(sandbox.files.write("/tmp/tagged", "x", metadata={"kind": "note", "by": "me"}))
        assert (await value(get_info("/tmp/tagged"))).metadata == {"kind": "note", "by": "me"}
        await value(sandbox.files.rename("/tmp/tagged", "/tmp/renamed"))
        (listed,) = [entry for entry in await value(sandbox.files.list("/tmp")) if entry.name == "renamed"]
        assert listed.metadata == {"kind": "note", "by": "me"}
        await value(sandbox.files.write("/tmp/renamed", "y"))
        assert not (await value(get_info("/tmp/renamed"))).metadata


async def compressed_files(sdk):
    async with sdk.sandbox() as sandbox:
        need_option(sandbox.files.write, "gzip")
        text = "compress me " * 20_000
        await value(sandbox.files.write("/tmp/z", text, gzip=True))
        assert await value(sandbox.files.read("/tmp/z")) == text
        assert await value(sandbox.files.read("/tmp/z", gzip=True)) == text
        assert (await sdk.run(sandbox, "wc -c < /tmp/z")).stdout.strip() == str(len(text))
        if not takes(sandbox.files.write, "use_octet_stream"):
            return
        await value(sandbox.files.write("/tmp/octets", text.encode(), use_octet_stream=True))
        await value(sandbox.files.write("/tmp/both", io.BytesIO(text.encode()), use_octet_stream=True, gzip=True))
        for name in ("octets", "both"):
            assert await value(sandbox.files.read(f"/tmp/{name}", gzip=True)) == text


async def watch_folder(sdk):
    async with sdk.sandbox() as sandbox:
        await value(sandbox.files.make_dir("/tmp/watched"))
        seen = []
        handle = await sdk.watch(sandbox, "/tmp/watched", seen.append)

        async def told(name, kind):
            if not sdk.asynchronous:
                seen.extend(handle.get_new_events())
            return any(event.name == name and event.type == kind for event in seen)

        kinds = e2b.FilesystemEventType
        await value(sandbox.files.write("/tmp/watched/new", "x"))
        await eventually(lambda: told("new", kinds.CREATE), "the new file is told")
        await eventually(lambda: told("new", kinds.WRITE), "the write is told")
        await value(sandbox.files.remove("/tmp/watched/new"))
        await eventually(lambda: told("new", kinds.REMOVE), "the removal is told")
        await value(handle.stop())
        await raises(e2b.SandboxException, lambda: sdk.watch(sandbox, "/tmp/none", seen.append))
        if not takes(sandbox.files.watch_dir, "recursive"):
            return
        handle = await sdk.watch(sandbox, "/tmp/watched", seen.append, recursive=True)
        await value(sandbox.files.write("/tmp/watched/deep/er/file", "x"))
        await eventually(lambda: told("deep/er/file", kinds.WRITE), "the write in a new sub-folder is told")
        await value(handle.stop())
        del seen[:]
        if not takes(sandbox.files.watch_dir, "include_entry"):
            return
        handle = await sdk.watch(sandbox, "/tmp/watched", seen.append, include_entry=True)
        await value(sandbox.files.write("/tmp/watched/told", "12345"))
        await eventually(lambda: told("told", kinds.WRITE), "the write is told with its entry")
        assert any(event.entry and event.entry.path == "/tmp/watched/told" for event in seen)
        await value(handle.stop())


def _fetch(request):
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


async def file_urls(sdk):
    api_url()  # older releases are tried with a domain, whose names this script's plain requests would not find
    async with sdk.sandbox() as sandbox:
        need_option(sandbox.download_url, "use_signature_expiration")
        await value(sandbox.files.write("/tmp/shared", "by link"))
        assert _fetch(await value(sandbox.download_url("/tmp/shared"))) == b"by link"
        link = await value(sandbox.download_url("/tmp/shared", user="user", use_signature_expiration=300))
        assert _fetch(link) == b"by link"
        upload = await value(sandbox.upload_url("/tmp/up", use_signature_expiration=300))
        body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nuploaded\r\n--b--\r\n'
        _fetch(urllib.request.Request(upload, body, {"Content-Type": "multipart/form-data; boundary=b"}))
        assert await value(sandbox.files.read("/tmp/up")) == "uploaded"
        expired = await value(sandbox.download_url("/tmp/shared", use_signature_expiration=-300))
        # An expired one still tells the sandbox by its signature; a wrong one tells nothing, so nobody can say whose it is.
        for bad, codes in (
            (expired, {401}),
            (link.replace("signature=v1_", "signature=v1_x"), {401, 404}),
            (link.replace("shared", "other"), {401, 404}),
        ):
            error = await raises(urllib.error.HTTPError, lambda bad=bad: _fetch(bad))
            assert error.code in codes, (bad, error.code)


async def git(sdk):
    async with sdk.sandbox() as sandbox:
        repo = need(sandbox, "git")
        where = "/home/user/repo"
        await value(repo.configure_user("A Tester", "tester@example.org"))
        await value(repo.init("/home/user/hub.git", bare=True, initial_branch="main"))
        await value(repo.init(where, initial_branch="main"))
        await value(repo.set_config("core.filemode", "false", scope="local", path=where))
        assert (await value(repo.get_config("core.filemode", scope="local", path=where))).strip() == "false"
        assert await value(repo.get_config("no.such", scope="local", path=where)) is None
        await _work(sandbox, repo, where)
        await _branches(repo, where)
        await value(repo.remote_add(where, "origin", "file:///home/user/hub.git"))
        assert (await value(repo.remote_get(where, "origin"))).strip() == "file:///home/user/hub.git"
        assert await value(repo.remote_get(where, "other")) is None
        await value(repo.push(where, remote="origin", branch="main"))
        await value(repo.clone("file:///home/user/hub.git", path="/home/user/copy", branch="main"))
        assert await value(sandbox.files.read("/home/user/copy/a.txt")) == "one\n"
        await value(sandbox.files.write(f"{where}/b.txt", "new\n"))
        await value(repo.add(where))
        await value(repo.commit(where, "second"))
        await value(repo.push(where))
        await value(repo.pull("/home/user/copy"))
        assert await value(sandbox.files.read("/home/user/copy/b.txt")) == "new\n"
        await value(repo.dangerously_authenticate("me", "not-a-real-token", host="git.example.org"))
        assert "git.example.org" in (await sdk.run(sandbox, "cat ~/.git-credentials")).stdout


async def _work(sandbox, repo, where):
    await value(sandbox.files.write(f"{where}/a.txt", "one\n"))
    status = await value(repo.status(where))
    assert [entry.name for entry in status.file_status] == ["a.txt"]
    await value(repo.add(where, files=["a.txt"]))
    await value(repo.commit(where, "first", author_name="Another", author_email="another@example.org"))
    assert (await value(repo.status(where))).is_clean
    await value(sandbox.files.write(f"{where}/a.txt", "two\n"))
    await value(repo.add(where))
    await value(repo.restore(where, ["a.txt"], staged=True))
    await value(repo.restore(where, ["a.txt"], worktree=True))
    assert await value(sandbox.files.read(f"{where}/a.txt")) == "one\n"
    await value(sandbox.files.write(f"{where}/a.txt", "three\n"))
    await value(repo.reset(where, mode="hard", target="HEAD"))
    assert await value(sandbox.files.read(f"{where}/a.txt")) == "one\n"


async def _branches(repo, where):
    await value(repo.create_branch(where, "side"))
    found = await value(repo.branches(where))
    assert (sorted(found.branches), found.current_branch) == (["main", "side"], "side")
    await value(repo.checkout_branch(where, "main"))
    await value(repo.delete_branch(where, "side"))
    assert (await value(repo.branches(where))).branches == ["main"]


SCENARIOS = (file_contents, many_files, file_tree, file_details, compressed_files, watch_folder, file_urls, git)
