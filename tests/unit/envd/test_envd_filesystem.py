"""filesystem.Filesystem: entries and the calls on them."""

import time


def call(envd, method, user=None, **message):
    return envd.call(f"filesystem.Filesystem/{method}", message, user)


def entry(envd, path, user=None):
    status, answer = call(envd, "Stat", user, path=path)
    assert status == 200, answer
    return answer["entry"]


def refused(envd, method, code, user=None, **message):
    _, answer = call(envd, method, user, **message)
    assert answer.get("code") == code, answer
    return answer["message"]


def test_entry_of_a_file_and_a_folder(envd):
    envd.run("mkdir st; printf 12345 > st/f; chmod 640 st/f; touch -d '2020-01-02 03:04:05.5 UTC' st/f; chmod 1777 st; chgrp extra st")
    assert entry(envd, "st/f") == {
        "name": "f",
        "type": "FILE_TYPE_FILE",
        "path": "/home/user/st/f",
        "size": "5",
        "mode": 0o640,
        "permissions": "-rw-r-----",
        "owner": "user",
        "group": "user",
        "modifiedTime": "2020-01-02T03:04:05.500000000Z",
    }
    folder = entry(envd, "st")
    assert (folder["type"], folder["mode"], folder["permissions"]) == ("FILE_TYPE_DIRECTORY", 0o777, "dtrwxrwxrwx")
    assert folder["group"] == "extra"
    assert entry(envd, "/")["name"] == "/"
    assert "does not exist" in refused(envd, "Stat", "not_found", path="st/none")


def test_links_have_the_type_of_their_target(envd):
    envd.run("mkdir -p ln/d; echo hi > ln/d/f; ln -s d/f ln/one; ln -s one ln/two; ln -s d ln/dir; ln -s nowhere/x ln/broken")
    two = entry(envd, "ln/two")
    assert (two["type"], two["symlinkTarget"], two["isSymlink"], two["size"]) == ("FILE_TYPE_FILE", "/home/user/ln/d/f", True, "3")
    assert two["permissions"] == "Lrwxrwxrwx"
    assert entry(envd, "ln/dir")["type"] == "FILE_TYPE_DIRECTORY"
    broken = entry(envd, "ln/broken")
    assert (broken["type"], broken["symlinkTarget"]) == ("FILE_TYPE_SYMLINK", "/home/user/ln/nowhere/x")


def test_make_dir(envd):
    status, answer = call(envd, "MakeDir", path="mk/a/b")
    assert (status, answer["entry"]["path"], answer["entry"]["owner"]) == (200, "/home/user/mk/a/b", "user")
    refused(envd, "MakeDir", "already_exists", path="mk/a")
    envd.run("touch mk/file")
    refused(envd, "MakeDir", "invalid_argument", path="mk/file")
    assert call(envd, "MakeDir", "root", path="/run/by-root")[0] == 200


def test_list_is_depth_first_in_order_of_names(envd):
    envd.run("mkdir -p ls/b/x/deep ls/a; touch ls/b/1 ls/b/x/2 ls/c; ln -s b ls/link; ln -s ls top")

    def names(path, **more):
        status, answer = call(envd, "ListDir", path=path, **more)
        assert status == 200, answer
        return [entry["path"].removeprefix("/home/user/") for entry in answer.get("entries", [])]

    assert names("ls") == ["ls/a", "ls/b", "ls/c", "ls/link"]
    assert names("ls", depth=0) == names("ls", depth="1")
    assert names("ls", depth=2) == ["ls/a", "ls/b", "ls/b/1", "ls/b/x", "ls/c", "ls/link"]
    assert names("ls", depth=9) == ["ls/a", "ls/b", "ls/b/1", "ls/b/x", "ls/b/x/2", "ls/b/x/deep", "ls/c", "ls/link"]
    assert names("top")[0] == "top/a"
    refused(envd, "ListDir", "not_found", path="ls/none")
    refused(envd, "ListDir", "invalid_argument", path="ls/c")
    refused(envd, "ListDir", "invalid_argument", path="ls", depth=5000)
    refused(envd, "ListDir", "permission_denied", "31337", path="/root")


def test_move(envd):
    envd.run("mkdir -p mv/d; echo 1 > mv/one; echo 2 > mv/two")
    status, answer = call(envd, "Move", source="mv/one", destination="mv/new/deep/one")
    assert (status, answer["entry"]["path"]) == (200, "/home/user/mv/new/deep/one")
    assert call(envd, "Move", source="mv/two", destination="mv/new/deep/one")[0] == 200
    assert envd.run("cat mv/new/deep/one").stdout == b"2\n"
    refused(envd, "Move", "not_found", source="mv/none", destination="mv/x")
    refused(envd, "Move", "invalid_argument", source="mv/new/deep/one", destination="mv/d")


def test_remove(envd):
    envd.run("mkdir -p rm/a/b; touch rm/a/b/c; ln -s /etc rm/a/link; touch rm/f")
    assert call(envd, "Remove", path="rm/f") == (200, {})
    assert call(envd, "Remove", path="rm") == (200, {})
    assert call(envd, "Remove", path="rm") == (200, {})
    assert envd.path("/etc/passwd").exists()
    refused(envd, "Remove", "invalid_argument", "root", path="/")


def test_a_deep_tree_and_a_wide_folder(envd):
    envd.run("mkdir wide; cd wide; seq 1 5000 | xargs touch", timeout_s=60)
    before = time.monotonic()
    assert len(call(envd, "ListDir", path="wide")[1]["entries"]) == 5000
    assert time.monotonic() - before < 5
    deep = "/".join(["d"] * 900)
    assert call(envd, "MakeDir", path=f"deep/{deep}")[0] == 200
    assert len(call(envd, "ListDir", path="deep", depth=1000)[1]["entries"]) == 900
    assert call(envd, "Remove", path="deep") == (200, {})


def test_bad_paths(envd):
    refused(envd, "Stat", "invalid_argument", path="a\0b")
    refused(envd, "Stat", "invalid_argument", path="~root/x")
    refused(envd, "Stat", "invalid_argument", path="x" * 5000)
    refused(envd, "Stat", "invalid_argument", path="x" * 256)
