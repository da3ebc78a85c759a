"""The mounts of one RUN: put over the disk before its program, taken away after it, whatever its end.

The content lies in a folder of the disk that goes with the mount, that of secrets in the guest's memory. Nothing of the image
is needed for it.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import AgentEnvError
from agentenv.template import steps
from agentenv.template.copying import Layout
from agentenv.template.dockerfile.actions import Copy, Mount, Origin
from agentenv.template.dockerfile.arrange import Arrangement, Piece
from agentenv.template.dockerfile.supply import CacheFile, Supply
from agentenv.template.tarballs import ArchiveWriter

HIDDEN = "/.aenv-mounts"
"""Where the content of mounts is in a guest (`native/crates/envd/src/provision/mounts.rs`)."""
SECRET_MAX_BYTES = 500 << 10  # as Docker has it


@dataclass(frozen=True, slots=True)
class _Site:
    """Where mounts are made, and for which RUN."""

    origin: Origin
    supply: Supply
    tools: steps.StepTools


@asynccontextmanager
async def mounted(mounts: tuple[Mount, ...], origin: Origin, supply: Supply, tools: steps.StepTools) -> AsyncIterator[dict[str, str]]:
    """Have the mounts for the length of the body, which gets the variables they give. StepFailed and others."""
    site, variables = _Site(origin, supply, tools), dict[str, str]()
    async with AsyncExitStack() as undone:
        for at, mount in enumerate(mounts):
            with steps.told_as(f"--mount: '{mount.target or mount.name}' could not be mounted"):
                await _put(mount, f"{HIDDEN}/{at}", site, undone, variables)
        yield variables


async def _put(mount: Mount, folder: str, site: _Site, undone: AsyncExitStack, variables: dict[str, str]) -> None:
    if mount.kind == "memory":
        await _attach("", mount, folder, site, undone)
    elif mount.kind == "bind":
        await _fill_from_source(mount, folder, site)
        await _attach(f"{folder}/content", mount, folder, site, undone)
    elif mount.kind == "cache":
        cache = await undone.enter_async_context(site.supply.cache(mount.name, mount.sharing))
        await _fill_cache(mount, folder, cache, site)
        undone.push_async_callback(_forget, folder, site)
        if not mount.is_read_only:
            undone.push_async_callback(_keep, mount, folder, cache, site)
        await _attach(f"{folder}/content", mount, "", site, undone)
    else:
        await _put_secret(mount, folder, site, undone, variables)


async def _put_secret(mount: Mount, folder: str, site: _Site, undone: AsyncExitStack, variables: dict[str, str]) -> None:
    content = site.supply.secrets.get(mount.name)
    if content is None:
        if mount.is_required:
            raise steps.StepFailed(
                f"the secret '{mount.name}' is required, and the build has none of that id; give --secret id={mount.name}"
            )
        return
    if mount.variable:
        variables[mount.variable] = content.decode(errors="surrogateescape")
    if not mount.target:
        return
    bench = await site.tools.bench()
    undone.push_async_callback(_forget, folder, site)
    made = await bench.mount("", folder, mode=0o700)
    undone.push_async_callback(bench.unmount, folder, made, "")
    with tempfile.TemporaryDirectory(dir=scratch(site.tools)) as name:
        archive = Path(name) / "secret.tar"
        _write_one(archive, "content", mount, content)
        await bench.unpack(archive, folder, 0, 0, site.tools.left_s())
    await _attach(f"{folder}/content", mount, "", site, undone, is_read_only=True)


async def _attach(source: str, mount: Mount, folder: str, site: _Site, undone: AsyncExitStack, *, is_read_only: bool = False) -> None:
    bench = await site.tools.bench()
    if folder and source:
        undone.push_async_callback(_forget, folder, site)
    ro = mount.is_read_only or is_read_only
    made = await bench.mount(source, mount.target, is_read_only=ro, size_bytes=mount.size_bytes, mode=mount.mode)
    undone.push_async_callback(bench.unmount, mount.target, made, "")


async def _forget(folder: str, site: _Site) -> None:
    """The content goes; a VM that was lost has none."""
    bench = await site.tools.bench()
    await bench.unmount(folder, "", folder)


async def _fill_from_source(mount: Mount, folder: str, site: _Site) -> None:
    """Have `source` of the context or stage be `content` of the folder."""
    tools = site.tools
    wanted = Copy(site.origin, (mount.source,), f"{folder}/content", stage=mount.stage)
    with tempfile.TemporaryDirectory(dir=scratch(tools)) as name:
        work = Path(name)
        if mount.stage is not None:
            await site.supply.pack(mount.stage, wanted.sources, work / "stage.tar", tools.content_max_bytes)
            await _unpack(wanted, Piece.literal(work / "stage.tar", wanted.sources), work, tools)
        else:
            with tools.files.using(mount.files_hash) as archive:
                await _unpack(wanted, Piece.literal(archive, wanted.sources), work, tools)


async def _unpack(wanted: Copy, piece: Piece, work: Path, tools: steps.StepTools) -> None:
    arrangement = Arrangement(wanted, [piece], tools.content_max_bytes, work)

    def prepare() -> Layout:
        arrangement.survey()
        layout = arrangement.layout(is_folder=False)
        arrangement.write(work / "arranged.tar", layout, None)
        return layout

    layout = await steps.to_its_end(prepare)
    bench = await tools.bench()
    await bench.unpack(work / "arranged.tar", layout.folder, 0, 0, tools.left_s())


async def _fill_cache(mount: Mount, folder: str, cache: CacheFile, site: _Site) -> None:
    bench = await site.tools.bench()
    if cache.archive is not None:
        await bench.unpack(cache.archive, f"{folder}/content", 0, 0, site.tools.left_s())
    elif mount.stage is not None:
        await _fill_from_source(mount, folder, site)
    else:
        with tempfile.TemporaryDirectory(dir=scratch(site.tools)) as name:
            archive = Path(name) / "empty.tar"
            _write_one(archive, ".", mount, None)
            await bench.unpack(archive, f"{folder}/content", 0, 0, site.tools.left_s())


async def _keep(mount: Mount, folder: str, cache: CacheFile, site: _Site) -> None:
    """What a program has left in a cache is for the next one, also when it has failed."""
    tools = site.tools
    bench = await tools.bench()
    with tempfile.TemporaryDirectory(dir=scratch(tools)) as name:
        archive = Path(name) / "cache.tar"
        try:
            await bench.pack((".",), archive, tools.content_max_bytes, tools.left_s(), root=f"{folder}/content")
        except AgentEnvError as error:
            tools.log.add(f"the cache '{mount.name}' is not kept: {error.message}", level="warn")
        else:
            await cache.keep(archive)


def _write_one(output: Path, name: str, mount: Mount, content: bytes | None) -> None:
    """An archive of one file, or of an empty folder, with the owner and mode of a mount."""
    info = tarfile.TarInfo(name)
    uid, _, gid = mount.owner.partition(":")
    info.mode, info.uid, info.gid = mount.mode, int(uid), int(gid)
    if content is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = len(content)
    with output.open("wb") as file, ArchiveWriter(file) as written:
        written.add(info, None if content is None else io.BytesIO(content))


def scratch(tools: steps.StepTools) -> Path:
    """The folder for temporary files of a build."""
    tools.scratch.mkdir(parents=True, exist_ok=True)
    return tools.scratch
