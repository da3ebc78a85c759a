"""The host's own calls to a guest's envd: `/init` after every start, health and freeze before a pause, metrics. Made from inside the slot's
namespace, because envd takes host-internal calls from the gateway's address only (contract section 3.2)."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore

from agentenv.core.clock import Clock, rfc3339
from agentenv.core.errors import DeadlineExceeded, Internal, InvalidInput, StorageFull, Unavailable
from agentenv.core.ids import machine_id, new_entropy
from agentenv.guest.commands import Command, CommandRefused, Ended, OnOutput, OnStart, Stream, follow
from agentenv.guest.metrics import HEAD_MAX_BYTES, MetricsReader
from agentenv.guest.provision import Provision, check, message_of
from agentenv.host import netns
from agentenv.host.http_limits import all_within

ENVD_PORT = 49983
_MAX_READ_BYTES = 65536
_MAX_OUTPUT_BYTES = 1 << 20
_UPLOAD_CHUNK_BYTES = 1 << 20
_NAMED_CHARS = 200  # of a command that an error names
_BOOT_CONNECT_S = 1.0  # the kernel's first repeat of a SYN comes after as long, the fifth after 31 s
_RETRY_S = 0.01  # between tries of a guest that refuses connections: it is about to listen


@dataclass(frozen=True, slots=True)
class GuestIdentity:
    """What makes a restored guest this sandbox and no other."""

    sandbox_id: str
    template_id: str
    access_token: str = field(repr=False)
    env_vars: dict[str, str] = field(default_factory=dict)
    dns_servers: tuple[str, ...] = ()
    volume_mounts: tuple[tuple[str, str], ...] = ()  # NFS target, path
    default_user: str = "user"
    default_workdir: str = "/home/user"


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(min(max_bytes, _MAX_READ_BYTES))
        except TimeoutError as error:
            raise httpcore.ReadTimeout from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore.WriteTimeout from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.UnsupportedProtocol("a guest's envd speaks plain HTTP")

    def get_extra_info(self, info: str) -> Any:
        return None


class _NamespaceBackend(httpcore.AsyncNetworkBackend):
    """Dials from inside one network namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return _Stream(*await _dial(self._namespace, (host, port), _MAX_READ_BYTES))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error


async def _dial(namespace: str, address: tuple[str, int], limit_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from inside `namespace`, buffering about `limit_bytes`. The caller sets the deadline. OSError, NotFound."""
    sock = netns.tcp_socket(namespace)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
        return await asyncio.open_connection(sock=sock, limit=limit_bytes)
    except BaseException:
        sock.close()
        raise


class GuestClient:
    """Calls of the host to guests."""

    def __init__(self, guest_ip: str, clock: Clock) -> None:
        self._address = (guest_ip, ENVD_PORT)
        self._url = f"http://{guest_ip}:{ENVD_PORT}"
        self._clock = clock
        self.provision = Provision(self._post)

    async def initialise(
        self, namespace: str, identity: GuestIdentity, deadline_s: float, boots: bool = False, clock_behind_ms: int = 0
    ) -> str:
        """Give a freshly restored guest its time, entropy, name, environment and token; returns envd's version.

        Waits until the guest answers. A new connection is tried while the guest refuses or resets it; one that merely
        waits is left alone, since a busy host makes the guest slow, not deaf; unless the guest `boots`: until its network is up it
        hears nothing, and the kernel asks ever less often. `clock_behind_ms` sets its clock that much before ours.
        DeadlineExceeded, Internal, InvalidInput (of a setting, such as a path that no volume can be mounted on).
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        async with httpcore.AsyncConnectionPool(network_backend=_NamespaceBackend(namespace), retries=0) as pool:
            while True:
                left = end - loop.time()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"the guest did not answer within {deadline_s:g} s", "see `aenv logs`; the host may be overloaded"
                    )
                try:
                    reply = await pool.request(
                        "POST",
                        f"{self._url}/init",
                        headers={"Content-Type": "application/json"},
                        content=self._body(identity, clock_behind_ms),
                        extensions={"timeout": all_within(left) | ({"connect": min(left, _BOOT_CONNECT_S)} if boots else {})},
                    )
                except httpcore.TimeoutException:
                    continue
                except (httpcore.NetworkError, httpcore.ProtocolError):
                    await asyncio.sleep(_RETRY_S)
                    continue
                if reply.status == 400:
                    raise InvalidInput(message_of(reply.content))
                if reply.status != 204:
                    raise Internal(f"the guest's envd answered /init with {reply.status}: {reply.content[:200]!r}")
                return next((v.decode() for k, v in reply.headers if k.lower() == b"x-envd-version"), "")

    async def answers(self, namespace: str, deadline_s: float) -> bool:
        """Whether the guest's agent answers in that time. A guest that is merely slow has all of it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        async with httpcore.AsyncConnectionPool(network_backend=_NamespaceBackend(namespace), retries=0) as pool:
            while (left := end - loop.time()) > 0:
                try:
                    reply = await pool.request("GET", f"{self._url}/health", extensions={"timeout": all_within(left)})
                except httpcore.TimeoutException:
                    return False
                except (httpcore.NetworkError, httpcore.ProtocolError):
                    await asyncio.sleep(_RETRY_S)
                    continue
                return 200 <= reply.status < 300
        return False

    async def freeze(self, namespace: str, deadline_s: float) -> None:
        """Have the guest write its files out and change its root file system no more. It thaws by itself after half a minute.

        Unavailable when it does not come to it in time; then the guest may still be about to freeze: `thaw` it.
        """
        await self._hold_still(namespace, "/fsfreeze", deadline_s)

    async def thaw(self, namespace: str, deadline_s: float) -> None:
        """Undo `freeze`; no error when nothing is frozen."""
        await self._hold_still(namespace, "/fsthaw", deadline_s)

    async def _hold_still(self, namespace: str, path: str, deadline_s: float) -> None:
        try:
            async with httpcore.AsyncConnectionPool(network_backend=_NamespaceBackend(namespace), retries=0) as pool:
                reply = await pool.request("POST", f"{self._url}{path}", extensions={"timeout": all_within(deadline_s)})
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise Unavailable(
                f"the guest did not answer {path} within {deadline_s:g} s ({type(error).__name__})", "its disk may be busy; try again"
            ) from error
        if reply.status != 204:
            raise Unavailable(f"the guest's agent answered {path} with {reply.status}: {reply.content[:200]!r}")

    async def run(self, namespace: str, command: str, deadline_s: float, access_token: str = "") -> tuple[int, str]:
        """Run a shell command as root in a guest and return its exit code and output (stdout and stderr, at most 1 MiB).

        A guest without a token, as in template builds, takes the call without one.
        DeadlineExceeded, Internal (envd refused it, or the guest was lost).
        """
        output = bytearray()

        def keep(_stream: Stream, data: bytes) -> None:
            output.extend(data[: _MAX_OUTPUT_BYTES - len(output)])

        try:
            ended = await self.execute(namespace, Command(("/bin/sh", "-c", command), access_token=access_token), keep, deadline_s)
        except CommandRefused as error:
            raise Internal(f"envd refused the command: {error.message}") from error
        return ended.exit_code, output.decode(errors="replace")

    async def execute(
        self, namespace: str, command: Command, on_output: OnOutput, deadline_s: float, on_start: OnStart = lambda: None
    ) -> Ended:
        """Run a command in a guest, handing its output on as it comes.

        From `on_start` on the command runs, and goes on when this call is cancelled.
        CommandRefused, DeadlineExceeded (the command goes on), Internal (the guest was lost).
        """
        name = " ".join(command.argv)[-_NAMED_CHARS:]
        try:
            async with (
                asyncio.timeout(deadline_s),
                httpcore.AsyncConnectionPool(network_backend=_NamespaceBackend(namespace)) as pool,
                pool.stream("POST", f"{self._url}/process.Process/Start", headers=command.headers(), content=command.body()) as reply,
            ):
                return await follow(reply.aiter_stream(), on_output, reply.status, on_start)
        except TimeoutError as error:
            raise DeadlineExceeded(f"`{name}` did not end in the guest within {deadline_s:g} s") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise Internal(f"the guest was lost while it ran `{name}`: {error}") from error

    async def _post(self, namespace: str, target: str, content: bytes | Path, deadline_s: float) -> tuple[int, bytes]:
        """One POST; a path stands for what that file holds. DeadlineExceeded, Internal (the guest was lost)."""
        name = target.partition("?")[0]
        size_bytes = len(content) if isinstance(content, bytes) else (await asyncio.to_thread(content.stat)).st_size
        kind = "application/json" if isinstance(content, bytes) else "application/octet-stream"
        headers: dict[bytes | str, bytes | str] = {"Content-Type": kind, "Content-Length": str(size_bytes)}
        body = content if isinstance(content, bytes) else _file_chunks(content)
        try:
            async with (
                asyncio.timeout(deadline_s),
                httpcore.AsyncConnectionPool(network_backend=_NamespaceBackend(namespace)) as pool,
            ):
                reply = await pool.request("POST", f"{self._url}{target}", headers=headers, content=body)
                return reply.status, reply.content
        except TimeoutError as error:
            raise DeadlineExceeded(f"the guest's agent did not end {name} within {deadline_s:g} s") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise Internal(f"the guest was lost during {name}: {error}") from error

    async def pack(
        self,
        namespace: str,
        sources: tuple[str, ...],
        output: Path,
        most_bytes: int,
        deadline_s: float,
        *,
        root: str = "/",
        parents: bool = False,
    ) -> None:
        """Write into `output` a tar of what a guest's disk has of some sources: paths below `root`, the last parts perhaps patterns.

        With `parents` the folders above each are in it. The file is the caller's, also after a failure.
        InvalidInput (more than `most_bytes`), DeadlineExceeded, Internal.
        """
        body = json.dumps({"sources": sources, "root": root, "parents": parents}).encode()
        headers: dict[bytes | str, bytes | str] = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        try:
            async with (
                asyncio.timeout(deadline_s),
                httpcore.AsyncConnectionPool(network_backend=_NamespaceBackend(namespace)) as pool,
                pool.stream("POST", f"{self._url}/provision/pack", headers=headers, content=body) as reply,
            ):
                if reply.status != 200:
                    check(reply.status, await reply.aread())
                with output.open("wb") as file:
                    size_bytes = 0
                    async for chunk in reply.aiter_stream():
                        size_bytes += len(chunk)
                        if size_bytes > most_bytes:
                            raise InvalidInput(f"the files have more than {most_bytes >> 20} MiB, which the disk cannot hold")
                        await asyncio.to_thread(file.write, chunk)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the files could not be read from the guest within {deadline_s:g} s") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise Internal(f"the guest was lost while its files were read: {error}") from error
        except OSError as error:
            raise StorageFull(f"no room for the files of a stage: {error.strerror}", "free some space on the node") from error

    def metrics_reader(self, namespace: str, access_token: str) -> MetricsReader:
        """For the metrics of the guest in `namespace`, as long as it lives there. Nothing is dialled yet; the caller closes it."""

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await _dial(namespace, self._address, HEAD_MAX_BYTES)

        return MetricsReader(connect, access_token, self._clock)

    def _body(self, identity: GuestIdentity, clock_behind_ms: int) -> bytes:
        standard = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": identity.sandbox_id, "E2B_TEMPLATE_ID": identity.template_id}
        return json.dumps(
            {
                "envVars": standard | identity.env_vars,
                "accessToken": identity.access_token,  # an empty one opens the agent, whatever the snapshot held
                "timestamp": rfc3339(self._clock.now_ms() - clock_behind_ms),
                "defaultUser": identity.default_user,
                "defaultWorkdir": identity.default_workdir,
                "hostname": identity.sandbox_id,
                "entropySeed": base64.b64encode(new_entropy()).decode(),
                "machineId": machine_id(identity.sandbox_id),
                "dnsServers": list(identity.dns_servers),
                "volumeMounts": [{"nfs_target": target, "path": path} for target, path in identity.volume_mounts],
            }
        ).encode()


async def _file_chunks(source: Path) -> AsyncIterator[bytes]:
    with source.open("rb", buffering=0) as file:
        while chunk := await asyncio.to_thread(file.read, _UPLOAD_CHUNK_BYTES):
            yield chunk
