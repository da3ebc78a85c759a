"""`make lab`: the production path, tried inside a sandbox of our own.

The portable mode emulates AMD's virtualisation, so a guest of it can have /dev/kvm and ublk devices although this machine has neither.
A template `lab` (our Debian base with the modules of the node's own guest kernel) is made once; each run starts a sandbox of it,
brings the programs under test in, runs `inside.py` there, and takes its results and logs back to `lab-results/`.
Its node has a home of its own beside this machine's, and a QEMU of its own (`emulator.py`).
`make lab HOST=1` runs the same script on this machine, for one that has KVM and ublk: it loads no modules there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import inside
from emulator import ensure_emulator
from payload import ROOT, collect, say

RESULTS = ROOT / "lab-results"
TEMPLATE = "lab"  # with a tag that says what it was made from
VCPUS, MEMORY_MB = 2, 4096
MODULES = (
    "kvm_amd",
    "ublk_drv",
    "tun",
    "loop",
    "veth",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "nft_nat",
    "nft_reject_inet",
    "sch_tbf",
)
PACKAGES = ("nftables", "kmod", "mmdebstrap", "zstd")
PASSED_ON = ("LAB_SUITE", "AENV_KILLS", "AENV_SEED", "AENV_CYCLES")  # to the tests inside
RUN_TIMEOUT_S = 5 * 3600
SANDBOX_TIMEOUT_S = 6 * 3600
ATTEMPTS = 4  # an emulated machine that runs VMs of its own ends by itself once in a while
CODE_CACHE_MB = "1024"  # two kernels and all that runs on them; a full one is thrown away whole, which stops all CPUs
LAST_WORDS_S = 3  # until the node has written down why
POOL_CIDR = "10.153.0.0/16"  # of the lab's own node


class LabEnded(Exception):
    """The lab's sandbox has ended under what ran in it."""


def template_files(folder: Path) -> None:
    """Kernel modules in the order of loading, and Debian packages, as the template's build takes them."""
    from agentenv.config.load import load
    from agentenv.guest.initramfs import select_modules
    from agentenv.guest.kernel import ensure_kernel
    from agentenv.host.debian import PrivateApt
    from agentenv.wiring import paths_of

    config = load()
    cache = paths_of(config).cache
    (folder / "modules").mkdir(parents=True)
    modules = select_modules(ensure_kernel(cache, suite=config.guest.kernel_suite), MODULES, ())
    for module in modules:
        (folder / "modules" / f"{module.name}.ko").write_bytes(module.image)
    (folder / "modules" / "load").write_text("".join(f"{module.name}.ko\n" for module in modules))
    (folder / "packages").mkdir()
    for package in PrivateApt.for_suite(cache / "apt", config.guest.rootfs_suite).download(PACKAGES, config.guest.rootfs_suite):
        shutil.copy2(package, folder / "packages")


def ensure_template() -> str:
    """The name of the template, which is built if there is none of these files."""
    from e2b import Template

    from agentenv.vmm import qemu

    with tempfile.TemporaryDirectory() as work:
        template_files(Path(work) / "lab")
        files = sorted(path for path in Path(work).rglob("*") if path.is_file())
        content = b"".join(str(path.relative_to(work)).encode() + hashlib.sha256(path.read_bytes()).digest() for path in files)
        content += Path(qemu.__file__).read_bytes()  # the machine it runs on, and its kernel's command line
        content += f"{VCPUS} {MEMORY_MB} {Path(os.environ['AENV_VMM_QEMU']).parents[1].name}".encode()
        name = f"{TEMPLATE}:{hashlib.sha256(content).hexdigest()[:16]}"
        if Template.exists(name):
            return name
        builder = (
            Template(file_context_path=work)
            .from_template("base")
            .set_user("root")
            .copy("lab", "/lab/", user="root")
            # Versions that the base has already stay as they are.
            .run_cmd("dpkg --skip-same-version --refuse-downgrade --install /lab/packages/*.deb && rm -r /lab/packages")
            .set_start_cmd("true", "test -s /lab/modules/load && test -x /usr/sbin/nft")
        )
        Template.build(builder, name, cpu_count=VCPUS, memory_mb=MEMORY_MB, on_build_logs=lambda entry: say(entry.message))
        return name


@contextmanager
def sandbox(template: str) -> Iterator[Any]:
    """A sandbox of the template, gone in the end."""
    from e2b import Sandbox

    found = Sandbox.create(template, timeout=SANDBOX_TIMEOUT_S)
    try:
        yield found
    finally:
        found.kill()


class Heard:
    """What a script inside has said so far. Calls print more of it."""

    def __init__(self) -> None:
        self._text = ""

    def __call__(self, text: str) -> None:
        print(text, end="", flush=True)
        self._text += text

    def checks(self) -> list[str]:
        """The checks that are through and have passed."""
        return re.findall(r"^    ok: (\w+) in ", self._text, re.MULTILINE)

    def tests(self) -> list[str]:
        """The tests of a suite that have passed."""
        return re.findall(r"^    passed: (.+)$", self._text, re.MULTILINE)


def run_inside(template: str, checks: list[str]) -> int:
    """Run the checks in a sandbox; what was not through when that ended by itself, in another one. Their exit code."""
    heard = Heard()
    with tempfile.TemporaryDirectory() as work:
        archive = pack(Path(work), checks)
        for attempt in range(ATTEMPTS):
            left = [check.__name__ for check in inside.chosen(checks) if check.__name__ not in heard.checks()]
            if not left:
                return 0
            try:
                return run_once(template, archive, left, heard)
            except LabEnded as error:
                say(f"attempt {attempt + 1} of {ATTEMPTS}: the lab's own sandbox ended: {error}")
    return 1


def pack(folder: Path, checks: list[str]) -> Path:
    """One archive, in `folder`, of everything that the script needs."""
    collect(folder, checks)
    archive = folder / "payload.tar.gz"
    # By tar: times to the nanosecond, holes, and links stay as they are.
    names = sorted(path.name for path in folder.iterdir())
    command = ["tar", "--create", "--sparse", "--format=posix", "--use-compress-program=gzip -1", f"--file={archive}", *names]
    subprocess.run(command, cwd=folder, check=True)
    return archive


def run_once(template: str, archive: Path, checks: list[str], heard: Heard) -> int:
    """Run the script in a sandbox; its exit code. LabEnded when that ends by itself."""
    from e2b import CommandExitException, SandboxException

    with sandbox(template) as lab:
        say("take the programs into the sandbox")
        with archive.open("rb") as payload:
            lab.files.write("/lab/payload.tar.gz", payload, user="root", request_timeout=RUN_TIMEOUT_S)
        lab.commands.run("cd /lab && tar xzf payload.tar.gz && rm payload.tar.gz", user="root", timeout=600)
        lab.files.write("/lab/passed.json", json.dumps(heard.tests()), user="root")
        say("run inside")
        settings = " ".join(f"{name}={shlex.quote(os.environ[name])}" for name in PASSED_ON if name in os.environ)
        command = f"cd /lab && {settings} exec python3 -u inside.py --load-modules {' '.join(checks)}"
        try:
            lab.commands.run(command, user="root", timeout=RUN_TIMEOUT_S, on_stdout=heard, on_stderr=heard)
            code = 0
        except CommandExitException as ended:
            code = ended.exit_code
        except SandboxException as error:
            if not lab.is_running():
                raise LabEnded(last_words(lab.sandbox_id)) from error
            bring_back(lab)
            raise
        bring_back(lab)
    return code


def bring_back(lab: Any) -> None:
    """Make what the script wrote the results of this run."""
    lab.commands.run("cd /lab && tar czf results.tar.gz results", user="root", timeout=300)
    content = io.BytesIO(lab.files.read("/lab/results.tar.gz", format="bytes", user="root"))
    with tempfile.TemporaryDirectory() as work:
        with tarfile.open(fileobj=content) as tar:
            tar.extractall(work, filter="data")
        keep(Path(work) / "results")


def last_words(sandbox_id: str) -> str:
    """The last line of a sandbox's log: why it ended."""
    from local_node import AENV

    time.sleep(LAST_WORDS_S)
    said = subprocess.run([str(AENV), "logs", sandbox_id], capture_output=True, text=True, check=False)
    return (said.stdout or said.stderr).strip().rpartition("\n")[2]


def run_here(checks: list[str]) -> int:
    """Run the script on this machine."""
    with tempfile.TemporaryDirectory() as work:
        collect(Path(work), checks)
        code = subprocess.run([sys.executable, "-u", "inside.py", *checks], cwd=work, check=False).returncode
        keep(Path(work) / "results")
    return code


def keep(folder: Path) -> None:
    """Make `folder` the results of this run."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    shutil.copytree(folder, RESULTS)


def node_settings() -> dict[str, str]:
    """Of the lab's node: it goes on beside one that is up, and takes over what that one's cache has."""
    from e2e_node import free_port

    from agentenv.config.load import load
    from agentenv.wiring import paths_of

    paths = paths_of(load())
    home, run = (path.with_name(f"{path.name}-lab") for path in (paths.home, paths.run))
    qemu = ensure_emulator(paths.cache)
    assets = home / "cache/assets"
    assets.mkdir(parents=True, exist_ok=True)
    for asset in (paths.cache / "assets").iterdir():
        if not asset.name.startswith(".") and not (assets / asset.name).exists():
            shutil.copytree(asset, assets / asset.name, copy_function=os.link, symlinks=True)
    return {
        "AENV_NODE_HOME": str(home),
        "AENV_NODE_RUN": str(run),
        "AENV_API_PORT": str(free_port()),
        "AENV_NETWORK_POOL_CIDR": POOL_CIDR,
        "AENV_VMM_QEMU": str(qemu),
        "AENV_VMM_CODE_CACHE_MB": os.environ.get("AENV_VMM_CODE_CACHE_MB", CODE_CACHE_MB),
    }


def main() -> None:
    """The whole of it; exits with the script's code."""
    checks = [word for word in sys.argv[1:] if word != "--host"]
    inside.chosen(checks)  # so that an unknown name is told before anything begins
    if "--host" in sys.argv:
        sys.exit(run_here(checks))
    from local_node import node

    os.environ.update(node_settings())
    say("start the lab's node")
    with node() as variables:
        os.environ.update(variables)
        say(f"make the template {TEMPLATE} (the first time: some minutes)")
        code = run_inside(ensure_template(), checks)
    say(f"results are in {RESULTS}")
    sys.exit(code)


if __name__ == "__main__":
    main()
