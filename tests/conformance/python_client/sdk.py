"""The installed release of the `e2b` package, sync or async, behind one set of awaitable calls.

Runs inside the client's own environment: standard library and `e2b` only. What a release does not have raises `Absent`.
Where generations name or shape a call differently, the difference is told here and nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import socket
from contextlib import asynccontextmanager
from importlib.metadata import version

import e2b

VERSION = tuple(int(part) for part in version("e2b").split(".")[:2])
PATIENCE_S = 60  # for what must come, on a machine that may be busy


class Absent(Exception):
    """This release has no such call."""


async def value(result):
    """`result`, awaited where the client is the async one."""
    return await result if inspect.isawaitable(result) else result


async def eventually(probe, what):
    """The first true value of `probe`; it fails when none comes."""
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while not (found := await value(probe())):
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.2)
    return found


async def raises(kinds, call):
    """The exception of one of `kinds` that `call` ends with."""
    try:
        result = await value(call())
    except kinds as error:
        return error
    raise AssertionError(f"expected {kinds}, got {result!r}")


def need(owner, name):
    """`owner.name`, or Absent."""
    if not hasattr(owner, name):
        raise Absent(f"no {name}")
    return getattr(owner, name)


def takes(call, name):
    """Whether `call` has the keyword `name`; a scenario's later parts ask, so that its first part counts for old releases, too."""
    return name in inspect.signature(call).parameters


def need_option(call, name):
    """Absent unless `call` takes the keyword `name`."""
    if not takes(call, name):
        raise Absent(f"no option {name}")


def resolve_locally(suffix):
    """Let every host name that ends with `suffix` be this machine, as a name server of the domain would."""
    ask = socket.getaddrinfo

    def answer(host, *more, **options):
        name = host.decode() if isinstance(host, bytes) else host
        return ask("127.0.0.1" if name and name.endswith(suffix) else host, *more, **options)

    socket.getaddrinfo = answer


class Sdk:
    """One client: sync or async."""

    def __init__(self, asynchronous, interpreter=False):
        self.asynchronous = asynchronous
        client = importlib.import_module("e2b_code_interpreter") if interpreter else e2b
        self.Sandbox = client.AsyncSandbox if asynchronous else client.Sandbox
        self.Template = getattr(e2b, "AsyncTemplate" if asynchronous else "Template", None)
        self.Volume = getattr(e2b, "AsyncVolume" if asynchronous else "Volume", None)
        self.Secret = getattr(e2b, "AsyncSecret" if asynchronous else "Secret", None)

    async def create(self, template="base", **options):
        """A new sandbox; the caller kills it."""
        options.setdefault("timeout", 300)
        if hasattr(self.Sandbox, "create"):
            accepted = inspect.signature(self.Sandbox.create).parameters
            if "opts" not in accepted and (unknown := set(options) - set(accepted)):
                raise Absent(f"no option {min(unknown)}")
            return await value(self.Sandbox.create(template, **options))
        if unknown := set(options) - set(inspect.signature(self.Sandbox).parameters):
            raise Absent(f"no option {min(unknown)}")
        return self.Sandbox(template, **options)

    @asynccontextmanager
    async def sandbox(self, template="base", **options):
        """A new sandbox, killed in the end."""
        made = await self.create(template, **options)
        try:
            yield made
        finally:
            await value(made.kill())

    async def connect(self, sandbox_id, **options):
        """A second client of the sandbox."""
        if options:
            need_option(self.Sandbox.connect, "timeout")
        return await value(self.Sandbox.connect(sandbox_id, **options))

    async def run(self, sandbox, command, **options):
        """Run a command to its end."""
        return await value(sandbox.commands.run(command, **options))

    async def pause(self, sandbox, **options):
        """Pause by the name the release has for it."""
        call = sandbox.pause if hasattr(sandbox, "pause") else need(sandbox, "beta_pause")
        for name in options:
            need_option(call, name)
        return await value(call(**options))

    async def pages(self, *given, call=None, **options):
        """All pages of a list, as a list of lists; one page where the release has no pages."""
        first = (call or self.Sandbox.list)(*given, **options)
        first = await value(first)
        if isinstance(first, list):
            return [first]
        found = []
        while first.has_next:
            found.append(await value(first.next_items()))
            assert len(found) < 100, "the pages do not end"
        return found

    async def follow(self, handle, on_stdout=None, on_stderr=None):
        """Wait for a command; its output so far goes to the callbacks where the client is the sync one."""
        if self.asynchronous:
            return await handle.wait()
        return handle.wait(on_stdout=on_stdout, on_stderr=on_stderr)

    async def terminal(self, sandbox, on_data, pid=None, **options):
        """A terminal, or a second view of the one with `pid`."""
        if pid is not None:
            call = need(sandbox.pty, "connect")
            return await value(call(pid, on_data=on_data, **options) if self.asynchronous else call(pid, **options))
        size = e2b.PtySize(24, 80)
        call = sandbox.pty.create
        return await value(call(size, on_data=on_data, **options) if self.asynchronous else call(size, **options))

    async def terminal_end(self, handle, on_data):
        """Everything a terminal shows until it ends."""
        return await handle.wait() if self.asynchronous else handle.wait(on_pty=on_data)

    async def watch(self, sandbox, path, on_event, **options):
        """Follow changes of a folder."""
        for name in options:
            need_option(sandbox.files.watch_dir, name)
        if self.asynchronous:
            return await sandbox.files.watch_dir(path, on_event=on_event, **options)
        return sandbox.files.watch_dir(path, **options)


def api_url():
    """Where plain requests of a scenario go; Absent for a release that knows a domain only."""
    url = os.environ.get("E2B_SANDBOX_URL")
    if not url:
        raise Absent("tried in single-host mode")
    return url
