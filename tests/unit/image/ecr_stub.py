"""A stand-in for Amazon's ECR: gives out the login it is told to, and keeps what it was asked."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from http_stub import served


@dataclass
class Ecr:
    """What it answers, and the headers of each call."""

    answer: object = field(default_factory=dict)
    status: int = 200
    asked: list[dict[str, str]] = field(default_factory=list)

    def give(self, login: str, *, public: bool = False) -> None:
        """Answer with `user:password`, as the private or the public service has it."""
        data = {"authorizationToken": base64.b64encode(login.encode()).decode(), "expiresAt": 1_900_000_000}
        self.status, self.answer = 200, {"authorizationData": data if public else [data]}

    def refuse(self, status: int, code: str) -> None:
        """Answer with one of AWS' errors."""
        self.status, self.answer = status, {"__type": code, "message": "told by the stand-in"}


@contextlib.contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[Ecr]:
    """Both services at an address of loopback, which calls to AWS go to meanwhile."""
    ecr = Ecr()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            ecr.asked.append({name.lower(): value for name, value in self.headers.items()})
            body = json.dumps(ecr.answer).encode()
            self.send_response(ecr.status)
            self.send_header("content-type", "application/x-amz-json-1.1")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as host:
        for name in ("AWS_ENDPOINT_URL_ECR", "AWS_ENDPOINT_URL_ECR_PUBLIC"):
            patch.setenv(name, f"http://{host}")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield ecr
