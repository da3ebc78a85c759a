"""A registry that limits its callers and whose tokens soon end, as public ones do. It serves one image of an OCI layout."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from http_stub import served
from image_rig import digest_of


@dataclass
class LimitingRegistry:
    """`refuse` requests, from number `refuse_from` on, are answered 429; `token_uses` bounds what one token is good for."""

    layout: Path
    host: str = ""
    refuse: int = 0
    refuse_from: int = 0
    retry_after_s: int = 1
    token_uses: int | None = None
    seen: list[tuple[float, str, int]] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def blobs_served(self) -> int:
        return sum(status == 200 and "/blobs/" in path for _, path, status in self.seen)

    def manifest(self) -> bytes:
        entry = json.loads((self.layout / "index.json").read_text())["manifests"][0]
        return (self.layout / "blobs" / "sha256" / entry["digest"].partition(":")[2]).read_bytes()


@contextlib.contextmanager
def limiting_registry(layout: Path, **settings: object) -> Iterator[LimitingRegistry]:
    registry = LimitingRegistry(layout, **settings)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            with registry.lock:
                status, headers, body = self._answer(self.path)
                registry.seen.append((time.monotonic(), self.path, status))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
            if path.startswith("/token"):
                token = f"t{len(registry.tokens)}"
                registry.tokens[token] = registry.token_uses or 1 << 30
                return 200, {}, json.dumps({"token": token, "expires_in": 60}).encode()
            if registry.token_uses is not None and not self._has_token():
                challenge = f'Bearer realm="http://{registry.host}/token",service="tests",scope="repository:team/tool:pull"'
                return 401, {"WWW-Authenticate": challenge}, b'{"errors":[{"code":"UNAUTHORIZED","message":"token expired"}]}'
            if path == "/v2/":
                return 200, {}, b"{}"
            number = sum("/v2/" in seen and seen != "/v2/" for _, seen, _ in registry.seen)
            if registry.refuse_from <= number < registry.refuse_from + registry.refuse:
                return 429, {"Retry-After": str(registry.retry_after_s)}, b'{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}'
            if "/manifests/" in path:
                raw = registry.manifest()
                return 200, {"Content-Type": json.loads(raw)["mediaType"], "Docker-Content-Digest": digest_of(raw)}, raw
            return 200, {}, (registry.layout / "blobs" / "sha256" / path.rpartition(":")[2]).read_bytes()

        def _has_token(self) -> bool:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            left = registry.tokens.get(token, 0)
            registry.tokens[token] = left - 1
            return left > 0

    with served(Handler) as host:
        registry.host = host
        yield registry
