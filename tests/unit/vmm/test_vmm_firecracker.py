"""What Firecracker is asked for, and what its answers mean. The driver as a whole runs in the lab (`make lab`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.core.errors import DeadlineExceeded, HostNotReady, Internal, InvalidInput, Unavailable, Unsupported
from agentenv.core.model import Machine
from agentenv.core.quotas import Quotas
from agentenv.host import mounts, process
from agentenv.host.capped_log import open_for_program
from agentenv.host.process import ProcessId
from agentenv.vmm import firecracker
from agentenv.vmm.driver import BootSpec, MemoryFile, VmSpec
from agentenv.vmm.firecracker import FirecrackerDriver, FirecrackerSettings, installed_version
from agentenv.vmm.firecracker_api import FirecrackerApi, FirecrackerError
from agentenv.vmm.firecracker_requests import CpuTemplate, RateLimits, boot_requests, cpu_template, load_requests

SPEC = VmSpec("vm", Path("/work"), Machine(2, 256, 1024), Path("/m"), Path("/d"), "ns", "tap0", "02:00:00:00:00:01")
BOOT = BootSpec(Path("/k"), Path("/i"), "aenv.root=/dev/vda")
LIMITS = RateLimits(disk_bytes=1000, disk_operations=20, network_bytes=300)
NONE = {"size": 0, "refill_time": 1000}
SETTINGS = FirecrackerSettings(Path("/fc"), Path("/jailer"), "1.12.1", "cpu")


class FakeFirecracker:
    """Answers each request with the next of `replies` (default: 204)."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.replies: list[bytes | None] = []
        self.asked: list[tuple[str, str, Any]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket))

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *headers = head.decode().split("\r\n")
                lengths = [int(line.split(":")[1]) for line in headers if line.lower().startswith("content-length")]
                body = await reader.readexactly(lengths[0]) if lengths else b""
                method, path, _ = first.split()
                self.asked.append((method, path, json.loads(body) if body else None))
                reply = self.replies.pop(0) if self.replies else b"HTTP/1.1 204 No Content\r\n\r\n"
                if reply is None:
                    await asyncio.sleep(60)
                writer.write(reply or b"")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def firecracker_process(tmp_path: Path) -> AsyncIterator[FakeFirecracker]:
    fake = FakeFirecracker(tmp_path / "api.sock")
    yield fake
    fake.stop()


async def test_it_is_waited_for_and_then_asked(firecracker_process: FakeFirecracker) -> None:
    api = FirecrackerApi(firecracker_process.socket)
    waiting = asyncio.create_task(api.wait_listening(5))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await firecracker_process.start()
    await waiting
    await api.call("PUT", "/actions", {"action_type": "InstanceStart"})
    assert firecracker_process.asked == [("GET", "/", None), ("PUT", "/actions", {"action_type": "InstanceStart"})]
    await api.close()


async def test_each_failure_has_its_class(firecracker_process: FakeFirecracker) -> None:
    api = FirecrackerApi(firecracker_process.socket)
    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        await api.wait_listening(0.05)
    await firecracker_process.start()
    fault = b'{"fault_message":"no such drive"}'
    firecracker_process.replies = [b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(fault), fault)]
    with pytest.raises(FirecrackerError, match="refused PUT /drives/x: no such drive"):
        await api.call("PUT", "/drives/x", {})
    firecracker_process.replies = [b"HTTP/1.1 500 Error\r\nContent-Length: 4\r\n\r\nwhat"]
    with pytest.raises(FirecrackerError, match="what"):
        await api.call("PUT", "/drives/x", {})
    firecracker_process.replies = [None]
    with pytest.raises(DeadlineExceeded, match=r"PATCH /vm within 0\.1 s"):
        await api.call("PATCH", "/vm", {}, deadline_s=0.1)
    firecracker_process.replies = [b"nonsense\r\n\r\n"]
    with pytest.raises(Unavailable):
        await api.call("GET", "/")
    await api.close()


def test_a_boot_names_everything_by_its_place_in_the_jail() -> None:
    requests = boot_requests(SPEC, BOOT, RateLimits(), CpuTemplate())
    assert requests[0] == ("PUT", "/machine-config", {"vcpu_count": 2, "mem_size_mib": 256, "track_dirty_pages": True})
    assert requests[-1] == ("PUT", "/actions", {"action_type": "InstanceStart"})
    text = json.dumps(requests)
    assert all(name in text for name in ('"/kernel"', '"/initramfs"', '"/disk"', "aenv.root=/dev/vda", '"Writeback"', SPEC.guest_mac))
    assert not any(str(path) in text for path in (SPEC.work, '/k"', '/i"'))


@pytest.mark.parametrize(
    ("version", "tracking"), [("1.12.1", "enable_diff_snapshots"), ("1.13.0", "track_dirty_pages"), ("1.14.2", "track_dirty_pages")]
)
def test_a_load_takes_this_sandbox_s_network_device(version: str, tracking: str) -> None:
    load, *_, resume = load_requests(replace(SPEC, tap="tap7"), version, RateLimits())
    assert load[:2] == ("PUT", "/snapshot/load")
    assert load[2] == {
        "snapshot_path": "/state",
        "mem_backend": {"backend_type": "File", "backend_path": "/memory"},
        tracking: True,
        "network_overrides": [{"iface_id": "net", "host_dev_name": "tap7"}],
    }
    assert resume == ("PATCH", "/vm", {"state": "Resumed"})


def test_limits_hold_after_a_boot_and_replace_those_of_a_state() -> None:
    disk = {"bandwidth": {"size": 1000, "refill_time": 1000}, "ops": {"size": 20, "refill_time": 1000}}
    network = {"bandwidth": {"size": 300, "refill_time": 1000}, "ops": NONE}
    booted = {path: body for _, path, body in boot_requests(SPEC, BOOT, LIMITS, CpuTemplate())}
    assert booted["/drives/root"]["rate_limiter"] == disk
    loaded = load_requests(SPEC, "1.12.1", LIMITS)
    assert [path for _, path, _ in loaded] == ["/snapshot/load", "/drives/root", "/network-interfaces/net", "/vm"]
    assert loaded[1][2] == {"drive_id": "root", "rate_limiter": disk}
    assert loaded[2][2] == {"iface_id": "net", "rx_rate_limiter": network, "tx_rate_limiter": network}
    assert booted["/network-interfaces/net"]["tx_rate_limiter"] == network


@pytest.mark.parametrize("quotas", [Quotas(), Quotas(disk_bytes_per_s=7), Quotas(disk_operations_per_s=9)])
def test_what_a_sandbox_is_not_limited_in_is_set_free_of_what_its_snapshot_was(quotas: Quotas) -> None:
    loaded = {path: body for _, path, body in load_requests(replace(SPEC, quotas=quotas), "1.12.1", RateLimits())}
    wanted = (quotas.disk_bytes_per_s, quotas.disk_operations_per_s)
    disk = loaded["/drives/root"]["rate_limiter"]
    assert tuple(disk[bucket]["size"] for bucket in ("bandwidth", "ops")) == wanted
    for direction in ("rx", "tx"):
        assert loaded["/network-interfaces/net"][f"{direction}_rate_limiter"] == {"bandwidth": NONE, "ops": NONE}
    assert list(loaded)[-1] == "/vm"  # before the guest runs on


def test_a_cpu_template_is_asked_for_and_is_what_snapshots_depend_on(tmp_path: Path) -> None:
    custom = tmp_path / "mixed.json"
    custom.write_text('{"cpuid_modifiers": []}')
    by_name, by_file = cpu_template("T2A"), cpu_template(str(custom))
    assert boot_requests(SPEC, BOOT, RateLimits(), by_name)[0][2]["cpu_template"] == "T2A"
    assert ("PUT", "/cpu-config", {"cpuid_modifiers": []}) in boot_requests(SPEC, BOOT, RateLimits(), by_file)
    assert "cpu" not in json.dumps(boot_requests(SPEC, BOOT, RateLimits(), cpu_template("")), default=str).replace("vcpu_count", "")
    found = [FirecrackerDriver(replace(SETTINGS, cpu_template=one)).identity("k", "i") for one in (by_name, by_file, cpu_template(""))]
    assert found[0].cpu_model == "template T2A"
    assert found[1].cpu_model.startswith("template sha256:")
    assert found[2].cpu_model == "cpu"
    custom.write_text('{"cpuid_modifiers": [1]}')
    assert cpu_template(str(custom)).identity != by_file.identity


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "{"])
def test_a_cpu_template_that_is_none_is_refused(tmp_path: Path, content: str | None) -> None:
    custom = tmp_path / "t.json"
    if content is not None:
        custom.write_text(content)
    with pytest.raises(InvalidInput, match=r"vmm\.cpu_template names .*t\.json"):
        cpu_template(str(custom))


def test_the_disk_rates_of_a_sandbox_go_before_the_nodes() -> None:
    spec = replace(SPEC, quotas=Quotas(disk_bytes_per_s=500))
    disk = {"bandwidth": {"size": 500, "refill_time": 1000}, "ops": {"size": 20, "refill_time": 1000}}
    booted = {path: body for _, path, body in boot_requests(spec, BOOT, LIMITS, cpu_template(""))}
    assert booted["/drives/root"]["rate_limiter"] == disk
    assert load_requests(spec, "1.12.1", LIMITS)[1][2]["rate_limiter"] == disk


def _ourselves() -> ProcessId:
    """A process that is there as long as the test is."""
    ticks = process.start_ticks(os.getpid())
    assert ticks is not None
    return ProcessId(os.getpid(), ticks)


class Saving:
    """A VM whose Firecracker is a fake, and whose jail is a folder."""

    def __init__(self, fake: FakeFirecracker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fake, self.lent = folder, fake, [""]
        monkeypatch.setattr(firecracker, "inside", lambda pid, name: folder / name)
        monkeypatch.setattr(mounts, "lend", lambda pid, source, target: self.lent.append(f"{source} at {target}"))
        monkeypatch.setattr(mounts, "take_back", lambda pid, target: self.lent.append(f"{target} back"))
        self.vm = firecracker.FirecrackerVm(_ourselves(), replace(SPEC, work=folder))


@pytest.mark.parametrize(("is_whole", "kind"), [(False, "Diff"), (True, "Full")])
async def test_a_save_lends_the_memory_file_for_as_long_as_it_takes(
    firecracker_process: FakeFirecracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool, kind: str
) -> None:
    saving = Saving(firecracker_process, tmp_path, monkeypatch)
    await firecracker_process.start()
    (tmp_path / "state-out").write_text("device state")
    await saving.vm.save_state(tmp_path / "kept", MemoryFile(Path("/stacks/one"), is_whole))
    asked = {"snapshot_type": kind, "snapshot_path": "/state-out", "mem_file_path": "/capture"}
    assert firecracker_process.asked == [("PUT", "/snapshot/create", asked)]
    assert saving.lent[1:] == ["/stacks/one at /capture", "/capture back"]
    assert (tmp_path / "kept").read_text() == "device state"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o444, "another jail reads it"
    assert not (tmp_path / "state-out").exists()
    await saving.vm.close()


async def test_a_save_that_fails_leaves_no_state_and_takes_the_file_back(
    firecracker_process: FakeFirecracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(firecracker_process, tmp_path, monkeypatch)
    await firecracker_process.start()
    memory = MemoryFile(Path("/stacks/one"), is_whole=False)
    fault = b'{"fault_message":"No space left on device"}'
    firecracker_process.replies = [b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%s" % (len(fault), fault)]
    with pytest.raises(Internal, match="No space left"):
        await saving.vm.save_state(tmp_path / "kept", memory)
    with pytest.raises(Internal, match="could not be saved"):  # it said it worked, and there is no file
        await saving.vm.save_state(tmp_path / "kept", memory)
    (tmp_path / "state-out").symlink_to("/etc/hostname")
    with pytest.raises(Internal, match="could not be saved"):  # a guest that broke out could put a link in its place
        await saving.vm.save_state(tmp_path / "kept", memory)
    assert saving.lent[1:] == ["/stacks/one at /capture", "/capture back"] * 3
    assert not (tmp_path / "kept").exists()
    with pytest.raises(Unsupported):
        await saving.vm.save_state(tmp_path / "kept")
    await saving.vm.close()


async def test_whether_it_stands_still_is_asked_only_when_it_is_not_known(
    firecracker_process: FakeFirecracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(firecracker_process, tmp_path, monkeypatch)
    await firecracker_process.start()
    body = b'{"state":"Paused"}'
    firecracker_process.replies = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]
    assert await saving.vm.stalled()  # a former server has done it
    await saving.vm.resume()
    assert not await saving.vm.stalled()
    await saving.vm.pause()
    assert await saving.vm.stalled()
    assert [method for method, _, _ in firecracker_process.asked] == ["GET", "PATCH", "PATCH"]
    await saving.vm.close()


@pytest.mark.parametrize(
    ("last", "reason"), [("reboot: Power down", "the guest powered off"), ("reboot: System halted", "the guest halted")]
)
async def test_a_guest_that_powers_off_ends_its_vmm(tmp_path: Path, last: str, reason: str) -> None:
    output = open_for_program(tmp_path / "output")
    vmm = process.spawn(["sleep", "60"], tmp_path / "log", tmp_path)
    vm = firecracker.FirecrackerVm(vmm, replace(SPEC, work=tmp_path))
    ended = asyncio.create_task(vm.ended())
    for piece in ("reboot: Restarting\n", "Power down\n", last[:9], last[9:]):  # in two pieces, as a pipe may give it
        await asyncio.sleep(0.05)
        assert not ended.done()
        os.write(output, piece.encode())
    async with asyncio.timeout(10):
        assert await ended == reason
    os.close(output)
    await vm.close()


@pytest.mark.parametrize(
    ("firecracker", "jailer", "reason"),
    [
        ("echo Firecracker v1.12.1", "echo Jailer v1.12.1", None),
        ("echo Firecracker v1.14.0", "echo Jailer v1.14.0", None),
        ("echo Firecracker v1.12.1", "echo Jailer v1.13.0", "1.13.0"),
        ("echo Firecracker v1.11.0", "echo Jailer v1.11.0", "older than 1.12"),
        ("echo QEMU", "echo Jailer v1.12.1", "does not tell its version"),
        (None, "echo Jailer v1.12.1", "cannot be run"),
    ],
)
def test_programs_must_be_of_one_release_that_is_new_enough(
    tmp_path: Path, firecracker: str | None, jailer: str, reason: str | None
) -> None:
    for name, script in (("firecracker", firecracker), ("jailer", jailer)):
        if script is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
    programs = (tmp_path / "firecracker", tmp_path / "jailer")
    if reason is None:
        assert installed_version(*programs) in ("1.12.1", "1.14.0")
        return
    with pytest.raises(HostNotReady, match=reason):
        installed_version(*programs)
