"""The processes that serve volumes to guests: one `volumed` for each life of a VM that mounts any.

Each is started inside the sandbox's network namespace, listens where only that guest reaches it, and is told of the volumes
this sandbox mounts and of no other. It lives on when the node server ends; the next one finds it by its work folder,
`<run>/volumes/<sandbox id>-<run id>`. One that dies is started again (`ensure`): NFS version 3 keeps no state in it, so the
guest's programs only wait meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from agentenv.core.errors import HostNotReady, Internal, Unavailable
from agentenv.core.model import Volume
from agentenv.core.tasks import wait_done
from agentenv.host import files, netns, process
from agentenv.host.process import ProcessId
from agentenv.network.layout import GATEWAY_IP, VOLUME_PORT

_START_DEADLINE_S = 10.0
_POLL_S = 0.01
_LAST_WORDS_CHARS = 1000


def nfs_target(volume_id: str) -> str:
    """What a guest mounts to have a volume."""
    return f"{GATEWAY_IP}:/{volume_id}"


class VolumeServers:
    """All of a node's volume servers. `adopt` first."""

    def __init__(self, program: Path, volumes: Path, run: Path, log: Path, reserve_mb: int) -> None:
        self._program = program
        self._volumes = volumes  # folder of all trees
        self._run = run
        self._log = log
        self._reserve_mb = reserve_mb
        self._alive: dict[Path, ProcessId] = {}  # by work folder

    async def adopt(self, kept: set[str]) -> None:
        """Take over the servers of the lives `<sandbox id>-<run id>` in `kept`, and end all others."""
        await asyncio.to_thread(self._adopt, kept)

    async def ensure(self, life: str, namespace: str, volumes: Sequence[Volume]) -> bool:
        """Have the server of a life run in `namespace`; True when it had to be started. HostNotReady, Internal."""
        folder = self._run / life
        known = self._alive.get(folder)
        if known is not None and process.is_alive(known):
            return False
        started = asyncio.ensure_future(asyncio.to_thread(self._start, folder, namespace, list(volumes)))
        cancelled = await wait_done(started)  # to its end, so that `stop` knows of it
        started.result()
        if cancelled is not None:
            raise cancelled
        return True

    async def stop(self, life: str) -> None:
        """End the server of a life and remove its work folder. No error when there is none."""
        await asyncio.to_thread(self._stop, self._run / life)

    def _adopt(self, kept: set[str]) -> None:
        for folder, found in process.working_below(self._run).items():
            if folder.name in kept:
                self._alive[folder] = found
            else:
                process.kill(found)
        for folder in self._run.iterdir() if self._run.is_dir() else ():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self, folder: Path, namespace: str, volumes: list[Volume]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entries = [{"name": one.volume_id, "folder": str(self._volumes / one.volume_id), "key": _handle_key(one)} for one in volumes]
        files.write_atomic(folder / "exports.json", json.dumps(entries).encode(), 0o600)
        argv = [str(self._program), "--listen", f"{GATEWAY_IP}:{VOLUME_PORT}", "--exports", str(folder / "exports.json")]
        try:
            started = process.spawn([*argv, "--reserve-mb", str(self._reserve_mb)], self._log, folder, namespace, {})
        except HostNotReady:  # it says why itself
            raise
        except Unavailable as error:
            raise _ended_at_once(self._log) from error
        self._alive[folder] = started
        _wait_until_it_listens(started, namespace, self._log)

    def _stop(self, folder: Path) -> None:
        found = self._alive.pop(folder, None)
        if found is not None:
            process.kill(found)
        shutil.rmtree(folder, ignore_errors=True)


def end_all(run: Path) -> int:
    """End every volume server below `run`, whoever started it; returns how many there were. Blocks."""
    found = process.working_below(run)
    for one in found.values():
        process.kill(one)
    shutil.rmtree(run, ignore_errors=True)
    return len(found)


def _handle_key(volume: Volume) -> str:
    """Signs the handles that guests hold, for as long as the volume is. Of no use for anything else."""
    return hashlib.sha256(f"nfs handles of {volume.volume_id}: {volume.token}".encode()).hexdigest()


def _wait_until_it_listens(started: ProcessId, namespace: str, log: Path) -> None:
    end = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < end:
        with netns.tcp_socket(namespace) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((GATEWAY_IP, VOLUME_PORT)) == 0:
                return
        if not process.is_alive(started):
            raise _ended_at_once(log)
        time.sleep(_POLL_S)
    process.kill(started)
    raise Internal(f"the volume server did not listen within {_START_DEADLINE_S:g} s", f"see {log}")


def _ended_at_once(log: Path) -> HostNotReady:
    said = log.read_text(errors="replace")[-_LAST_WORDS_CHARS:] if log.is_file() else ""
    cause = " ".join(said.rpartition("Error: ")[2].split()) or "it wrote no message"
    return HostNotReady(f"the volume server ended at once: {cause}", f"see {log}")
