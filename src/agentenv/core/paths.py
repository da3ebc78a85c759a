"""Where a node keeps its files: one place, so that nobody spells a path twice.

`home` survives a reboot, `run` does not (sockets, mounts, pid files).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodePaths:
    """The folders of one node."""

    home: Path
    run: Path

    @property
    def tag(self) -> str:
        """Four hex digits that tell this node's namespaces and devices from those of others on the machine."""
        return hashlib.sha256(str(self.home.absolute()).encode()).hexdigest()[:4]

    @property
    def private(self) -> tuple[Path, ...]:
        """Folders with what belongs to tenants, or speaks of them: for the owner only."""
        cached = (self.cache / "images", self.cache / "blocks")
        return (self.layers, self.snapshots, self.home / "builds", self.home / "ca", self.log, *cached, self.vms, self.volume_servers)

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.home / "node.db"

    @property
    def api_key(self) -> Path:
        """The file with this node's API keys, one a line, readable by the owner only."""
        return self.home / "api-key"

    @property
    def cache(self) -> Path:
        """Downloads and what is built from them; may be deleted while the node is down."""
        return self.home / "cache"

    def authority(self, domain_name: str) -> Path:
        """The local certificate authority for a domain, and what it has issued."""
        return self.home / "ca" / domain_name

    @property
    def layers(self) -> Path:
        """The layer store."""
        return self.home / "layers"

    @property
    def volumes(self) -> Path:
        """One folder per volume, named by its id; for the owner only."""
        return self.home / "volumes"

    @property
    def build_files(self) -> Path:
        """Archives uploaded for template builds, by the hash of their files."""
        return self.home / "builds" / "files"

    @property
    def build_caches(self) -> Path:
        """What cache mounts of builds hold, by the hash of their ids."""
        return self.home / "builds" / "caches"

    @property
    def build_downloads(self) -> Path:
        """What ADD has fetched."""
        return self.home / "builds" / "downloads"

    @property
    def build_logs(self) -> Path:
        """One file per template build."""
        return self.home / "builds" / "logs"

    @property
    def build_scratch(self) -> Path:
        """What builds under way need for a moment; empty when the server starts."""
        return self.home / "builds" / "scratch"

    @property
    def secret_key(self) -> Path:
        """The key that secrets are encrypted with, readable by the owner only."""
        return self.home / "secret-key"

    @property
    def log(self) -> Path:
        """Logs of the server and of blockd."""
        return self.home / "log"

    @property
    def blockd_socket(self) -> Path:
        """blockd's API."""
        return self.run / "blockd.sock"

    @property
    def helper_logins(self) -> Path:
        """Logins for registries that credential helpers have given; for the owner only."""
        return self.run / "registry-logins.json"

    @property
    def api_socket(self) -> Path:
        """The API behind the proxy."""
        return self.run / "api.sock"

    @property
    def server_pid(self) -> Path:
        """`<pid> <start ticks>` of the running server."""
        return self.run / "server.pid"

    @property
    def vms(self) -> Path:
        """One folder per life of a VM."""
        return self.run / "vms"

    @property
    def volume_servers(self) -> Path:
        """One folder per life of a VM that mounts volumes."""
        return self.run / "volumes"

    @property
    def snapshots(self) -> Path:
        """One folder per snapshot."""
        return self.home / "snapshots"

    def snapshot(self, snapshot_id: str) -> Path:
        """The folder of a snapshot; its layers are in the layer store."""
        return self.snapshots / snapshot_id

    def vm(self, sandbox_id: str, run_id: str) -> Path:
        """The working folder of one life of a sandbox's VM."""
        return self.vms / f"{sandbox_id}-{run_id}"
