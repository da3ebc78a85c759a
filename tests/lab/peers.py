"""Other sandboxes of microVMs beside ours, on one machine and with the bytes of one root file system: microsandbox and boxlite.

Each is asked, by its own Python package and as its documentation says, for machines of 1 CPU and 512 MiB: create -> first output of a
command, one after the other and ten at once, and what ten idle ones take (PSS of all processes that it started). Whatever one of them
does not manage is a result, too. Prints a table and writes `peers.json`. Run by `node_check.py`; our node is up for its own turn alone.

    ours          the template `base` of the node
    microsandbox  the root file system as a folder that its guests share (bind)
    boxlite       the same files as an OCI image of one layer, in a folder
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SIDES = ("microsandbox", "boxlite", "ours")
ROUNDS, AT_ONCE, IDLE_S = 3, 10, 10
VCPUS, MEMORY_MB = 1, 512
COMMAND = "echo first"
RUN = {"Cmd": ["/bin/bash"], "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
SIDE_DEADLINE_S = 900.0
UP_TIMEOUT_S = 1200
"""For all that one side is asked for; under emulation a guest of a peer boots for a minute."""


class Side(Protocol):
    """One kind of sandboxes."""

    async def create(self, number: int) -> Any:
        """A sandbox that takes commands."""
        ...

    async def run(self, sandbox: Any) -> str:
        """The output of COMMAND."""
        ...

    async def end(self, sandbox: Any) -> None:
        """Let it go."""
        ...


class Ours:
    """By the E2B SDK, as anybody."""

    async def create(self, number: int) -> Any:
        """From `base`, which has the size that the others are given."""
        from e2b import AsyncSandbox

        return await AsyncSandbox.create("base", timeout=3600)

    async def run(self, sandbox: Any) -> str:
        """By the same SDK."""
        return str((await sandbox.commands.run(COMMAND)).stdout)

    async def end(self, sandbox: Any) -> None:
        """Kill it."""
        await sandbox.kill()


class Microsandbox:
    """libkrun; its guests share a folder as their root."""

    def __init__(self, here: Path) -> None:
        self._root = here / "root"

    async def create(self, number: int) -> Any:
        """Without a network of its own, which is less than ours does."""
        import microsandbox

        image = microsandbox.Image.bind(str(self._root))
        return await microsandbox.Sandbox.create(f"peer-{number}", image=image, cpus=VCPUS, memory=MEMORY_MB, replace=True)

    async def run(self, sandbox: Any) -> str:
        """Through its shell, as ours."""
        return str((await sandbox.shell(COMMAND)).stdout_text)

    async def end(self, sandbox: Any) -> None:
        """Leave its context, which stops and removes it."""
        await sandbox.__aexit__(None, None, None)


class Boxlite:
    """libkrun with containers in the guest, from an image in the OCI layout."""

    def __init__(self, here: Path) -> None:
        self._layout = here / "layout"

    async def create(self, number: int) -> Any:
        """Started at once."""
        import boxlite

        return await boxlite.SimpleBox(rootfs_path=str(self._layout), cpus=VCPUS, memory_mib=MEMORY_MB, name=f"peer-{number}").start()

    async def run(self, sandbox: Any) -> str:
        """Through a shell, as ours."""
        return str((await sandbox.exec("/bin/bash", "-l", "-c", COMMAND)).stdout)

    async def end(self, sandbox: Any) -> None:
        """Leave its context, which stops and removes it."""
        await sandbox.__aexit__(None, None, None)


async def first_output_ms(side: Side, number: int) -> tuple[Any, float]:
    """A new sandbox, and what it took from the call to the whole output of the first command."""
    began = time.perf_counter()
    sandbox = await side.create(number)
    output = await side.run(sandbox)
    took_ms = 1000 * (time.perf_counter() - began)
    if "first" not in output:
        raise RuntimeError(f"the command's output is {output!r}")
    return sandbox, took_ms


async def measure(side: Side) -> dict[str, Any]:
    """All figures of one side, as far as it gets: `error` says what ended it."""
    found: dict[str, Any] = {}
    try:
        found["first_ms"] = await one_life_ms(side, 0, found)  # makes whatever is made once
        found["create_ms"] = statistics.median([await one_life_ms(side, number, found) for number in range(1, ROUNDS + 1)])
        found |= await together(side)
    except Exception as error:  # noqa: BLE001 - what a peer fails with is what is reported
        found["error"] = f"{type(error).__name__}: {error}"[:600]
    return found


async def one_life_ms(side: Side, number: int, found: dict[str, Any]) -> float:
    """From the call to the first output; an end that fails is noted, and no failure of what was measured."""
    sandbox, took_ms = await first_output_ms(side, number)
    try:
        await side.end(sandbox)
    except Exception as error:  # noqa: BLE001 - as above
        found["end_error"] = f"{type(error).__name__}: {error}"[:300]
    return took_ms


async def together(side: Side) -> dict[str, Any]:
    """Ten at once, and the memory that they take when they are idle."""
    before, began = processes(), time.perf_counter()
    made = await asyncio.gather(*(first_output_ms(side, 100 + number) for number in range(AT_ONCE)), return_exceptions=True)
    took_ms = 1000 * (time.perf_counter() - began)
    good = [one[0] for one in made if not isinstance(one, BaseException)]
    found: dict[str, Any] = {"at_once": len(good), "at_once_ms": took_ms}
    if good:
        await asyncio.sleep(IDLE_S)
        found["memory_mb"] = sum(pss_kib(pid) for pid in processes() - before) / 1024 / len(good)
    for one in good:
        with contextlib.suppress(Exception):
            await side.end(one)
    failed = [one for one in made if isinstance(one, BaseException)]
    return found | ({"at_once_error": f"{type(failed[0]).__name__}: {failed[0]}"[:300]} if failed else {})


def processes() -> set[int]:
    """All there are."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


def pss_kib(pid: int) -> int:
    """What a process holds, of shared pages its part; none when it is gone or the kernel's."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


# -- the root file system in the forms that the sides take


def prepare(here: Path, image: Path) -> None:
    """A folder `root` with the files of the ext4 image, mounted from a copy, and an OCI layout `layout` of them."""
    here.mkdir(parents=True)
    subprocess.run(["cp", "--sparse=always", str(image), str(here / "root.ext4")], check=True)
    (here / "root").mkdir()
    subprocess.run(["mount", "-o", "loop", str(here / "root.ext4"), str(here / "root")], check=True)
    layer = here / "layer.tar"
    subprocess.run(["tar", "--create", "--numeric-owner", "--file", str(layer), "--directory", str(here / "root"), "."], check=True)
    write_layout(here / "layout", layer)


def write_layout(layout: Path, layer: Path) -> None:
    """An OCI image layout of one uncompressed layer, which is moved into it."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(content: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return f"sha256:{digest}", len(content)

    def described(kind: str, blob: tuple[str, int]) -> dict[str, Any]:
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": blob[0], "size": blob[1]}

    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size_bytes = layer.stat().st_size
    layer.rename(blobs / digest)
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    config = put(json.dumps({"architecture": "amd64", "os": "linux", "config": RUN, "rootfs": rootfs}).encode())
    layers = [described("layer.v1.tar", (f"sha256:{digest}", size_bytes))]
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": described("config.v1+json", config), "layers": layers}
    entry = described("manifest.v1+json", put(json.dumps(manifest).encode()))
    entry |= {"annotations": {"org.opencontainers.image.ref.name": "latest"}, "platform": {"architecture": "amd64", "os": "linux"}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


# -- the whole of it


@dataclass(frozen=True)
class Row:
    """What is shown of one figure."""

    name: str
    key: str
    unit: str


ROWS = (
    Row("the very first create -> first output", "first_ms", "ms"),
    Row("create -> first output (median)", "create_ms", "ms"),
    Row(f"{AT_ONCE} at once: the last first output", "at_once_ms", "ms"),
    Row(f"{AT_ONCE} at once: of which work", "at_once", ""),
    Row("memory of an idle one, of ten", "memory_mb", "MiB"),
)


def main(here: Path, results: Path, assets: Path, aenv: Path) -> None:
    """Measure each side in a process of its own; exits with 1 when ours does not work."""
    folder = here / "peers-work"
    shutil.rmtree(folder, ignore_errors=True)
    [image] = assets.glob("rootfs-*/root.ext4")
    prepare(folder, image)
    found = {}
    try:
        for side in SIDES:
            with node(aenv) if side == "ours" else contextlib.nullcontext({}) as variables:
                found[side] = in_its_own_process(side, here, folder, variables)
            print(f"    {side}: {json.dumps(found[side])}", flush=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder / "root")], check=False)
    (results / "peers.json").write_text(json.dumps(found, indent=2))
    print(f"    {'':44}" + "".join(f"{side:>16}" for side in SIDES))
    for row in ROWS:
        cells = (f"{found[side][row.key]:,.0f} {row.unit}" if row.key in found[side] else "-" for side in SIDES)
        print(f"    {row.name:44}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    sys.exit("error" in found["ours"])


@contextlib.contextmanager
def node(aenv: Path) -> Iterator[dict[str, str]]:
    """Our node, up with the settings that a node has by default; what a client of it needs in its environment."""
    subprocess.run([aenv, "up", "--detach"], check=True, timeout=UP_TIMEOUT_S)
    try:
        yield json.loads(subprocess.run([aenv, "env", "--json"], capture_output=True, check=True).stdout)
    finally:
        subprocess.run([aenv, "down", "--kill"], check=True, timeout=UP_TIMEOUT_S)


def in_its_own_process(side: str, here: Path, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """So that a peer that hangs or crashes spoils nothing; what it leaves running is ended."""
    before = processes()
    search = os.pathsep.join(str(path) for path in (here / "peers-site", here / "site"))
    environment = os.environ | variables | {"PYTHONPATH": search, "HOME": str(folder), "BOXLITE_HOME": str(folder / "boxlite-home")}
    command = [sys.executable, "-u", __file__, side, str(folder)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SIDE_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done within {SIDE_DEADLINE_S:.0f} s", "said": str(error.stderr or b"")[-600:]}
    finally:
        if side != "ours":
            end_of(processes() - before)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": f"it ended with {done.returncode}: {done.stderr[-600:]}"}


def end_of(pids: set[int]) -> None:
    """End what a peer has left, but for threads of the kernel."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/exe").readlink():
                os.kill(pid, 9)


MAKERS: dict[str, Callable[[Path], Side]] = {"ours": lambda _: Ours(), "microsandbox": Microsandbox, "boxlite": Boxlite}


def run_side(side: str, folder: Path) -> None:
    """Measure one side, and print what was found as one line of JSON."""

    async def work() -> None:
        print(json.dumps(await measure(MAKERS[side](folder))), flush=True)

    asyncio.run(work())


if __name__ == "__main__":
    if sys.argv[1] in SIDES:
        run_side(sys.argv[1], Path(sys.argv[2]))
    else:
        main(*(Path(word) for word in sys.argv[1:5]))
