"""`make quickstart`: a sandbox's whole life through the official E2B SDK, on this machine, with figures beside the limit.

It uses this machine's node, started for the length of the run unless it is up already, and leaves nothing running behind.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from local_node import node

err = Console(stderr=True)
out = Console()
GREETING = "echo hello from $(uname -sr)"
timings: dict[str, float] = {}


def step(text: str) -> None:
    """Say what happens next."""
    err.print(f"[bold]==>[/bold] {text}", highlight=False)


def timed(name: str, work: Callable[[], Any]) -> Any:
    """Run `work` and keep its duration in ms under `name`."""
    began = time.perf_counter()
    result = work()
    timings[name] = 1000 * (time.perf_counter() - began)
    return result


def expect(what: str, found: object, wanted: object) -> None:
    """Stop with a clear message unless `found` is what was wanted."""
    if found != wanted:
        sys.exit(f"quickstart: {what}: expected {wanted!r}, found {found!r}")
    err.print(f"    [green]ok[/green] {what}", highlight=False)


def the_loop() -> None:
    """Create, run, files, a web server, pause, resume, fork, kill."""
    from e2b import Sandbox

    step("create a sandbox from the template `base` and run a command")
    began = time.perf_counter()
    sandbox = Sandbox.create("base", timeout=600)
    greeting = sandbox.commands.run(GREETING).stdout.strip()
    timings["create -> first output"] = 1000 * (time.perf_counter() - began)
    try:
        err.print(f"    {greeting}", highlight=False)
        commands_and_files(sandbox)
        web_server(sandbox)
        children = pause_resume_fork(sandbox)
        for child in children:
            child.kill()
    finally:
        timed("kill", sandbox.kill)
    expect("the sandbox is gone", sandbox.is_running(), False)


def commands_and_files(sandbox: Any) -> None:
    """Shell, Python, and the file API."""
    step("run Python; write, read and list files")
    expect("python answers", timed("command (python3)", lambda: sandbox.commands.run("python3 -c 'print(6*7)'").stdout), "42\n")
    expect("whoami", timed("command (shell)", lambda: sandbox.commands.run("whoami").stdout), "user\n")
    timed("file write", lambda: sandbox.files.write("/home/user/work/note.txt", "forty-two"))
    expect("the file reads back", timed("file read", lambda: sandbox.files.read("/home/user/work/note.txt")), "forty-two")
    expect("and is listed", [entry.name for entry in sandbox.files.list("/home/user/work")], ["note.txt"])


def web_server(sandbox: Any) -> None:
    """A server in the guest, fetched through the proxy."""
    step("start a web server in the guest and fetch it through the proxy")
    sandbox.commands.run("cd /home/user/work && exec python3 -m http.server 8000", background=True, timeout=0)
    url = os.environ["E2B_SANDBOX_URL"] + "/note.txt"
    request = urllib.request.Request(url, headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"})
    body = b""
    for _ in range(100):
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                body = reply.read()
                break
        except OSError:
            time.sleep(0.1)
    expect("the page comes through", body, b"forty-two")
    timed("web page through the proxy", lambda: urllib.request.urlopen(request, timeout=10).read())


def count(sandbox: Any) -> int:
    """What the counting process has reached."""
    return int(sandbox.files.read("/home/user/count") or 0)


def pause_resume_fork(sandbox: Any) -> list[Any]:
    """Freeze a counting process, bring it back, and branch it in three."""
    step("pause; resume and find the same process still counting")
    script = "i=0; while :; do i=$((i+1)); echo $i > /home/user/.c; mv /home/user/.c /home/user/count; sleep 0.2; done"
    counter = sandbox.commands.run(script, background=True, timeout=0)
    time.sleep(1)
    timed("pause", sandbox.pause)
    expect("a paused sandbox does not answer", sandbox.is_running(), False)
    began = time.perf_counter()
    sandbox.connect(timeout=600)
    before = count(sandbox)
    timings["resume -> first answer"] = 1000 * (time.perf_counter() - began)
    time.sleep(1)
    expect("the count goes on", count(sandbox) > before > 0, True)
    expect("in the same process", counter.pid in [process.pid for process in sandbox.commands.list()], True)
    step("fork into 3 that diverge")
    children = timed("fork of 3", lambda: sandbox.fork(count=3, timeout=600))
    failed = [child for child in children if isinstance(child, Exception)]
    if failed:
        sys.exit(f"quickstart: a fork failed: {failed[0]}")
    for number, child in enumerate(children):
        child.files.write("/home/user/who", str(number))
        child.commands.run(f"echo {number * 1000} > /home/user/branch")
    expect("each has its own file", [child.files.read("/home/user/who") for child in children], ["0", "1", "2"])
    expect("each still counts", all(count(child) >= before for child in children), True)
    expect("the source saw none of it", sandbox.files.exists("/home/user/who"), False)
    return list(children)


def limit_ms() -> float:
    """The limit beside it, median of three."""
    from agentenv.config.load import load
    from limit import for_node, restore_and_run

    bare = for_node(load())
    try:
        return statistics.median(restore_and_run(bare, GREETING) for _ in range(3))
    finally:
        bare.close()


def main() -> None:
    """The whole of it."""
    step("set up the node (the first time: fetches a kernel, QEMU and a Debian base, some minutes)")
    with node() as variables:
        os.environ.update(variables)
        the_loop()
    step("measure the limit: the same restore with the bare VMM")
    limit = limit_ms()
    table = Table(title="timings of this run")
    for column in ("step", "ms", "limit ms", "ratio"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, took in timings.items():
        beside = ("create -> first output",)
        row = (f"{limit:.0f}", f"{took / limit:.2f}") if name in beside else ("", "")
        table.add_row(name, f"{took:.0f}", *row)
    out.print(table)
    err.print("One run only; `make bench` measures medians.", highlight=False)


if __name__ == "__main__":
    main()
