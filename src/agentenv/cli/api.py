"""The HTTP API as the commands use it (contract section 2): one call per route, every failure a `CliError`.

Invariants: every request has a deadline; nothing is sent twice; a reply that is not the API's is said to be so, and not
guessed at; tokens never leave this module but for the data plane.
"""

from __future__ import annotations

import contextlib
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from agentenv.cli.exits import CliError, Exit
from agentenv.cli.target import Target, find_target

if TYPE_CHECKING:
    import httpx

READ_DEADLINE_S = 30.0
WORK_DEADLINE_S = 7200.0
"""Longest silence of a pull or an import: a large layer may have to wait for others, and be converted."""
CHANGE_DEADLINE_S = 180.0
"""Longest pause, resume, create or fork: a restore may take 30 s and wait for its turn behind others."""
COLLECT_DEADLINE_S = 600.0
"""Longest removal of unneeded files: a disk at its limits removes some GiB in a second."""
PAGE_SIZE = 100
MAX_PAGES = 1000
"""Ends a list whose server never stops giving a next page."""
CONTENT_CHUNK_BYTES = 1 << 18
_FULL_ID = re.compile(r"i[a-z0-9]{20}")
_SECRETS = ("envdAccessToken", "trafficAccessToken")
_CODES = {400: Exit.USAGE, 404: Exit.NOT_FOUND, 422: Exit.USAGE}


class Api:
    """A connection to one node. Use it as a context manager."""

    def __init__(self, target: Target | None = None) -> None:
        import httpx

        self.target = target or find_target()
        self._http = httpx.Client(
            base_url=self.target.api_url, headers={"X-API-KEY": self.target.api_key}, **_transport(self.target.api_url)
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def sandboxes(
        self,
        states: str = "running,paused",
        metadata: dict[str, str] | None = None,
        template: str | None = None,
        started_after: str | None = None,
        order: str = "desc",
    ) -> Iterator[dict[str, Any]]:
        """Sandboxes by time of start, newest first unless `order` is "asc"; fetched page by page."""
        query = {"state": states, "limit": str(PAGE_SIZE), "order": order}
        if metadata:
            query["metadata"] = encode_metadata(metadata)
        query |= {name: value for name, value in (("template", template), ("startedAfter", started_after)) if value}
        yield from self._pages("/v2/sandboxes", query)

    def sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """One sandbox, with its tokens."""
        return dict(self._call("GET", f"/sandboxes/{_segment(sandbox_id)}")[0])

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Start a sandbox."""
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return dict(self._call("POST", "/v2/sandboxes", body, headers=headers, deadline_s=CHANGE_DEADLINE_S)[0])

    def pause(self, sandbox_id: str, *, memory: bool = True, durable: bool = False) -> None:
        """Pause, with its memory or with the disk alone; Conflict is the caller's to judge by the exit code."""
        body = {"memory": memory, "durable": durable}
        self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/pause", body, deadline_s=CHANGE_DEADLINE_S)

    def connect(self, sandbox_id: str, timeout_s: int | None, *, memory: bool = True) -> dict[str, Any]:
        """Make it run, for at least `timeout_s` from now; without `memory` a paused one boots from its disk. Never shortens its life."""
        body: dict[str, Any] = {"memory": memory} | ({} if timeout_s is None else {"timeout": timeout_s})
        return dict(self._call("POST", f"/v2/sandboxes/{_segment(sandbox_id)}/connect", body, deadline_s=CHANGE_DEADLINE_S)[0])

    def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Let it end that many seconds from now, sooner or later than before; 0 ends it now."""
        self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/timeout", {"timeout": timeout_s}, deadline_s=CHANGE_DEADLINE_S)

    def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Let it live at least `duration_s` from now."""
        self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/refreshes", {"duration": duration_s})

    def fork(self, sandbox_id: str, count: int, timeout_s: int) -> list[dict[str, Any]]:
        """Copies of a sandbox; each entry holds `sandbox` or `error`."""
        body = {"count": count, "timeout": timeout_s}
        return list(self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/fork", body, deadline_s=CHANGE_DEADLINE_S)[0])

    def kill(self, sandbox_id: str) -> None:
        """End it."""
        self._call("DELETE", f"/sandboxes/{_segment(sandbox_id)}", deadline_s=CHANGE_DEADLINE_S)

    def logs(self, sandbox_id: str, start_ms: int, limit: int) -> list[dict[str, Any]]:
        """Its log from `start_ms` on, oldest first."""
        query = {"start": str(start_ms), "limit": str(limit)}
        return list(self._call("GET", f"/sandboxes/{_segment(sandbox_id)}/logs", query=query)[0]["logEntries"])

    def metrics(self, sandbox_id: str, start_s: int | None = None) -> list[dict[str, Any]]:
        """What it used, from unix second `start_s` on, oldest first."""
        query = None if start_s is None else {"start": str(start_s)}
        return list(self._call("GET", f"/sandboxes/{_segment(sandbox_id)}/metrics", query=query)[0])

    def delete_template(self, name: str) -> None:
        """Forget a template or snapshot, by name or id."""
        self._call("DELETE", f"/templates/{_segment(name)}", deadline_s=CHANGE_DEADLINE_S)

    def publish_template(self, name: str, public: bool) -> None:
        """Mark a template as public or private."""
        self._call("PATCH", f"/v2/templates/{_segment(name)}", {"public": public})

    def create_snapshot(self, sandbox_id: str, name: str | None, *, durable: bool = False) -> dict[str, Any]:
        """Keep a sandbox as it is now."""
        body = {"durable": durable} | ({} if name is None else {"name": name})
        return dict(self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/snapshots", body, deadline_s=CHANGE_DEADLINE_S)[0])

    def create_checkpoint(self, sandbox_id: str, name: str | None, *, memory: bool, durable: bool = False) -> dict[str, Any]:
        """Keep a sandbox as it is now, for itself to go back to."""
        body: dict[str, Any] = {"memory": memory, "durable": durable} | ({} if name is None else {"name": name})
        return dict(self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/checkpoints", body, deadline_s=CHANGE_DEADLINE_S)[0])

    def checkpoints(self, sandbox_id: str) -> list[dict[str, Any]]:
        """The checkpoints of a sandbox, oldest first."""
        return list(self._call("GET", f"/sandboxes/{_segment(sandbox_id)}/checkpoints")[0])

    def delete_checkpoint(self, sandbox_id: str, checkpoint: str) -> None:
        """Forget one, by id or name."""
        self._call("DELETE", f"/sandboxes/{_segment(sandbox_id)}/checkpoints/{_segment(checkpoint)}")

    def rollback(self, sandbox_id: str, checkpoint: str | None) -> None:
        """Go back to a checkpoint; None is the newest that its state descends from."""
        body = {} if checkpoint is None else {"checkpointID": checkpoint}
        self._call("POST", f"/sandboxes/{_segment(sandbox_id)}/rollback", body, deadline_s=CHANGE_DEADLINE_S)

    def snapshots(self, sandbox_id: str | None = None, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Snapshots, fetched page by page."""
        query = {"limit": str(PAGE_SIZE)} | {key: value for key, value in (("sandboxID", sandbox_id), ("name", name)) if value}
        yield from self._pages("/snapshots", query)

    def collect(self, everything: bool, dry_run: bool) -> dict[str, Any]:
        """Free space on the node's disk."""
        body = {"everything": everything, "dryRun": dry_run}
        return dict(self._call("POST", "/storage/collect", body, deadline_s=COLLECT_DEADLINE_S)[0])

    def check_key(self) -> None:
        """CliError unless the node takes our key."""
        self._call("GET", "/v2/sandboxes", query={"limit": "1"})

    def templates(self) -> list[dict[str, Any]]:
        """All templates."""
        return list(self._call("GET", "/templates")[0])

    def images(self) -> list[dict[str, Any]]:
        """All images, the one used last first."""
        return list(self._call("GET", "/images")[0])

    def image(self, reference: str) -> dict[str, Any]:
        """One image by name or digest."""
        return dict(self._call("GET", f"/images/{_segment(reference)}")[0])

    def remove_image(self, reference: str) -> None:
        """Forget an image, or one of its names."""
        self._call("DELETE", f"/images/{_segment(reference)}", deadline_s=CHANGE_DEADLINE_S)

    def pull_image(self, name: str, registry: dict[str, str] | None, report: Callable[..., object]) -> dict[str, Any]:
        """Bring an image from its registry; `report(step, done, total)` tells how far it is."""
        body: dict[str, Any] = {"name": name} | ({"registry": registry} if registry else {})
        return self._followed("/images/pull", report, json=body)

    def import_image(self, name: str, content: Iterator[bytes], report: Callable[..., object]) -> dict[str, Any]:
        """Bring an image as an archive."""
        return self._followed("/images/import", report, params={"name": name}, content=content)

    def push_image(self, template: str, name: str, registry: dict[str, str] | None, report: Callable[..., object]) -> dict[str, Any]:
        """Publish a template's root file system as an image."""
        body: dict[str, Any] = {"name": name} | ({"registry": registry} if registry else {})
        return self._followed(f"/templates/{_segment(template)}/push", report, json=body)

    def layers(self) -> list[dict[str, Any]]:
        """All layers of the node's disk."""
        return list(self._call("GET", "/layers")[0])

    def verify_layer(self, layer_id: str) -> dict[str, Any]:
        """Compare a layer with its checksum."""
        return dict(self._call("POST", f"/layers/{_segment(layer_id)}/verify", deadline_s=WORK_DEADLINE_S)[0])

    def _followed(self, path: str, report: Callable[..., object], **request: Any) -> dict[str, Any]:
        """A POST that is answered by lines of JSON: steps, and in the end the image or an error."""
        import json

        import httpx

        try:
            with self._http.stream("POST", path, timeout=httpx.Timeout(WORK_DEADLINE_S, connect=10), **request) as reply:
                if reply.status_code >= 300:
                    raise self._refusal(reply.status_code, reply.read())
                for line in map(json.loads, reply.iter_lines()):
                    if "image" in line:
                        return dict(line["image"])
                    if "error" in line:
                        raise self._refusal(line["error"]["code"], json.dumps(line["error"]).encode())
                    report(line["step"], line["done"], line["total"])
        except httpx.HTTPError as error:
            raise CliError(
                f"the node at {self.target.api_url} broke off: {error or type(error).__name__}",
                "it may go on by itself: `aenv images` shows what is there",
                Exit.UNREACHABLE,
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._not_ours(200) from error
        raise CliError("the node's answer has no end", "`aenv images` shows what is there; the node's log is log/server.log in its home")

    def request_build(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for a build; it waits until it is started."""
        return dict(self._call("POST", "/v3/templates", body)[0])

    def build_file(self, template_id: str, files_hash: str) -> dict[str, Any]:
        """Whether an archive is on the node, and where it is sent if not."""
        return dict(self._call("GET", f"/templates/{_segment(template_id)}/files/{_segment(files_hash)}")[0])

    def send_build_file(self, url: str, content: Iterator[bytes], size_bytes: int) -> None:
        """Send an archive to the URL that `build_file` gave. It carries a ticket of its own, and no key."""
        import httpx

        try:
            with httpx.Client(**_transport(url), timeout=httpx.Timeout(CHANGE_DEADLINE_S, connect=10)) as http:
                reply = http.put(url, content=content, headers={"Content-Length": str(size_bytes)})
        except httpx.HTTPError as error:
            raise CliError(f"the upload broke off: {error or type(error).__name__}", "build again", Exit.UNREACHABLE) from error
        if reply.status_code >= 300:
            raise self._refusal(reply.status_code, reply.content)

    def start_build(self, template_id: str, build_id: str, body: dict[str, Any]) -> None:
        """Let it begin."""
        self._call("POST", f"/v2/templates/{_segment(template_id)}/builds/{_segment(build_id)}", body)

    def build_status(self, template_id: str, build_id: str, offset: int) -> dict[str, Any]:
        """How far it is, and what it said after the first `offset` entries."""
        path = f"/templates/{_segment(template_id)}/builds/{_segment(build_id)}/status"
        return dict(self._call("GET", path, query={"logsOffset": str(offset)})[0])

    def builds(self) -> list[dict[str, Any]]:
        """The builds requested last, the newest first."""
        return list(self._call("GET", "/builds")[0])

    def volumes(self) -> list[dict[str, Any]]:
        """All volumes, without tokens."""
        return list(self._call("GET", "/volumes")[0])

    def volume(self, reference: str) -> dict[str, Any]:
        """A volume by name or id, with its token."""
        volume_id = next((item["volumeID"] for item in self.volumes() if reference == item["name"]), reference)
        return dict(self._call("GET", f"/volumes/{_segment(volume_id)}")[0])

    def create_volume(self, name: str) -> dict[str, Any]:
        """A new empty volume."""
        return dict(self._call("POST", "/volumes", {"name": name})[0])

    def delete_volume(self, volume_id: str) -> None:
        """Delete it with all it holds."""
        self._call("DELETE", f"/volumes/{_segment(volume_id)}", deadline_s=CHANGE_DEADLINE_S)

    def read_volume_file(self, volume: dict[str, Any], path: str) -> Iterator[bytes]:
        """The bytes of a file, in parts as they come."""
        with self._content(volume, "GET", {"path": path}) as reply:
            yield from reply.iter_bytes()

    def write_volume_file(self, volume: dict[str, Any], path: str, source: IO[bytes]) -> dict[str, Any]:
        """Write a file with what `source` gives, making its folders; returns what was written."""
        parts = iter(lambda: source.read(CONTENT_CHUNK_BYTES), b"")
        with self._content(volume, "PUT", {"path": path, "force": "true"}, parts) as reply:
            return dict(reply.json())

    def secrets(self) -> Iterator[dict[str, Any]]:
        """All secrets without their values, newest first, page by page."""
        query = {"limit": str(PAGE_SIZE)}
        for _ in range(MAX_PAGES):
            items, headers = self._call("GET", "/secrets", query=query)
            yield from items
            if not headers.get("x-next-token"):
                return
            query["nextToken"] = headers["x-next-token"]

    def create_secret(self, body: dict[str, Any]) -> dict[str, Any]:
        """Store a secret."""
        return dict(self._call("POST", "/secrets", body)[0])

    def update_secret(self, reference: str, body: dict[str, Any]) -> dict[str, Any]:
        """Store another value of a secret, by name or id."""
        return dict(self._call("POST", f"/secrets/{_segment(reference)}", body)[0])

    def delete_secret(self, reference: str) -> None:
        """Forget a secret, by name or id."""
        self._call("DELETE", f"/secrets/{_segment(reference)}")

    @contextlib.contextmanager
    def _content(
        self, volume: dict[str, Any], method: str, query: dict[str, str], content: Iterator[bytes] | None = None
    ) -> Iterator[httpx.Response]:
        """A transfer of a volume's file; the deadline holds between parts, however long the whole takes."""
        import httpx

        path = f"/volumecontent/{_segment(volume['volumeID'])}/file"
        headers = {"Authorization": f"Bearer {volume['token']}"}
        try:
            with self._http.stream(
                method, path, params=query, headers=headers, content=content, timeout=httpx.Timeout(CHANGE_DEADLINE_S, connect=10)
            ) as reply:
                if method == "PUT" or reply.status_code >= 300:
                    reply.read()
                if reply.status_code >= 300:
                    raise self._refusal(reply.status_code, reply.content)
                yield reply
        except httpx.HTTPError as error:
            raise CliError(
                f"the transfer of {query['path']!r} broke off: {error or type(error).__name__}",
                "is the node up? `aenv up --detach` starts it",
                Exit.UNREACHABLE,
            ) from error

    def full_id(self, given: str) -> str:
        """The sandbox that `given` names, in full or by a unique beginning."""
        if _FULL_ID.fullmatch(given):
            return given
        ids = [str(item["sandboxID"]) for item in self.sandboxes()]
        found = [given] if given in ids else [one for one in ids if given and one.startswith(given)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise CliError(f"no sandbox's id begins with {given!r}", "`aenv ls --all` lists them", Exit.NOT_FOUND)
        shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        raise CliError(f"{len(found)} sandboxes begin with {given!r}: {shown}", "give more of the id", Exit.USAGE)

    def _pages(self, path: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        for _ in range(MAX_PAGES):
            items, headers = self._call("GET", path, query=query)
            yield from items
            if not headers.get("x-next-token"):
                return
            query = {**query, "nextToken": headers["x-next-token"]}
        raise CliError(f"the node's list has more than {MAX_PAGES} pages", "narrow it down with the command's filters")

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        deadline_s: float = READ_DEADLINE_S,
    ) -> tuple[Any, dict[str, str]]:
        import httpx

        try:
            reply = self._http.request(
                method, path, json=body, params=query, headers=headers, timeout=httpx.Timeout(deadline_s, connect=10)
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise CliError(f"{self.target.api_url!r} is not a usable URL: {error}", "mend or unset E2B_API_URL", Exit.USAGE) from error
        except httpx.TimeoutException as error:
            raise CliError(
                f"the node at {self.target.api_url} did not answer {method} {path} in time ({type(error).__name__}, {deadline_s:g} s)",
                "`aenv doctor` looks at the node; its log is log/server.log in its home",
                Exit.UNREACHABLE,
            ) from error
        except httpx.TransportError as error:
            raise CliError(
                f"cannot reach the node at {self.target.api_url}: {error or type(error).__name__}",
                "is the node up? `aenv up --detach` starts it",
                Exit.UNREACHABLE,
            ) from error
        if reply.status_code >= 300:
            raise self._refusal(reply.status_code, reply.content)
        try:
            return (reply.json() if reply.content else None), dict(reply.headers)
        except ValueError as error:
            raise self._not_ours(reply.status_code) from error

    def _refusal(self, status: int, content: bytes) -> CliError:
        import json

        try:
            message = str(json.loads(content)["message"])
        except (ValueError, KeyError, TypeError):
            return self._not_ours(status)
        message, _, hint = message.partition("\n")  # the node's own hint, where it has one
        if status == 401:
            message, hint = f"the node refused the API key of {self.target.key_source}: {message}", self._key_hint()
        elif status == 404 and not hint:
            hint = "`aenv ls --all` lists the sandboxes, `aenv templates` the templates, `aenv images` the images"
        return CliError(message, hint, _CODES.get(status, Exit.FAILURE))

    def _key_hint(self) -> str:
        if self.target.key_source.startswith("environment"):
            return 'unset E2B_API_KEY, or run eval "$(aenv env)" to take this node\'s key'
        return "does another node answer there? `aenv doctor` shows whose server runs"

    def _not_ours(self, status: int) -> CliError:
        return CliError(
            f"{self.target.api_url} answered {status} with something that is not the AgentENV API",
            "another program may use that port; see E2B_API_URL, `aenv config` and `aenv doctor`",
            Exit.UNREACHABLE,
        )


def without_secrets(sandbox: dict[str, Any]) -> dict[str, Any]:
    """`sandbox` as it may be printed: no tokens, and of its network settings no credentials."""
    shown = {key: value for key, value in sandbox.items() if key not in _SECRETS}
    if isinstance(network := shown.get("network"), dict):
        shown["network"] = {key: _without_credentials(value) for key, value in network.items()}
    return shown


def _without_credentials(setting: Any) -> Any:
    if isinstance(setting, dict):  # a proxy's password, the values of headers
        return {key: "***" if key in ("password", "headers") else _without_credentials(value) for key, value in setting.items()}
    return [_without_credentials(item) for item in setting] if isinstance(setting, list) else setting


def encode_metadata(metadata: dict[str, str]) -> str:
    """The value of the `metadata` query: pairs encoded twice here, a third time by the query (contract section 2.3)."""
    return urllib.parse.urlencode({urllib.parse.quote(k, safe=""): urllib.parse.quote(v, safe="") for k, v in metadata.items()})


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _transport(url: str) -> dict[str, Any]:
    """For our own loopback: no proxy of the environment (it could not reach it), and no certificates read (67 ms)."""
    if not is_loopback(url) or url.startswith("https:"):
        return {}
    import ssl

    return {"trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}


def _segment(text: str) -> str:
    """`text` as one segment of a path (contract section 2.1)."""
    return urllib.parse.quote(text, safe="")
