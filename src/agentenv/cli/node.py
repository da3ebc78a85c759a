"""The node of this machine as the commands see it: its configuration, its server process, its key.

Owns two files in `<run>`, written by the server process itself: `server.pid` (`<pid> <start ticks>`) and `server.json`
(where it listens and keeps its things). Invariants: the record names a process for good (pid and start time), so a
recycled pid is never taken for the server; while a record exists it says which home and port this node uses, so that
`aenv up --port 4000 --home /data` needs no repetition in later commands; `aenv down` ends with no record.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.cli.exits import CliError, Exit
from agentenv.core.errors import InvalidInput
from agentenv.core.paths import NodePaths

if TYPE_CHECKING:
    from agentenv.config.schema import Config

ADDRESS = "server.json"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The server process and what it was started with."""

    pid: int
    start_ticks: int
    host: str
    port: int
    home: Path
    domain: str = ""
    tls_port: int | str = "auto"

    def is_alive(self) -> bool:
        """Whether this very server still runs."""
        from agentenv.host.process import ProcessId, is_alive

        return is_alive(ProcessId(self.pid, self.start_ticks))


def node_paths(config: Config) -> NodePaths:
    """Where this node's files are."""
    return NodePaths(config.node.home, config.node.run)


def read_record(config: Config) -> ServerRecord | None:
    """The record in the node's run folder; None when there is none, or only a damaged one."""
    pid_file = node_paths(config).server_pid
    try:
        pid, ticks = (int(number) for number in pid_file.read_text().split())
        address = json.loads((config.node.run / ADDRESS).read_text())
        domain, tls_port = str(address.get("domain", "")), address.get("tls_port", "auto")
        return ServerRecord(pid, ticks, str(address["host"]), int(address["port"]), Path(address["home"]), domain, tls_port)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise CliError(f"cannot read {error.filename}: {error.strerror}", "run aenv as root") from error
    except (ValueError, KeyError, TypeError):  # cut off by a crash of the host: what it named is gone as well
        return None


def write_record(config: Config) -> None:
    """Record this process as the server."""
    from agentenv.host.files import write_atomic
    from agentenv.host.process import start_ticks

    api = config.api
    address = {"host": api.host, "port": api.port, "home": str(config.node.home), "domain": api.domain, "tls_port": api.tls_port}
    write_atomic(config.node.run / ADDRESS, json.dumps(address).encode() + b"\n")
    write_atomic(node_paths(config).server_pid, f"{os.getpid()} {start_ticks(os.getpid())}\n".encode())


def remove_record(config: Config) -> None:
    """Forget the server."""
    node_paths(config).server_pid.unlink(missing_ok=True)
    (config.node.run / ADDRESS).unlink(missing_ok=True)


def load_config(**changes: Any) -> Config:
    """The configuration with `changes`, each named `section_setting`; None means no change."""
    from agentenv.config.load import load
    from agentenv.config.schema import Config

    values = load().model_dump()
    for name, value in changes.items():
        if value is not None:
            section, _, key = name.partition("_")
            values[section][key] = value
    from pydantic import ValidationError

    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"setting {'.'.join(str(part) for part in first['loc'][:2])}: {first['msg']}") from error


def config_in_force() -> Config:
    """The configuration, with home, addresses and domain of the recorded server when there is one."""
    config = load_config()
    record = read_record(config)
    if record is None:
        return config
    return load_config(
        node_home=record.home, api_host=record.host, api_port=record.port, api_domain=record.domain, api_tls_port=record.tls_port
    )


def node_url(config: Config) -> str:
    """Where a client on this machine reaches the node."""
    host = config.api.host
    host = _WILDCARDS.get(host, f"[{host}]" if ":" in host and not host.startswith("[") else host)
    return f"http://{host}:{config.api.port}"


def node_domain(config: Config) -> str:
    """The domain in the host names of sandbox ports (contract section 1.2)."""
    return config.api.client_domain


def read_key(config: Config) -> str:
    """This node's API key: the first of its key file (one a line, `#` begins a comment)."""
    path = node_paths(config).api_key
    try:
        keys = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except FileNotFoundError as error:
        raise CliError(f"there is no API key in {path}", "`aenv up` makes one at its first run", Exit.UNREACHABLE) from error
    except OSError as error:
        raise CliError(f"cannot read the API key in {path}: {error.strerror}", "run aenv as root, or set E2B_API_KEY") from error
    if not keys:
        raise CliError(f"the API key file {path} holds no key", "remove it and run `aenv up`, which makes a new one")
    return keys[0]
