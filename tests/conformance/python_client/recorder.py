"""Which public methods of the SDK ran: all of them by introspection, the called ones by the interpreter's profile hook.

Nothing of the SDK is replaced. A method counts as called when its own code ran, for a call that has a static variant either one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading

CLASSES = {
    "Sandbox": ("main", "Sandbox", "AsyncSandbox"),
    "Filesystem": ("filesystem.filesystem", "Filesystem", "Filesystem"),
    "Commands": ("commands.command", "Commands", "Commands"),
    "Pty": ("commands.pty", "Pty", "Pty"),
    "Git": ("git", "Git", "Git"),
    "CommandHandle": ("commands.command_handle", "CommandHandle", "AsyncCommandHandle"),
    "WatchHandle": ("filesystem.watch_handle", "WatchHandle", "AsyncWatchHandle"),
}


class Recorder:
    """Starts at once; `stop` gives the lists."""

    def __init__(self, sdk):
        self._names = {}
        self._called = set()
        package = "e2b.sandbox_async" if sdk.asynchronous else "e2b.sandbox_sync"
        for title, (module, sync_name, async_name) in CLASSES.items():
            owner = getattr(importlib.import_module(f"{package}.{module}"), async_name if sdk.asynchronous else sync_name)
            for name in dir(owner):
                if not name.startswith("_"):
                    for code in _codes(owner, inspect.getattr_static(owner, name)):
                        self._names.setdefault(code, set()).add(f"{title}.{name}")
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)

    def _seen(self, frame, event, _argument):
        if event == "call" and frame.f_code in self._names:
            self._called |= self._names[frame.f_code]

    def stop(self):
        """All public methods and those that ran, sorted."""
        sys.setprofile(None)
        threading.setprofile(None)
        everything = set().union(*self._names.values())
        return {"public": sorted(everything), "called": sorted(self._called)}


def _codes(owner, member):
    """The code objects behind a class member; none for plain data."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    found = []
    if hasattr(member, "class_method_name"):  # the SDK's own descriptor: an instance method with a static variant
        found += _codes(owner, inspect.getattr_static(owner, member.class_method_name))
        member = member.method
    while member is not None and hasattr(member, "__wrapped__"):
        member = member.__wrapped__
    if hasattr(member, "__code__"):
        found.append(member.__code__)
    return found
