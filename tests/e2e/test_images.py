"""Sandboxes from OCI images of every kind: without shell, accounts or tools, with users of all sorts, and a whole Debian."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox, Template
from e2b.exceptions import BuildException
from e2e_node import Node, busybox
from guest_exec import execute
from image_rig import Layout, folder, layer, member, symlink
from registry_rig import PASSWORD, USER, RealRegistry, real_registry

CAPABILITY = struct.pack("<IIIII", 0x02000000 | 1, 1 << 0, 0, 0, 0)  # cap_chown+ep
ACCOUNTS = (
    member("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"),
    member("etc/group", "root:x:0:\nnode:x:1000:\nstaff:x:50:\n"),
)


@pytest.fixture(scope="module")
def place(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "open", host=node.registries[0]) as registry:
        yield registry


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


def alone() -> bytes:
    """A static program and nothing else: no shell, no folder that a system has."""
    return layer(member("app/busybox", busybox().read_bytes(), mode=0o755))


def small() -> bytes:
    """busybox under the names of its programs, and no account files."""
    names = ("sh", "ls", "cat", "id", "stat", "pwd", "env", "chown", "touch")
    return layer(
        folder("bin"), member("bin/busybox", busybox().read_bytes(), mode=0o755), *(symlink(f"bin/{name}", "busybox") for name in names)
    )


class Images:
    """Builds templates from images, and starts sandboxes of them; all of it goes in the end."""

    def __init__(self, node: Node, place: RealRegistry, work: Path) -> None:
        self.node, self._place, self._work = node, place, work
        self._made: list[Any] = []
        self._templates: list[str] = []
        self.said: list[str] = []

    def push(self, name: str, *layers: bytes, run: dict[str, Any] | None = None) -> str:
        layout = Layout.make(self._work / name.replace(":", "-"), layers, run=run)
        return self._place.push(layout.folder, name)

    def build(self, name: str, template: Any) -> str:
        self._templates.append(name)
        self.said.clear()
        Template.build(template, name, on_build_logs=lambda entry: self.said.append(entry.message), **self.node.options)
        return name

    def start(self, template: str) -> Any:
        self._made.append(Sandbox.create(template, timeout=600, **self.node.options))
        return self._made[-1]

    def close(self) -> None:
        for sandbox in self._made:
            sandbox.kill()
        for name in self._templates:
            self.node.aenv("template", "delete", name, "--yes", check=False)
        for image in json.loads(self.node.aenv("images", "--json").stdout):
            self.node.aenv("image", "rm", image["digest"])


@pytest.fixture
def images(node: Node, place: RealRegistry, work: Path) -> Iterator[Images]:
    made = Images(node, place, work)
    yield made
    made.close()


def test_a_static_program_alone(images: Images, tmp_path: Path) -> None:
    """F02, F11: nothing of the image is needed to make its folder and user, or to run its program."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(b"from the host\n" * 100_000)
    (tmp_path / "sub" / "link").symlink_to("data")
    name = images.push("alone:1", alone(), run={"Env": ["GREETING=hello there", "PATH=/app"], "Cmd": ["/app/busybox"]})
    steps = (
        Template(file_context_path=str(tmp_path))
        .from_image(name)
        .copy("sub", "/srv/copied/", user="1234:77", mode=0o640)
        .set_workdir("/deep/er/place")
        .set_user("worker")
        .set_workdir("own")
        .set_envs({"ADDED": "$GREETING!"})
    )
    sandbox = images.start(images.build("img-alone", steps))
    said = execute(sandbox, "/app/busybox", "id")
    assert (said.exit_code, said.stdout) == (0, "uid=1001(worker) gid=1001(worker) groups=1001(worker)\n"), said
    assert execute(sandbox, "busybox", "pwd").stdout == "/deep/er/place/own\n"
    assert execute(sandbox, "busybox", "id", user="root").stdout.startswith("uid=0(root)")
    env = execute(sandbox, "busybox", "env").stdout.splitlines()
    assert {"GREETING=hello there", "ADDED=hello there!", "HOME=/home/worker", "PATH=/app"} <= set(env)
    stat = execute(
        sandbox,
        "busybox",
        "stat",
        "-c",
        "%u %g %a %n",
        "/deep",
        "/deep/er/place/own",
        "/srv/copied/data",
        "/tmp",
        "/home/user",
        user="root",
    )
    assert stat.stdout.splitlines() == [
        "1000 1000 755 /deep",
        "1001 1001 755 /deep/er/place/own",
        "1234 77 640 /srv/copied/data",
        "0 0 1777 /tmp",
        "1000 1000 755 /home/user",
    ]
    assert execute(sandbox, "busybox", "readlink", "/srv/copied/link", user="root").stdout == "data\n"
    assert bytes(sandbox.files.read("/srv/copied/data", format="bytes", user="root")) == (tmp_path / "sub" / "data").read_bytes()
    sandbox.files.write("/tmp/written", "x")
    for shell in ("/bin/bash", "/bin/sh"):
        refused = execute(sandbox, shell, "-l", "-c", "true; true")
        assert refused.error.startswith("not_found")
        assert f"'{shell}'" in refused.error
        assert "has no shell" in refused.error
    with pytest.raises(Exception, match="/bin/bash"):
        sandbox.commands.run("true | true")
    assert sandbox.commands.run("/app/busybox echo 'a  b' \"c\"").stdout == "a  b c\n", "plain words need no shell"
    assert images.node.aenv("exec", sandbox.sandbox_id, "--", "busybox", "echo", "it's  me").stdout == "it's  me\n"
    sandbox.pause()
    sandbox.connect()
    assert execute(sandbox, "busybox", "cat", "/tmp/written").stdout == "x"


def test_a_step_that_needs_a_shell_where_there_is_none_says_so(images: Images) -> None:
    name = images.push("alone:1", alone())
    with pytest.raises(BuildException, match=r"failed to run command 'true': command failed: not_found: cannot run '/bin/sh'.*no shell"):
        images.build("img-shell", Template().from_image(name).run_cmd("true"))


def test_a_small_system_without_accounts_or_bash(images: Images) -> None:
    """F11: another shell, no accounts."""
    name = images.push("small:1", small())
    template = Template().from_image(name).run_cmd("id > who; echo started").set_start_cmd("touch /tmp/up; exec cat", "stat /tmp/up")
    sandbox = images.start(images.build("img-small", template))
    told = sandbox.commands.run("id; pwd; cat who; echo $HOME; stat -c '%U %G' /home/user")
    assert told.stdout.splitlines() == [
        "uid=1000(user) gid=1000(user) groups=1000(user)",
        "/home/user",
        "uid=1000(user) gid=1000(user) groups=1000(user)",
        "/home/user",
        "user user",
    ]
    assert sandbox.files.read("/etc/passwd").splitlines()[0] == "root:x:0:0:root:/root:/bin/sh"
    made = images.node.aenv("create", "img-small", "--detach")
    other = made.stdout.split()[-1]
    assert images.node.aenv("exec", other, "--", "id").stdout.startswith("uid=1000(user)")
    images.node.aenv("kill", other)


USERS = {
    "1000": ("uid=1000(node) gid=1000(node)", "/home/node"),
    "2000": ("uid=2000 gid=0(root)", "/"),
    "2000:50": ("uid=2000 gid=50(staff)", "/"),
    "node": ("uid=1000(node) gid=1000(node)", "/home/node"),
    "node:staff": ("uid=1000(node) gid=50(staff)", "/home/node"),
    "4294967294": ("uid=4294967294 gid=0(root)", "/"),
    "missing": ("uid=1001(missing) gid=1001(missing)", "/home/missing"),
    "": ("uid=1001(user) gid=1001(user)", "/home/user"),
}


def test_users_of_images(images: Images) -> None:
    """F04: numbers, names, groups, and those that no file knows."""
    found = {}
    for number, user in enumerate(USERS):
        name = images.push(f"users:{number}", small(), layer(*ACCOUNTS), run={"User": user, "WorkingDir": "/"})
        sandbox = images.start(images.build(f"img-user-{number}", Template().from_image(name).run_cmd("id > /tmp/who")))
        shown = execute(sandbox, "/bin/busybox", "id").stdout
        assert sandbox.files.read("/tmp/who", user="root") == shown, "steps and sandboxes have the same user and groups"
        said = shown.partition(" groups=")[0].strip()
        home = next(line for line in execute(sandbox, "/bin/env").stdout.splitlines() if line.startswith("HOME="))
        found[user] = (said, home.removeprefix("HOME="))
        sandbox.kill()
    assert found == USERS
    shown = json.loads(images.node.aenv("image", "ls", "--json").stdout)
    assert {tuple(image["layers"][at]["layerID"] for at in (0, 1, 2)) for image in shown} == {
        tuple(shown[0]["layers"][at]["layerID"] for at in (0, 1, 2))
    }, "images that differ in what they say share all their layers"


def test_an_image_of_a_registry_with_a_password(images: Images, node: Node, tmp_path: Path) -> None:
    with real_registry(tmp_path / "registry", password=True, host=node.registries[1]) as place:
        layout = Layout.make(tmp_path / "layout", (alone(),))
        name = place.push(layout.folder, "private/tool:1", with_password=True)
        with pytest.raises(BuildException, match=r"unauthorized|authentication required"):
            images.build("img-private", Template().from_image(name, USER, "wrong"))
        images.build("img-private", Template().from_image(name, USER, PASSWORD))
        assert any(line.startswith(f"pull {name}") for line in images.said)
    assert execute(images.start("img-private"), "/app/busybox", "echo", "x").stdout == "x\n"


def test_a_whole_debian_that_came_as_a_file(images: Images, node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root.tar"
    packages = "python3-minimal,sudo,iputils-ping,libcap2-bin"
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", root]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    with tarfile.open(root, "a", format=tarfile.PAX_FORMAT) as archive:
        info, data = member(
            "opt/chown", busybox().read_bytes(), mode=0o755, xattrs={"security.capability": CAPABILITY, "user.note": b"kept"}
        )
        archive.addfile(info, io.BytesIO(data))
    began = time.monotonic()
    digest = node.aenv("image", "import", str(root), "debian-of-tests:1", timeout=600).stdout.strip()
    print(f"import of {root.stat().st_size >> 20} MiB took {time.monotonic() - began:.1f} s")
    assert digest.startswith("sha256:")
    sandbox = images.start(images.build("img-debian", Template().from_image("debian-of-tests:1").run_cmd("echo $0; id -un")))
    assert images.said[-1].startswith("the template img-debian is ready") or "[stdout] user" in images.said
    ask = "import os;print(os.getxattr('/opt/chown','security.capability').hex(), os.getxattr('/opt/chown','user.note').decode())"
    assert sandbox.commands.run(f'python3 -c "{ask}"').stdout.split() == [CAPABILITY.hex(), "kept"]
    sandbox.commands.run("cp /bin/true /tmp/mine")
    assert sandbox.commands.run("/opt/chown 0:0 /tmp/mine && stat -c %u /tmp/mine").stdout.strip() == "0"
    assert sandbox.commands.run("stat -c %a /usr/bin/sudo /tmp").stdout.split() == ["4755", "1777"]
    assert sandbox.commands.run("sudo -n id -u").stdout.strip() == "0"
    assert "cap_net_raw" in sandbox.commands.run("/sbin/getcap /usr/bin/ping").stdout
    assert sandbox.commands.run("ping -c1 -W5 127.0.0.1").exit_code == 0
    shutil.rmtree(tmp_path, ignore_errors=True)
