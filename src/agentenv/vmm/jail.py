"""The jail of a Firecracker: what it can see, as whom it runs, and what that costs.

    <work>/jail/firecracker/<id>/root/   a file system in memory of its own, which nobody but the VMM sees
        firecracker, dev/kvm, dev/net/tun    put there by Firecracker's jailer
        disk                                 the block device, or the file, of the sandbox's disk
        kernel, initramfs / state, memory    files of ours, which it cannot write
        capture                              empty; memory is written to what is mounted there while it is saved
        state-out, api.sock                  made by Firecracker

Everything is mounted in a mount namespace made for this process, so that nothing is left of it when the process is gone, however
it ends. The file system is named after the VM's own folder, which tells whose process it is (`host.process.working_below`). It is
small, so that a VMM whose guest has broken out of the machine cannot fill memory; its user is this sandbox's alone, as its network
namespace is. The jailer adds chroot, the change of user and the end of all privileges;
Firecracker adds seccomp.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.core.errors import NotFound
from agentenv.host import netns

SIZE_BYTES = 32 << 20
"""The program (3 MB), a saved state (0.1 MB), and room for both to grow."""
CAPTURE = "/capture"
"""Where a VMM finds the file for its memory while it is saved."""
MAX_OPEN_FILES = 1024
_FIRST_USER = 0x4000_0000
_FIRST_NAMESPACE = 0xF000_0000
GROUP = _FIRST_USER - 1
"""Of every jail: owns what they share, read-only."""

_SCRIPT = """
mount -t tmpfs -o "size=$2,mode=0755,nosuid" "$5" "$1"
root=$3 user=$4; shift 5
mkdir -p "$root"; chown "$user" "$root"; : > "$root/capture"
while [ "$1" != -- ]; do
  case $1 in
    bind) : > "$root/$3"; mount --bind "$2" "$root/$3"; shift 3;;
    read) : > "$root/$3"; mount --bind "$2" "$root/$3"; mount -o remount,bind,ro "$root/$3"; shift 3;;
    node) mknod -m 0600 "$root/$4" b "$2" "$3"; chown "$user" "$root/$4"; shift 4;;
  esac
done
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Jail:
    """How one VMM is jailed. `files` are `(source, name in the jail, whether it may be written)`."""

    firecracker: Path
    jailer: Path
    name: str
    work: Path
    namespace: str
    files: tuple[tuple[Path, str, bool], ...] = field(default=())

    @property
    def folder(self) -> Path:
        """Where its file system is mounted, for itself alone."""
        return self.work / "jail"

    @property
    def root(self) -> Path:
        """Its root folder."""
        return self.folder / self.firecracker.name / self.name / "root"

    def command(self, arguments: tuple[str, ...] = ()) -> list[str]:
        """The command that becomes Firecracker, in the same process. NotFound when the network namespace is gone."""
        user = user_of(self.namespace)
        steps = [word for source, name, writable in self.files for word in _step(source, name, writable)]
        return [
            *("unshare", "--mount", "--propagation", "private", "--"),
            *("sh", "-euc", _SCRIPT, "jail", str(self.folder), str(SIZE_BYTES), str(self.root), f"{user}:{GROUP}", str(self.work)),
            *steps,
            *("--", str(self.jailer), "--id", self.name, "--exec-file", str(self.firecracker)),
            *("--uid", str(user), "--gid", str(GROUP), "--chroot-base-dir", str(self.folder)),
            *("--netns", str(netns.ROOT / self.namespace), "--resource-limit", f"no-file={MAX_OPEN_FILES}"),
            *("--", "--api-sock", "/api.sock", *arguments),
        ]


def user_of(namespace: str) -> int:
    """The user of a network namespace's only VMM: no two namespaces of a machine have one at the same time."""
    try:
        number = (netns.ROOT / namespace).stat().st_ino
    except FileNotFoundError as error:
        raise NotFound(f"network namespace {namespace} does not exist") from error
    return _FIRST_USER + number - _FIRST_NAMESPACE if number >= _FIRST_NAMESPACE else _FIRST_USER + number % _FIRST_USER


def inside(pid: int, name: str) -> Path:
    """A file of the jail as the host sees it, while the process lives."""
    return Path(f"/proc/{pid}/root") / name


def _step(source: Path, name: str, writable: bool) -> tuple[str, ...]:
    status = source.stat()
    if stat.S_ISBLK(status.st_mode):  # one that takes no writes says so itself
        return "node", str(os.major(status.st_rdev)), str(os.minor(status.st_rdev)), name
    return "bind" if writable else "read", str(source), name
