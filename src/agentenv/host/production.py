"""What a host still lacks for production, told check by check, each with the command that mends it. Reads only.

Every fact comes from a file below `root` (`/`, or a made-up tree in tests) or from `Facts`. A check is `needed` when isolation,
durability or the figures of the documentation depend on it, else `advised`; none of them keeps sandboxes from running at all.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.config.schema import Config
from agentenv.host.doctor import Check, Status, kvm_kind
from agentenv.host.process_limits import OPEN_FILES_WANTED
from agentenv.host.tuning import MODULES, OPEN_FILES_MAX, SYSCTLS, Module, Need, Sysctl

GROUP = "production"
KERNEL_WANTED = (6, 5)
DISK_WANTED_BYTES = 100 << 30
SWAPPINESS_MOST = 10
FILE_SYSTEMS = ("ext4", "xfs", "btrfs", "zfs", "f2fs")
CONTROLLERS = ("cpu", "io", "memory", "pids")
SERVICE_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Where a service of systemd looks for programs."""
SYSTEMD = "run/systemd/system"
SERVICE = "agentenv.service"
_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter")
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


@dataclass(frozen=True, slots=True)
class Facts:
    """What no file tells: the kernel's release, what adjtimex(2) says of its clock, how many files a process may open."""

    release: str = field(default_factory=platform.release)
    clock_state: int = field(default_factory=lambda: ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def production_checks(config: Config, root: Path = Path("/"), facts: Facts | None = None) -> list[Check]:
    """Every check, the needed ones first."""
    host = _Host(root, facts or Facts(), config)
    found = [
        host.kernel(),
        host.virtualisation(),
        host.firecracker(),
        *(host.module(module) for module in MODULES),
        host.cgroup(),
        *(check for sysctl in SYSCTLS if (check := host.sysctl(sysctl)) is not None),
        host.file_system(),
        host.private_home(),
        host.at_boot(),
        host.open_files(),
        host.free_disk(),
        host.clock(),
        host.time_sync(),
        host.swap(),
        host.huge_pages(),
        host.transparent_huge_pages(),
        host.same_page_merging(),
        host.hyper_threads(),
        host.cpu_flaws(),
        host.access_control(),
    ]
    return sorted(found, key=lambda check: check.need != "needed")


class _Host:
    """The host whose files are below `root`."""

    def __init__(self, root: Path, facts: Facts, config: Config) -> None:
        self._root, self._facts = root, facts
        self._home = config.node.home.absolute()
        self._programs = {"firecracker": config.vmm.firecracker, "jailer": config.vmm.jailer}

    def _read(self, path: str) -> str:
        """A file's text, empty when there is none."""
        try:
            return (self._root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def kernel(self) -> Check:
        found = re.match(r"(\d+)\.(\d+)", self._facts.release)
        fits = found is not None and (int(found[1]), int(found[2])) >= KERNEL_WANTED
        hint = "apt-get install -t bookworm-backports linux-image-amd64, then reboot"
        wanted = ".".join(map(str, KERNEL_WANTED))
        return _check("kernel", "needed", fits, f"Linux {self._facts.release}" + ("" if fits else f"; ublk wants {wanted} or newer"), hint)

    def virtualisation(self) -> Check:
        kind = kvm_kind(self._root)
        flags = self._read("proc/cpuinfo")
        module = "kvm_intel" if re.search(r"\bvmx\b", flags) else "kvm_amd" if re.search(r"\bsvm\b", flags) else ""
        hint = {
            "absent": f"modprobe {module}"
            if module
            else "turn virtualisation on in the firmware, or use a machine that has it (bare metal, or nested)",
            "forbidden": "run aenv as root, or in a container give it the device: --device /dev/kvm",
            "pvm": "use a machine with hardware virtualisation",
            "usable": "",
        }[kind]
        return _check("virtualisation", "needed", kind == "usable", f"/dev/kvm is {kind}", hint)

    def firecracker(self) -> Check:
        lacking = [name for name, setting in self._programs.items() if not self._has_program(setting or name)]
        detail = f"there is no {' and no '.join(lacking)}: VMs run on QEMU" if lacking else "its programs are there"
        hint = "put firecracker and jailer of one release, 1.12 or newer, into /usr/local/bin"
        return _check("firecracker", "needed", not lacking, detail, hint)

    def _has_program(self, name: str) -> bool:
        paths = [Path(name).absolute()] if "/" in name else [Path(folder, name) for folder in SERVICE_PATH]
        return any(os.access(self._root / path.relative_to("/"), os.X_OK) for path in paths)

    def module(self, module: Module) -> Check:
        loaded = (self._root / module.proof).exists()
        detail = "loaded" if loaded else f"not loaded: {module.why}"
        return _check(f"module {module.name}", module.need, loaded, detail, f"modprobe {module.name}")

    def cgroup(self) -> Check:
        have = self._read("sys/fs/cgroup/cgroup.controllers").split()
        if not have:
            hint = "boot with systemd.unified_cgroup_hierarchy=1 (GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub, reboot)"
            return _check("cgroup v2", "needed", False, "not mounted: memory of idle VMs cannot be reclaimed", hint)
        lacking = [name for name in CONTROLLERS if name not in have]
        detail = f"lacks {', '.join(lacking)}" if lacking else f"with {', '.join(CONTROLLERS)}"
        hint = "boot without cgroup_disable=, and with no controller in use by cgroup v1"
        return _check("cgroup v2", "needed", not lacking, detail, hint)

    def sysctl(self, sysctl: Sysctl) -> Check | None:
        """None where the kernel has no such setting: then its module is missing, which another check says."""
        text = self._read(sysctl.path)
        if not text.isdigit():
            return None
        fits = sysctl.fits(int(text))
        wanted = f"{'' if sysctl.exact else 'at least '}{sysctl.value}"
        detail = text if fits else f"{text}, wanted {wanted}: {sysctl.why}"
        return _check(sysctl.name, sysctl.need, fits, detail, f"sysctl -w {sysctl.name}={sysctl.value}")

    def file_system(self) -> Check:
        home, best, kind = str(self._home), "", "unknown"
        for line in self._read("proc/mounts").splitlines():
            place, name = [*line.split(), "", "", ""][1:3]
            if len(place) >= len(best) and (home == place or home.startswith(place.rstrip("/") + "/")):
                best, kind = place, "ext4" if name in ("ext2", "ext3", "ext4") else name
        fits = kind in FILE_SYSTEMS
        detail = f"{self._home} is on {kind}" + ("" if fits else ", which is not known to keep what was flushed")
        hint = f"mount a disk with one of {', '.join(FILE_SYSTEMS)} there, or set node.home"
        return _check("file system", "needed", fits, detail, hint)

    def private_home(self) -> Check:
        home = self._root / self._home.relative_to("/")
        open_to_all = home.exists() and bool(home.stat().st_mode & 0o066)
        detail = "other users can list its files" if open_to_all else "not for other users"
        return _check("home", "needed", not open_to_all, f"{self._home}: {detail}", f"chmod 0711 {self._home}")

    def at_boot(self) -> Check:
        if not (self._root / SYSTEMD).exists():
            return _check("service", "advised", False, "no systemd here: something else must start the node", "run `aenv up` at boot")
        enabled = (self._root / f"etc/systemd/system/multi-user.target.wants/{SERVICE}").is_symlink()
        return _check("service", "advised", enabled, "starts at boot" if enabled else f"no {SERVICE} is enabled", "aenv setup")

    def open_files(self) -> Check:
        most = self._facts.open_files
        fits = most == resource.RLIM_INFINITY or most >= OPEN_FILES_WANTED
        hint = f"ulimit -Hn {OPEN_FILES_MAX} before `aenv up`; the service of `aenv setup` has it"
        return _check("open files", "advised", fits, f"{most} for each process" + ("" if fits else f", wanted {OPEN_FILES_WANTED}"), hint)

    def free_disk(self) -> Check:
        folder = self._root / self._home.relative_to("/")
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        hint = "give node.home a disk of its own: paused sandboxes and their layers live there"
        return _check("free disk", "advised", free >= DISK_WANTED_BYTES, f"{free >> 30} GiB free for {self._home}", hint)

    def clock(self) -> Check:
        source = self._read("sys/devices/system/clocksource/clocksource0/current_clocksource")
        hint = "boot with tsc=reliable if the machine's TSC is sound (`dmesg | grep -i tsc`)"
        detail = source or "unknown"
        return _check("clock source", "advised", source in _CLOCKS, detail, hint)

    def time_sync(self) -> Check:
        synchronised = self._facts.clock_state not in (_TIME_ERROR, -1)
        detail = (
            "synchronised" if synchronised else "nobody synchronises it: guests take the host's time, and tokens and certificates end by it"
        )
        return _check("time", "advised", synchronised, detail, "apt-get install chrony")

    def swap(self) -> Check:
        used = self._read("proc/swaps").splitlines()[1:]
        swappiness = self._read("proc/sys/vm/swappiness")
        calm = not used or not swappiness.isdigit() or int(swappiness) <= SWAPPINESS_MOST
        detail = f"{len(used)} area(s), vm.swappiness {swappiness}" if used else "none: idle guests give memory back by pausing"
        return _check("swap", "advised", calm, detail, f"sysctl -w vm.swappiness={SWAPPINESS_MOST}")

    def huge_pages(self) -> Check:
        kept = self._read("proc/sys/vm/nr_hugepages")
        none = kept in ("", "0")
        detail = "none set aside" if none else f"{kept} pages set aside, which sandboxes cannot use"
        return _check("huge pages", "advised", none, detail, "sysctl -w vm.nr_hugepages=0")

    def transparent_huge_pages(self) -> Check:
        always = "[always]" in self._read("sys/kernel/mm/transparent_hugepage/enabled")
        detail = "always: VMMs take memory in steps of 2 MiB" if always else "only where asked for"
        return _check("transparent huge pages", "advised", not always, detail, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")

    def same_page_merging(self) -> Check:
        merging = self._read("sys/kernel/mm/ksm/run") == "1"
        detail = "on: a guest can find out by timing what others have in memory" if merging else "off"
        return _check("same-page merging", "advised", not merging, detail, "echo 2 > /sys/kernel/mm/ksm/run")

    def hyper_threads(self) -> Check:
        on = self._read("sys/devices/system/cpu/smt/active") == "1"
        detail = "two sandboxes may share a core and what leaks from it" if on else "off"
        hint = "where tenants do not trust each other: echo off > /sys/devices/system/cpu/smt/control"
        return _check("hyper-threads", "advised", not on, detail, hint)

    def cpu_flaws(self) -> Check:
        folder = self._root / "sys/devices/system/cpu/vulnerabilities"
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        open_ones = [name for name in names if self._read(f"sys/devices/system/cpu/vulnerabilities/{name}").startswith("Vulnerable")]
        detail = f"vulnerable to {', '.join(open_ones)}" if open_ones else "none known that is open"
        hint = "apt-get install intel-microcode amd64-microcode, boot without mitigations=off"
        return _check("processor flaws", "advised", not open_ones, detail, hint)

    def access_control(self) -> Check:
        enforcing = self._read("sys/fs/selinux/enforce") == "1"
        apparmor = self._read("sys/module/apparmor/parameters/enabled") == "Y"
        detail = "SELinux enforces, and has no policy for VMMs of ours" if enforcing else f"AppArmor is {'on' if apparmor else 'off'}"
        return _check(
            "access control", "advised", not enforcing, detail, "look for denials: ausearch -m avc -c blockd -c firecracker -c aenv"
        )


def _check(name: str, need: Need, fits: bool, detail: str, hint: str) -> Check:
    status: Status = "ok" if fits else "warn"
    return Check(name, status, detail, "" if fits else hint, GROUP, need)
