"""Joins everything: makes a node from its configuration, prepares it, serves it, shuts it down.

This is the only module that knows every adapter. `prepare`, `serve` and `shut_down` are what the CLI calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentenv.api.app import create_app
from agentenv.api.auth import KeyRing
from agentenv.api.serve import api_server, bind_unix
from agentenv.api.settings import ApiSettings
from agentenv.block import supervisor
from agentenv.config.schema import Config
from agentenv.core.built_in import BASE
from agentenv.core.clock import SystemClock
from agentenv.core.errors import AgentEnvError, Conflict, Unavailable
from agentenv.core.ids import new_api_key
from agentenv.core.model import VmIdentity
from agentenv.core.paths import NodePaths
from agentenv.guest.assets import ensure_guest_assets
from agentenv.guest.client import GuestClient
from agentenv.guest.initramfs import Initramfs
from agentenv.guest.kernel import GUEST_SETTINGS, Kernel
from agentenv.host import files, native
from agentenv.host.cgroup import Cgroups, node_name, protect_from_oom
from agentenv.host.process_limits import lift_file_size, raise_open_files
from agentenv.image.convert import Converter
from agentenv.image.helper_logins import HelperLogins
from agentenv.image.native import NativeImages
from agentenv.image.push import Publisher
from agentenv.image.registry import Registry
from agentenv.network.layout import GUEST_IP, Layout, boot_settings
from agentenv.network.slots import SlotPool, remove_all
from agentenv.orchestrator import reconcile
from agentenv.orchestrator.hot_memory import open_hot_memory
from agentenv.orchestrator.parts import Parts, Shared
from agentenv.orchestrator.service import Orchestrator
from agentenv.proxy.authority import LocalAuthority
from agentenv.proxy.limits import ProxySettings
from agentenv.proxy.sandboxes import SandboxRoutes
from agentenv.proxy.server import ProxyServer
from agentenv.proxy.tls import TlsIdentity, keep_fresh
from agentenv.secret.vault import Vault
from agentenv.serving import Doors, Starter, until_replaced
from agentenv.snapshot.capture import Capturer
from agentenv.snapshot.layers import LayerStore
from agentenv.store.sqlite import Store
from agentenv.template.base import BaseBuilder, BaseInputs
from agentenv.template.recipes import RECIPES, Recipe
from agentenv.template.rootfs import RootFilesystem, ensure_rootfs
from agentenv.vmm.choice import VmmInstallation, driver_for, ensure_vmm
from agentenv.vmm.driver import BootSpec
from agentenv.volume.registry import Volumes
from agentenv.volume.server import VolumeServers, end_all

_log = logging.getLogger(__name__)
Progress = Callable[[str, int | None, int | None], None]
_CLOSE_DEADLINE_S = 15.0
_WALKED_THROUGH = 0o711  # apt's own user reaches its lists in the cache, and sees nothing on the way
_ROOT_SETTINGS = "aenv.root=/dev/vda aenv.rootfs=ext4 aenv.hostname=sandbox"


def paths_of(config: Config) -> NodePaths:
    """The folders of a node."""
    return NodePaths(config.node.home.absolute(), config.node.run.absolute())


@dataclass(frozen=True, slots=True)
class Assets:
    """What guests are made of, ready on disk."""

    kernel: Kernel
    initramfs: Initramfs
    vmm: VmmInstallation


def ensure_assets(config: Config, progress: Progress, verify: bool = False) -> Assets:
    """Fetch or build what is missing of kernel, initramfs and VMM. Blocks; minutes on a fresh machine, else milliseconds."""
    cache = paths_of(config).cache
    guest = ensure_guest_assets(
        cache,
        native.program("envd"),
        local_vmlinux=Path(config.guest.kernel) if config.guest.kernel else None,
        suite=config.guest.kernel_suite,
        verify=verify,
        progress=progress,
    )
    return Assets(guest.kernel, guest.initramfs, ensure_vmm(cache, config.vmm, verify, progress))


def _rootfs(config: Config, recipe: Recipe, progress: Progress) -> RootFilesystem:
    return ensure_rootfs(
        paths_of(config).cache,
        packages=recipe.packages,
        placeholders=recipe.placeholders,
        files=recipe.files(),
        commands=recipe.commands,
        release=config.guest.rootfs_suite,
        size_bytes=config.guest.disk_mb << 20,
        progress=progress,
    )


def prepare(config: Config, progress: Progress) -> None:
    """First-run set-up: keys, guest assets, built-in templates. Quick when all is there. The server must not run."""
    paths = paths_of(config)
    files.own_folder(paths.home, _WALKED_THROUGH)
    if not paths.api_key.exists():
        files.write_atomic(paths.api_key, new_api_key().encode() + b"\n", 0o600)
    assets = ensure_assets(config, progress)
    asyncio.run(_prepare_templates(config, assets, progress))


async def _prepare_templates(config: Config, assets: Assets, progress: Progress) -> None:
    """Make those built-in templates that are missing, or were made from other inputs."""
    async with _node(config, assets) as parts:
        stale: list[tuple[BaseBuilder, RootFilesystem]] = []
        for recipe in _wanted(config, parts.store):
            rootfs = await asyncio.to_thread(_rootfs, config, recipe, progress)
            builder = base_builder(parts, recipe)
            if not builder.up_to_date(rootfs.digest):
                stale.append((builder, rootfs))
        if not stale:
            return
        await reconcile.reconcile(parts)
        try:
            for builder, rootfs in stale:
                inputs = BaseInputs(rootfs.path, rootfs.digest, parts.boot)
                await builder.build(inputs, progress)
        finally:
            await parts.slots.close()


def _wanted(config: Config, store: Store) -> list[Recipe]:
    """The recipes to keep current: `base`, those the configuration names, and those made before, whose sandboxes go on to start."""
    made = {alias for template in store.templates() if template.kind == "builtin" for alias in template.aliases}
    names = {BASE, *config.templates.built_in, *made}
    return [recipe for name, recipe in RECIPES.items() if name in names]


def base_builder(parts: Parts, recipe: Recipe) -> BaseBuilder:
    """The builder of a built-in template with the adapters of a node."""
    return BaseBuilder(
        recipe,
        store=parts.store,
        blocks=parts.blocks,
        slots=parts.slots,
        vmm=parts.vmm,
        guest=parts.guest,
        layers=parts.layers,
        capturer=parts.capturer,
        paths=parts.paths,
        clock=parts.clock,
        identity=parts.identity,
        config=parts.config.guest,
        using=parts.shared.using,
    )


@contextlib.asynccontextmanager
async def _node(config: Config, assets: Assets) -> AsyncIterator[Parts]:
    """All adapters of a node, opened; closed in the end without touching VMs or blockd."""
    paths = paths_of(config)
    largest_disk_mb = max(config.guest.disk_mb, config.limits.disk_mb_of_sandbox)
    lift_file_size(4 * largest_disk_mb << 20)  # a disk that overwrites and discards leaves holes in its file
    for folder in (paths.home, paths.run):
        files.own_folder(folder, _WALKED_THROUGH)
    for folder in paths.private:
        files.own_folder(folder)
    clock = SystemClock()
    store = Store(paths.database, clock)
    await store.open()
    try:
        flags = supervisor.remote_flags(paths.cache, config.images, config.limits.disk_reserve_mb, paths.helper_logins)
        block_server = supervisor.BlockServer(native.program("blockd"), paths.run, paths.log / "blockd.log", flags)
        try:
            await block_server.ensure_running()
            yield _parts(config, paths, clock, store, block_server, assets)
        finally:
            await block_server.close()
    finally:
        await store.close()


def _parts(
    config: Config, paths: NodePaths, clock: SystemClock, store: Store, block_server: supervisor.BlockServer, assets: Assets
) -> Parts:
    blocks = block_server.client
    layers = LayerStore(paths.layers)
    reserve_bytes = config.limits.disk_reserve_mb << 20
    vmm = driver_for(assets.vmm, config.vmm)
    identity: VmIdentity = vmm.identity(assets.kernel.sha256, assets.initramfs.digest)
    slots = SlotPool(Layout(config.network.pool_cidr, paths.tag), config.network.denied_cidrs, config.network.slots_ready)
    registry = Registry(paths.cache, config.images, reserve_bytes)
    return Parts(
        config=config,
        paths=paths,
        clock=clock,
        store=store,
        blocks=blocks,
        block_server=block_server,
        slots=slots,
        vmm=vmm,
        guest=GuestClient(GUEST_IP, clock),
        layers=layers,
        capturer=Capturer(blocks, layers, paths, clock),
        identity=identity,
        boot=BootSpec(assets.kernel.vmlinux, assets.initramfs.path, f"{GUEST_SETTINGS} {_ROOT_SETTINGS} {boot_settings()}"),
        volumes=Volumes(store.volumes, paths.volumes, clock),
        volume_servers=VolumeServers(
            native.program("volumed"), paths.volumes, paths.volume_servers, paths.log / "volumed.log", config.limits.disk_reserve_mb
        ),
        secrets=Vault(store.secrets, paths.secret_key, clock),
        shared=Shared(config.limits.starts_at_once),
        cgroups=Cgroups(node_name(paths.tag)),
        image_registry=registry,
        image_converter=Converter(layers, native.program("imagefs"), config.images, config.guest.disk_mb, reserve_bytes),
        native_images=NativeImages(layers, blocks, config.images, HelperLogins(paths.helper_logins, config.images.docker_config_file)),
        image_publisher=Publisher(paths.cache, registry, layers, blocks),
    )


@dataclass(frozen=True, slots=True)
class Succession:
    """What a server has of the one before it, and owes the one after it; see `serving`."""

    ready: Callable[[list[int]], None]
    """Called once, when requests are served, with copies of the listeners, which it closes."""
    start_next: Starter
    inherited: list[socket.socket] = field(default_factory=list)


def serve(config: Config, succession: Succession) -> None:
    """Run the server until SIGTERM or SIGINT, or until SIGUSR2 has brought the next. VMs and blockd go on afterwards.

    Unavailable when the next server did not come to serve.
    """
    import uvloop

    if not uvloop.run(_serve(config, succession)):
        raise Unavailable("the next server did not come to serve, and this one has closed the node", "`aenv up` starts a server")


async def _serve(config: Config, succession: Succession) -> bool:
    paths = paths_of(config)
    stop, make_way = asyncio.Event(), asyncio.Event()
    raise_open_files()
    protect_from_oom(os.getpid())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR2, make_way.set)
    assets = await asyncio.to_thread(ensure_assets, config, lambda *_: None)
    async with _node(config, assets) as parts:
        orchestrator = Orchestrator(parts)
        await parts.volumes.open()
        await reconcile.reconcile(parts)
        await open_hot_memory(parts)
        await orchestrator.open()
        settings = ApiSettings.from_config(config.api)
        api = api_server(create_app(orchestrator, KeyRing.from_file(paths.api_key), settings, troubles=parts.shared.troubles))
        listener = bind_unix(paths.api_socket)
        api_task = asyncio.create_task(api.serve(sockets=[listener]), name="api")
        routes = SandboxRoutes(orchestrator)
        proxy = ProxyServer(routes, paths.api_socket, ProxySettings(domains=(settings.domain, "localhost")))
        doors = Doors(proxy, routes, succession.inherited)
        await doors.open(config.api.host, config.api.port)
        _log.info("serving on %s port %d", config.api.host, config.api.port)
        certificate_task = await _serve_tls(config, doors)
        succession.ready(doors.all_open())
        if not await until_replaced(doors, succession.start_next, stop, make_way, api_task):
            await proxy.close(_CLOSE_DEADLINE_S)
        if certificate_task is not None:
            certificate_task.cancel()
        api.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(api_task, _CLOSE_DEADLINE_S)
        listener.close()
        await orchestrator.close()
        await parts.volumes.close()
        await parts.slots.close()
    return await doors.see_out(config.api.drain_minutes * 60, stop)


async def _serve_tls(config: Config, doors: Doors) -> asyncio.Task[None] | None:
    """Open the TLS listener if the settings ask for one; the task keeps its certificate fresh."""
    port = config.api.tls_listen_port
    if port is None:
        return None
    identity = tls_identity(config)
    await doors.open(config.api.host, port, identity.context)
    _log.info("serving https://api.%s on %s port %d", config.api.client_domain, config.api.host, port)
    return asyncio.create_task(keep_fresh(identity), name="certificate")


def tls_identity(config: Config) -> TlsIdentity:
    """The operator's certificate if the settings name one, else one of the local authority. HostNotReady."""
    if config.api.tls_cert:
        return TlsIdentity(Path(config.api.tls_cert), Path(config.api.tls_key))
    name = config.api.domain_name
    authority = LocalAuthority(paths_of(config).authority(name), name, SystemClock())
    return TlsIdentity(authority.cert_file, authority.key_file, authority.ensure)


def shut_down(config: Config, kill_sandboxes: bool, report: Callable[[str], None]) -> None:
    """With the server stopped: pause (or kill) what runs, end blockd, remove all networks. Idempotent; blocks.

    Conflict when a sandbox could not be paused: it and everything it needs is left running, so that nothing is lost.
    """
    paths = paths_of(config)
    if paths.database.exists():
        asyncio.run(_rest_sandboxes(config, kill_sandboxes, report))
    strays = reconcile.kill_strays(paths.vms, set())
    if strays:
        report(f"ended {strays} VM(s) that no sandbox owned")
    if servers := end_all(paths.volume_servers):
        report(f"ended {servers} volume server(s) that no sandbox owned")
    if asyncio.run(supervisor.stop(paths.run)):
        report("the block server is stopped")
    slots = remove_all(Layout(config.network.pool_cidr, paths.tag))
    if slots:
        report(f"removed {slots} network slot(s)")
    Cgroups(node_name(paths.tag)).close()
    paths.api_socket.unlink(missing_ok=True)
    paths.blockd_socket.unlink(missing_ok=True)


async def _rest_sandboxes(config: Config, kill_sandboxes: bool, report: Callable[[str], None]) -> None:
    """Pause or kill every sandbox that has a VM; paused ones are killed only when asked."""
    store = Store(paths_of(config).database, SystemClock())
    await store.open()
    live = [s for s in store.sandboxes() if s.vm is not None or (kill_sandboxes and s.state != "killed")]
    await store.close()
    if not live:
        return
    assets = await asyncio.to_thread(ensure_assets, config, lambda *_: None)
    failed: list[str] = []
    async with _node(config, assets) as parts:
        orchestrator = Orchestrator(parts)
        await reconcile.reconcile(parts)
        for sandbox in parts.store.sandboxes():
            if sandbox.state == "killed" or (sandbox.vm is None and not kill_sandboxes):
                continue
            verb, done = (orchestrator.kill, "killed") if kill_sandboxes else (orchestrator.pause, "paused")
            try:
                await verb(sandbox.sandbox_id)
                report(f"{done} {sandbox.sandbox_id}")
            except AgentEnvError as error:
                failed.append(f"{sandbox.sandbox_id} could not be {done}: {error}")
        await orchestrator.close()
        await parts.slots.close()
    if failed:
        raise Conflict(
            "the node cannot go down without losing work: " + "; ".join(failed),
            "mend the cause and run `aenv down` again, or give the sandboxes up with `aenv down --kill`",
        )
