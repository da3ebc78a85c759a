"""A machine that systemd runs, in namespaces of its own over this machine's files: what is written outside shared folders is gone with it.

Its process 1 is Debian's systemd, with no unit but its own and those a test puts there. The kernel and the network are this machine's.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e_node import AENV

SYSTEMD = Path("/lib/systemd/systemd")
START_DEADLINE_S = 60.0
_MASKED = (
    "systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.timer systemd-networkd.service "
    "systemd-resolved.service systemd-logind.service systemd-udevd.service systemd-udev-trigger.service systemd-modules-load.service "
    "systemd-sysctl.service networking.service console-getty.service getty@tty1.service apt-daily.timer apt-daily-upgrade.timer "
    "e2scrub_all.timer fstrim.timer dpkg-db-backup.timer"
)
_BOOT = """
set -e
base=$1; shift
mount -t tmpfs machine "$base"
mkdir "$base/up" "$base/work" "$base/root"
mount -t overlay machine -o lowerdir=/,upperdir="$base/up",workdir="$base/work" "$base/root"
cd "$base/root"
mount -t proc proc proc
mount -t sysfs sys sys || mount --rbind /sys sys
umount -R sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup sys/fs/cgroup || { mount -t tmpfs none sys/fs/cgroup; mount -t cgroup2 cgroup sys/fs/cgroup; }
mount --rbind /dev dev
mount -t tmpfs run run
mkdir run/netns
for shared; do mkdir -p ".$shared"; mount --bind "$shared" ".$shared"; done
rm -rf etc/systemd/system/*.wants
ln -sf /lib/systemd/system/multi-user.target etc/systemd/system/default.target
for unit in $MASKED; do ln -sf /dev/null "etc/systemd/system/$unit"; done
mkdir before
pivot_root . before
exec chroot . /usr/bin/env -i container=other PATH="$PATH" TERM=dumb /lib/systemd/systemd --show-status=false --unit=multi-user.target
"""


class Machine:
    """See the module. `shared` folders are those of this machine; use it as a context manager."""

    def __init__(self, base: Path, shared: Sequence[Path], log: Path) -> None:
        self._base, self._shared, self._log = base, shared, log

    def __enter__(self) -> Machine:
        self._base.mkdir()
        namespaces = ["--pid", "--mount", "--propagation", "private", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"]
        words = ["unshare", *namespaces, "bash", "-c", _BOOT, "boot", str(self._base), *map(str, self._shared)]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "MASKED": _MASKED}
        with self._log.open("wb") as log:
            self._outside = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + START_DEADLINE_S
        while self.run("systemctl", "is-system-running", check=False).stdout.strip() != "running":
            assert time.monotonic() < end, f"systemd did not come up: {self._log.read_text()[-2000:]}"
            assert self._outside.poll() is None, f"systemd ended: {self._log.read_text()[-2000:]}"
            time.sleep(0.3)
        return self

    def __exit__(self, *_: object) -> None:
        self._outside.kill()  # and with it process 1, and so everything in there
        self._outside.wait()

    def run(self, *words: str, check: bool = True, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command in there."""
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children").read_text().split()
        inside = (
            ["nsenter", "--target", children[0], "--mount", "--pid", "--ipc", "--uts", "--cgroup", "--root", "--wd"]
            if children
            else ["false"]
        )
        done = subprocess.run([*inside, *words], capture_output=True, text=True, timeout=timeout_s, check=False)
        if check:
            assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    @contextlib.contextmanager
    def streaming(self, sandbox: str) -> Iterator[None]:
        """A client in there that follows a command for as long."""
        words = [str(AENV), "exec", sandbox, "echo begun; sleep 600"]
        client = subprocess.Popen([*self._inside(), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "begun\n"
        try:
            yield
        finally:
            client.kill()
            client.wait()
            client.stdout.close()

    def _inside(self) -> list[str]:
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children").read_text().split()
        namespaces = ["--mount", "--pid", "--ipc", "--uts", "--cgroup", "--root", "--wd"]
        return ["nsenter", "--target", children[0], *namespaces] if children else ["false"]

    def aenv(self, *words: str, **more: object) -> str:
        """Run our client in there, with the settings of the machine."""
        return self.run(str(AENV), *words, **more).stdout  # type: ignore[arg-type]
