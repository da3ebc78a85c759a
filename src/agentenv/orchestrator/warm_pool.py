"""The warm VMs of one server process: plain bookkeeping, no I/O. `warm` makes them, creates take them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentenv.core.clock import Clock
from agentenv.core.model import Machine, RunningVm
from agentenv.vmm.driver import Vm


@dataclass(frozen=True, slots=True)
class WarmVm:
    """A VM that stands ready to become the sandbox `sandbox_id`, which is not there yet."""

    sandbox_id: str
    snapshot_id: str
    machine: Machine
    record: RunningVm
    vm: Vm


@dataclass(frozen=True, slots=True)
class Demand:
    """Creates from one snapshot: when the last one came (monotonic), and how many since nobody had asked for long."""

    last_ms: float
    creates: int = 1

    @property
    def is_hot(self) -> bool:
        """Whether a further create is likely: a template that was used once may well be used once only."""
        return self.creates > 1


@dataclass
class WarmPool:
    """By sandbox id. Invariant: until a sandbox's record has it, a VM is in exactly one of `making`, `ready` and `taken`."""

    making: dict[str, RunningVm] = field(default_factory=dict)
    ready: dict[str, WarmVm] = field(default_factory=dict)
    taken: dict[str, WarmVm] = field(default_factory=dict)
    demand: dict[str, Demand] = field(default_factory=dict)  # by snapshot
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    creating: int = 0  # creates under way
    created_ms: float = 0.0  # when the last one ended (monotonic)
    create_took_ms: float = 0.0  # and how long it took

    @contextmanager
    def create(self, clock: Clock) -> Iterator[None]:
        """Count the body as a create under way."""
        began_ms = clock.monotonic_ms()
        self.creating += 1
        try:
            yield
        finally:
            self.creating -= 1
            self.created_ms = clock.monotonic_ms()
            self.create_took_ms = self.created_ms - began_ms

    def records(self) -> list[RunningVm]:
        """Of every VM that no sandbox has: what they use is in use."""
        return [*self.making.values(), *(warm.record for warm in (*self.ready.values(), *self.taken.values()))]

    def of(self, snapshot_id: str) -> list[WarmVm]:
        """Those that are ready."""
        return [warm for warm in self.ready.values() if warm.snapshot_id == snapshot_id]

    def take(self, snapshot_id: str, now_ms: float) -> WarmVm | None:
        """One that is ready, if there is one: `taken` until `handed_over`, and until then the caller's to free. Notes the demand."""
        before = self.demand.get(snapshot_id)
        self.demand[snapshot_id] = Demand(now_ms) if before is None else Demand(now_ms, before.creates + 1)
        self.changed.set()
        found = next(iter(self.of(snapshot_id)), None)
        if found is not None:
            self.taken[found.sandbox_id] = self.ready.pop(found.sandbox_id)
        return found

    def handed_over(self, sandbox_id: str) -> WarmVm | None:
        """A taken one that is somebody's from now on; None when it was that already."""
        return self.taken.pop(sandbox_id, None)
