"""What the proxy costs: beside nginx with one worker, on loopback, and beside a call made directly to the guest agent.

Part of `make bench`; alone: `.venv/bin/python tests/bench/proxy.py`. Needs `wrk` and `nginx` for the first part, and says so. Everything
is measured in turn, round by round; medians are compared, so a busy machine slows both sides. `AENV_BENCH_ROUNDS` (default 5).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bounds

from local_node import node

HERE = Path(__file__).parent
ROUNDS = int(os.environ.get("AENV_BENCH_ROUNDS", "5"))
SANDBOX = "iabcdefghij0123456789"
BODY_BYTES = 1 << 30
SMALL_SECONDS = 3
CONNECTIONS = 32
COMMANDS = 20
START_DEADLINE_S = 15.0
BOUNDS = {
    "small keep-alive requests/s, ratio to nginx": (0.25, "at least"),
    "small requests, no two alike, ratio to nginx": (0.25, "at least"),
    "1 GiB download, ratio to nginx": (0.5, "at least"),
    "1 GiB upload, ratio to nginx": (0.5, "at least"),
    "command round trip, ratio to a direct call": (1.3, "at most"),
}
ROWS = {
    "small": ("small requests", 1, "/s"),
    "unlike": ("small requests, no two alike", 1, "/s"),
    "download": ("1 GiB download", 1e6, " MB/s"),
    "upload": ("1 GiB upload", 1e6, " MB/s"),
}
# Another query each time, so that nothing remembered of earlier heads helps.
UNLIKE = 'local n = 0\nrequest = function() n = n + 1; return wrk.format("GET", "/small?" .. n) end\n'
err = Console(stderr=True)

NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/{name}.pid; error_log {folder}/{name}.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; keepalive_requests 100000000; client_max_body_size 0;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  {body}
}}
"""
UPSTREAM = """
  server {{ listen 127.0.0.1:{port} backlog=1024; root {folder}; location = /small {{ default_type text/plain; return 200 "ok"; }} }}
"""
PROXY = """
  upstream server {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 100000000; }}
  upstream sink {{ server 127.0.0.1:{sink}; keepalive 4; }}
  proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host;
  proxy_set_header X-Forwarded-For $remote_addr; proxy_set_header X-Forwarded-Proto http;
  proxy_max_temp_file_size 0; proxy_buffers 16 64k; proxy_busy_buffers_size 128k; proxy_buffer_size 64k; proxy_request_buffering off;
  server {{ listen 127.0.0.1:{port} backlog=1024;
    location / {{ proxy_pass http://server; }} location /sink {{ proxy_pass http://sink; }} }}
"""


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(argv: list[str], port: int) -> Iterator[None]:
    """A program from its first answer on `port` to its end."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{' '.join(argv)} did not start")
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def nginx(folder: Path, name: str, body: str, port: int) -> contextlib.AbstractContextManager[None]:
    """One nginx worker with a configuration of its own."""
    config = folder / f"{name}.conf"
    config.write_text(NGINX.format(folder=folder, name=name, body=body))
    return running(["nginx", "-p", str(folder), "-c", str(config)], port)


class Sink:
    """Takes request bodies as fast as it can and answers each."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        head = b""
        while True:
            data = connection.recv(1 << 16)
            if not data:
                return
            head += data
            if b"\r\n\r\n" not in head:
                continue
            start, _, rest = head.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", start, re.IGNORECASE)
            left = (int(length[1]) if length else 0) - len(rest)
            while left > 0:
                left -= connection.recv_into(buffer)
            head = b""
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def requests_per_second(port: int, upstream: int, script: str = "") -> float:
    """Small requests over kept connections; `script` is one for wrk."""
    argv = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SMALL_SECONDS}s"]
    argv += ["-H", f"E2b-Sandbox-Id: {SANDBOX}", "-H", f"E2b-Sandbox-Port: {upstream}"]
    argv += [*(("-s", script) if script else ()), f"http://127.0.0.1:{port}/small"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60 + SMALL_SECONDS)
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        sys.exit(f"requests failed on port {port}:\n{done.stdout}")
    return float(re.search(r"Requests/sec:\s+([0-9.]+)", done.stdout)[1])  # type: ignore[index]


def _ask(port: int, upstream: int, head: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 60)
    connection.sendall(f"{head}Host: bench.test\r\nE2b-Sandbox-Id: {SANDBOX}\r\nE2b-Sandbox-Port: {upstream}\r\n\r\n".encode())
    return connection


def download(port: int, upstream: int) -> float:
    """Bytes per second of one big response."""
    began, total, buffer = time.perf_counter(), 0, bytearray(1 << 20)
    with _ask(port, upstream, "GET /big HTTP/1.1\r\nConnection: close\r\n") as connection:
        while count := connection.recv_into(buffer):
            total += count
    if total < BODY_BYTES:
        sys.exit(f"a body of {BODY_BYTES} bytes was cut off after {total}")
    return BODY_BYTES / (time.perf_counter() - began)


def upload(port: int, sink: int) -> float:
    """Bytes per second of one big request."""
    block, left = bytes(1 << 20), BODY_BYTES
    began = time.perf_counter()
    with _ask(port, sink, f"POST /sink HTTP/1.1\r\nContent-Length: {BODY_BYTES}\r\n") as connection:
        while left:
            connection.sendall(block)
            left -= len(block)
        if not connection.recv(65536).startswith(b"HTTP/1.1 200"):
            sys.exit("the big upload was refused")
    return BODY_BYTES / (time.perf_counter() - began)


def require_programs() -> None:
    """Exits when there is nothing to compare with."""
    missing = [name for name in ("wrk", "nginx") if shutil.which(name) is None]
    if missing:
        sys.exit(f"bench: missing {' and '.join(missing)}\n  hint: tools/setup.sh bench")


def beside_nginx() -> dict[str, dict[str, float]]:
    """Medians of both proxies, each before the same servers."""
    upstream, theirs, ours, sink = free_port(), free_port(), free_port(), Sink()
    found: dict[str, dict[str, list[float]]] = {name: {"nginx": [], "ours": []} for name in ROWS}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "unlike.lua").write_text(UNLIKE)
        with (folder / "big").open("wb") as big:
            big.truncate(BODY_BYTES)
        stack.enter_context(nginx(folder, "upstream", UPSTREAM.format(port=upstream, folder=folder), upstream))
        stack.enter_context(nginx(folder, "proxy", PROXY.format(port=theirs, upstream=upstream, sink=sink.port), theirs))
        stack.enter_context(running([sys.executable, str(HERE / "proxy_server.py"), str(ours)], ours))
        download(theirs, upstream)  # the file's pages are in memory from now on
        for round_number in range(ROUNDS):
            err.print(f"==> proxy beside nginx, round {round_number + 1} of {ROUNDS}", highlight=False)
            for key, port in (("nginx", theirs), ("ours", ours)):
                found["small"][key].append(requests_per_second(port, upstream))
                found["unlike"][key].append(requests_per_second(port, upstream, str(folder / "unlike.lua")))
                found["download"][key].append(download(port, upstream))
                found["upload"][key].append(upload(port, sink.port))
    return {name: {key: statistics.median(samples) for key, samples in sides.items()} for name, sides in found.items()}


#: The whole process enters the namespace, before the SDK starts threads of its own; the node's API is out of reach there, so the
#: sandbox is made from what the API has said before.
ROUND_TRIPS = """
import json, os, statistics, sys, time
from agentenv.host import netns
url, namespace, known = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with netns.entered(namespace) if namespace else open(os.devnull):
    from e2b import ConnectionConfig, Sandbox
    from packaging.version import Version
    known["envd_version"] = Version(known["envd_version"])
    headers = {"E2b-Sandbox-Id": known["sandbox_id"], "E2b-Sandbox-Port": "49983", "X-Access-Token": known["envd_access_token"]}
    config = ConnectionConfig(extra_sandbox_headers=headers, sandbox_url=url)
    sandbox = Sandbox(traffic_access_token=None, connection_config=config, **known)
    for line in sys.stdin:
        samples = []
        for _ in range(int(line)):
            began = time.perf_counter()
            sandbox.commands.run("true")
            samples.append(1000 * (time.perf_counter() - began))
        print(statistics.median(samples), flush=True)
"""


def beside_a_direct_call() -> dict[str, float]:
    """Median round trips of `true`, in ms: the SDK through the proxy, and the SDK inside the sandbox's network namespace."""
    from e2b import Sandbox

    from agentenv.network.layout import GUEST_IP

    sandbox = Sandbox.create("base", timeout=600)
    try:
        with contextlib.ExitStack() as stack:
            sides: dict[str, Callable[[], float]] = {}
            known = json.dumps(connect(sandbox.sandbox_id))
            there = (f"http://{GUEST_IP}:49983", namespace_of(sandbox.sandbox_id))
            for side, place in (("direct", there), ("proxy", (os.environ["E2B_SANDBOX_URL"], ""))):
                argv = [sys.executable, "-c", ROUND_TRIPS, *place, known]
                process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                stack.callback(process.kill)
                sides[side] = lambda process=process: _round(process, COMMANDS)  # type: ignore[misc]
                _round(process, 3)  # connections are made
            found: dict[str, list[float]] = {side: [] for side in sides}
            for round_number in range(ROUNDS):
                err.print(f"==> command round trips, round {round_number + 1} of {ROUNDS}", highlight=False)
                for side, measure in sides.items():
                    found[side].append(measure())
    finally:
        sandbox.kill()
    return {side: statistics.median(samples) for side, samples in found.items()}


def _round(process: subprocess.Popen[str], count: int) -> float:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("no pipes")
    print(count, file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        sys.exit("the client of the command round trips has died")
    return float(line)


def connect(sandbox_id: str) -> dict[str, str]:
    """What the SDK needs to reach a sandbox."""
    url = f"{os.environ['E2B_API_URL']}/v2/sandboxes/{sandbox_id}/connect"
    headers = {"X-API-KEY": os.environ["E2B_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, b'{"timeout": 600}', headers), timeout=60) as reply:
        said = json.load(reply)
    return {
        "sandbox_id": sandbox_id,
        "sandbox_domain": said["domain"],
        "envd_version": said["envdVersion"],
        "envd_access_token": said["envdAccessToken"],
    }


def namespace_of(sandbox_id: str) -> str:
    """The network namespace of a running sandbox of this machine's node."""
    from agentenv.config.load import load
    from agentenv.network.layout import Layout
    from agentenv.wiring import paths_of

    config = load()
    paths = paths_of(config)
    with sqlite3.connect(f"file:{paths.database}?mode=ro", uri=True) as database:
        row = database.execute("SELECT body FROM sandboxes WHERE sandbox_id = ?", (sandbox_id,)).fetchone()
    slot = json.loads(row[0])["vm"]["slot"]
    return Layout(config.network.pool_cidr, paths.tag).slot(slot).namespace


def measure() -> dict[str, Any]:
    """Both parts; the node must be up and named by the environment (`tools/local_node.py`)."""
    return {"beside_nginx": beside_nginx(), "round_trip_ms": beside_a_direct_call()}


def report(result: dict[str, Any]) -> bool:
    """Print the tables; true when every bound holds."""
    out, sides, trips = Console(), result["beside_nginx"], result["round_trip_ms"]
    table = Table(title=f"proxy, medians of {ROUNDS} rounds in turn")
    for column in ("what", "nginx, one worker", "the proxy", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for key, (name, unit, suffix) in ROWS.items():
        theirs, ours = sides[key]["nginx"] / unit, sides[key]["ours"] / unit
        table.add_row(name, f"{theirs:.0f}{suffix}", f"{ours:.0f}{suffix}", f"{ours / theirs:.2f}")
    out.print(table)
    found = [sides[key]["ours"] / sides[key]["nginx"] for key in ROWS] + [trips["proxy"] / trips["direct"]]
    title = f"bounds of the proxy (`true` through the SDK: {trips['proxy']:.1f} ms, directly to envd {trips['direct']:.1f} ms)"
    result["bounds"], good = bounds.report(out, title, BOUNDS, found)
    return good


def main() -> None:
    """Measure and report. Exits 1 when a bound is broken."""
    require_programs()
    with node() as variables:
        os.environ.update(variables)
        result = measure()
    sys.exit(0 if report(result) else 1)


if __name__ == "__main__":
    main()
