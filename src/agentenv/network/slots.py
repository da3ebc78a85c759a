"""The pool of network slots: made ahead of time, handed out, destroyed after one tenant.

Invariants: a slot number is held by at most one sandbox; a slot is never handed on to a second tenant (it is destroyed,
and with its namespace all rules, connections and neighbours); everything on the machine with this node's prefix is
either held, ready, being made or being destroyed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path

from agentenv.core.errors import AgentEnvError, LimitReached
from agentenv.core.network import OPEN, Egress
from agentenv.host import netns, process
from agentenv.network import rates, rules
from agentenv.network.layout import GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC, GUEST_PREFIX, TAP, UPLINK, Layout, Slot

_log = logging.getLogger(__name__)
_COMMAND_DEADLINE_S = 20.0
_MAKERS = 2  # more at once only queue on the kernel's RTNL lock
_DESTROYERS = 2  # so that thousands that a killed server left do not hold up the first creates of the next
_DESTROY_WAITS_S = (1, 5, 30, 300)


class SlotPool:
    """Slots of one node. `open` first, `close` in the end (leaves held slots alone)."""

    def __init__(self, layout: Layout, denied_cidrs: Sequence[str], ready: int) -> None:
        self.layout = layout
        self._denied = tuple(denied_cidrs)
        self._wanted = ready
        self._ready: deque[Slot] = deque()
        self._held: set[int] = set()
        self._making: set[int] = set()
        self._numbers = itertools.cycle(range(layout.count))
        self._making_limit = asyncio.Semaphore(_MAKERS)
        self._destroying_limit = asyncio.Semaphore(_DESTROYERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self, held: Iterable[int]) -> None:
        """Load the host's rules, take over the slots of `held`, destroy whatever else a former run left, fill the pool."""
        self._held = set(held)
        await asyncio.to_thread(self._prepare_host)
        left = [number for name in netns.names(self.layout.namespace_prefix) if (number := self.layout.number_of(name)) is not None]
        for number in left:
            if number not in self._held:
                self._making.add(number)
                self._spawn(self._destroy(number))
        self._refill()

    async def acquire(self, egress: Egress = OPEN, bytes_per_s: int = 0) -> Slot:
        """A slot for one tenant under its policy, ready for its VMM; `bytes_per_s` limits each direction, 0 does not.

        LimitReached when the address pool is used up.
        """
        while self._ready:
            slot = self._ready.popleft()
            if netns.exists(slot.namespace):
                break
        else:
            slot = await self._make()
        self._held.add(slot.number)
        self._refill()
        try:
            if egress != OPEN:
                await self.apply(slot.number, egress)
            if bytes_per_s:
                await asyncio.to_thread(rates.limit, slot.namespace, bytes_per_s)
        except BaseException:
            await self.release(slot.number)
            raise
        return slot

    async def apply(self, number: int, egress: Egress) -> None:
        """Put a held slot under another policy, in one transaction. Connections that it forbids go silent."""
        await asyncio.to_thread(_load_namespace_rules, self.layout.slot(number), self._denied, egress)

    async def release(self, number: int) -> None:
        """Give a slot back; it is destroyed in the background. No error when it is not held."""
        if number in self._held:
            self._held.discard(number)
            self._making.add(number)
            self._spawn(self._destroy(number))

    def slot(self, number: int) -> Slot:
        """The names and addresses of slot `number`."""
        return self.layout.slot(number)

    async def settle(self) -> None:
        """Wait until nothing is being made or destroyed."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self, destroy_ready: bool = True) -> None:
        """Stop filling the pool and destroy the slots nobody holds."""
        self._closed = True
        await self.settle()
        if destroy_ready:
            while self._ready:
                slot = self._ready.popleft()
                self._making.add(slot.number)
                self._spawn(self._destroy(slot.number))
        await self.settle()

    def counts(self) -> dict[str, int]:
        """How many slots are ready, held, and being made or destroyed."""
        return {"ready": len(self._ready), "held": len(self._held), "changing": len(self._making)}

    def _prepare_host(self) -> None:
        forward = Path("/proc/sys/net/ipv4/ip_forward")
        if forward.read_text().strip() != "1":
            forward.write_text("1\n")
        process.run(["nft", "-f", "-"], _COMMAND_DEADLINE_S, rules.host_rules(self.layout, self._denied))

    def _free_number(self) -> int:
        taken = self._held | self._making | {slot.number for slot in self._ready}
        for number in itertools.islice(self._numbers, self.layout.count):
            if number not in taken:
                return number
        raise LimitReached(f"all {self.layout.count} network slots are in use", "kill sandboxes, or give network.pool_cidr a larger range")

    async def _make(self) -> Slot:
        slot = self.layout.slot(self._free_number())
        self._making.add(slot.number)
        try:
            async with self._making_limit:
                await asyncio.to_thread(create, slot, self._denied)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(destroy, slot.namespace, slot.veth))
            raise
        finally:
            self._making.discard(slot.number)
        return slot

    def _refill(self) -> None:
        if self._closed:
            return
        # a task that has just added its slot stays in `_tasks` until the loop calls back: without done() its slot would count twice
        coming = sum(1 for task in self._tasks if task.get_name() == "refill" and not task.done())
        missing = self._wanted - len(self._ready) - coming
        for _ in range(missing):
            self._spawn(self._add_ready(), "refill")

    async def _add_ready(self) -> None:
        try:
            self._ready.append(await self._make())
        except AgentEnvError as error:
            _log.warning("a network slot could not be made ahead: %s", error)

    async def _destroy(self, number: int) -> None:
        """Until it is gone: a look-up that fails for a moment must not leave a namespace for good. Its number is out of use meanwhile."""
        for wait_s in (*_DESTROY_WAITS_S, None):
            try:
                async with self._destroying_limit:
                    await asyncio.to_thread(destroy, *self.layout.names(number))
                self._making.discard(number)
                return
            except (AgentEnvError, OSError) as error:
                if wait_s is None or self._closed:
                    _log.error("network slot %d could not be removed, the next start of the server will: %s", number, error)
                    return
                _log.warning("network slot %d could not be removed, will be tried again in %d s: %s", number, wait_s, error)
            await asyncio.sleep(wait_s)

    def _spawn(self, work: Coroutine[None, None, None], name: str = "destroy") -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def create(slot: Slot, denied: Sequence[str]) -> None:
    """Namespace, tap, link to the host and rules.

    The link is made from outside, by a process of its own: from inside, its other end would go to wherever our main thread is, and
    that enters the namespaces of other slots for moments.
    """
    process.run(["ip", "netns", "add", slot.namespace], _COMMAND_DEADLINE_S)
    with netns.entered(slot.namespace):
        _write_sysctls()
    inside = f"""
link set dev lo up
tuntap add dev {TAP} mode tap
link set dev {TAP} address {GATEWAY_MAC} txqueuelen 1000 up
addr add {GATEWAY_IP}/{GUEST_PREFIX} dev {TAP}
neigh replace {GUEST_IP} lladdr {GUEST_MAC} dev {TAP} nud permanent
addr add {slot.inner_ip}/31 dev {UPLINK}
link set dev {UPLINK} up
route add default via {slot.host_ip}
"""
    outside = f"""
link add {slot.veth} type veth peer name {UPLINK} netns {slot.namespace}
addr add {slot.host_ip}/31 dev {slot.veth}
link set dev {slot.veth} up
"""
    process.run(["ip", "-batch", "-"], _COMMAND_DEADLINE_S, outside)
    process.run(["ip", "-n", slot.namespace, "-batch", "-"], _COMMAND_DEADLINE_S, inside)
    _load_namespace_rules(slot, denied, OPEN)


def _write_sysctls() -> None:
    """Of the namespace the calling thread is in: forward IPv4, no IPv6 (nothing would filter it)."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    for which in ("all", "default"):
        knob = Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6")
        if knob.exists():
            knob.write_text("1\n")


def _load_namespace_rules(slot: Slot, denied: Sequence[str], egress: Egress) -> None:
    argv = ["ip", "netns", "exec", slot.namespace, "nft", "-f", "-"]
    process.run(argv, _COMMAND_DEADLINE_S, rules.namespace_rules(denied, egress))


def destroy(namespace: str, veth: str) -> None:
    """Remove a slot whatever part of it exists. Blocks."""
    if Path(f"/sys/class/net/{veth}").exists():
        process.run(["ip", "link", "del", veth], _COMMAND_DEADLINE_S)
    if netns.exists(namespace):
        process.run(["ip", "netns", "del", namespace], _COMMAND_DEADLINE_S)


def remove_all(layout: Layout) -> int:
    """Remove every slot and rule of a node from the machine; returns how many slots there were. Blocks."""
    numbers = [number for name in netns.names(layout.namespace_prefix) if (number := layout.number_of(name)) is not None]
    for number in numbers:
        destroy(*layout.names(number))
    process.run(["nft", "-f", "-"], _COMMAND_DEADLINE_S, rules.remove_host_rules(layout))
    return len(numbers)
