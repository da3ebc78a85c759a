"""Places where the user's own rights do not reach: done as root, given to the user, and never through a planted link."""

import json

import pytest
from envd_rig import APP_ID, USER_ID

OCTETS = {"Content-Type": "application/octet-stream"}


def put(envd, path, data=b"x", user=None):
    query = f"/files?path={path}" + (f"&username={user}" if user else "")
    return envd.request("POST", query, data, OCTETS)[0]


def call(envd, method, user=None, **message):
    status, answer = envd.call(f"filesystem.Filesystem/{method}", message, user)
    return status, answer.get("code"), answer


def owner(envd, path):
    info = envd.path(path).stat()
    return info.st_uid, info.st_gid, oct(info.st_mode & 0o777)


@pytest.mark.parametrize(("user", "number", "group"), [(None, USER_ID, USER_ID), ("app", APP_ID, 100)])
def test_an_upload_makes_what_is_missing_for_the_user(envd, user, number, group):
    top = f"/root/{user}"
    assert put(envd, f"{top}/a/b/file", b"made", user) == 200
    assert envd.path(f"{top}/a/b/file").read_bytes() == b"made"
    assert owner(envd, f"{top}/a/b/file") == (number, group, "0o644")
    for folder in (top, f"{top}/a", f"{top}/a/b"):
        assert owner(envd, folder) == (number, group, "0o755")
    assert owner(envd, "/root") == (0, 0, "0o700")


def test_an_upload_over_a_file_of_root_keeps_its_owner_and_mode(envd):
    assert put(envd, "/etc/of-root", b"old", "root") == 200
    assert put(envd, "/etc/of-root", b"new") == 200
    assert envd.path("/etc/of-root").read_bytes() == b"new"
    assert owner(envd, "/etc/of-root") == (0, 0, "0o644")


def test_pieces_are_composed_into_a_place_of_root(envd):
    for piece in ("one", "two"):
        assert put(envd, piece, piece.encode()) == 200
    request = {"source_paths": ["one", "two"], "destination": "/root/joined/file"}
    assert envd.request("POST", "/files/compose", json.dumps(request))[0] == 200
    assert envd.path("/root/joined/file").read_bytes() == b"onetwo"
    assert owner(envd, "/root/joined/file")[0] == USER_ID


def test_folders_are_made_moved_and_removed(envd):
    status, _, answer = call(envd, "MakeDir", path="/root/made/below")
    assert (status, answer["entry"]["path"], answer["entry"]["owner"]) == (200, "/root/made/below", "user")
    assert call(envd, "MakeDir", path="/root/made/below")[1] == "already_exists"
    assert put(envd, "/root/made/file") == 200
    assert call(envd, "MakeDir", path="/root/made/file")[1] == "invalid_argument"
    status, _, answer = call(envd, "Move", source="/root/made", destination="/root/new/place")
    assert (status, answer["entry"]["path"]) == (200, "/root/new/place")
    assert envd.path("/root/new/place/file").exists()
    assert call(envd, "Move", source="/root/made", destination="/root/other")[1] == "not_found"
    assert call(envd, "Move", source="/root/new/place", destination="/root/moved/home")[0] == 200
    assert call(envd, "Remove", path="/root/new")[:2] == (200, None)
    assert call(envd, "Remove", path="/root/new")[:2] == (200, None)
    assert not envd.path("/root/new").exists()


#: Links as a program of the user plants them: of a folder, of a file, of nothing yet, and one folder above.
LINKS = "rm -rf p; mkdir -p p/in; ln -s /root p/folder; ln -s /root/secret p/file; ln -s /root/none p/loose; ln -s ../folder p/in/up"


@pytest.mark.parametrize(
    "path",
    ["p/folder/x", "p/folder/new/x", "p/file", "p/loose", "p/in/up/x", "/home/user/p/in/up/secret", "/home/user/p/../p/folder/x"],
)
def test_a_planted_link_gives_no_more_than_the_user_has(envd, path):
    envd.run(LINKS)
    assert put(envd, "/root/secret", b"secret", "root") == 200
    assert envd.run("chmod 700 p").code == 0
    assert put(envd, path, b"overwritten") == 403
    assert put(envd, "piece") == 200
    request = {"source_paths": ["piece"], "destination": path}
    assert envd.request("POST", "/files/compose", json.dumps(request))[0] == 403
    assert envd.path("/root/secret").read_bytes() == b"secret"
    assert not envd.path("/root/x").exists()
    assert not envd.path("/root/new").exists()
    assert not envd.path("/root/none").exists()


def test_a_planted_link_does_not_lead_the_other_calls_either(envd):
    envd.run(LINKS)
    assert put(envd, "/root/secret", b"secret", "root") == 200
    assert call(envd, "MakeDir", path="p/folder/made")[1] == "permission_denied"
    assert call(envd, "Remove", path="p/folder/secret")[1] == "permission_denied"
    assert call(envd, "Move", source="p/folder/secret", destination="mine")[1] == "permission_denied"
    assert put(envd, "mine2") == 200
    assert call(envd, "Move", source="mine2", destination="p/folder/theirs")[1] == "permission_denied"
    assert envd.path("/root/secret").read_bytes() == b"secret"
    assert call(envd, "Remove", path="p/folder")[0] == 200  # the link itself is the user's
    assert envd.path("/root/secret").exists()


def test_reading_keeps_to_the_rights_of_the_user(envd):
    assert put(envd, "/root/private", b"p", "root") == 200
    assert envd.request("GET", "/files?path=/root/private")[0] == 403
    assert call(envd, "ListDir", "app", path="/root")[1] == "permission_denied"


def test_what_is_no_regular_file_is_not_opened(envd):
    assert envd.run("test -e /root/pipe || mkfifo /root/pipe", user="root").code == 0
    assert put(envd, "/root/pipe") == 400
    assert put(envd, "/root") == 400
