"""The pool on the real kernel. Every test has its own tag, and looks at the machine afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.config.schema import NetworkConfig
from agentenv.core.errors import Internal, LimitReached
from agentenv.core.network import OPEN, Egress
from agentenv.host import netns
from agentenv.network import slots as slots_module
from agentenv.network.layout import Layout
from agentenv.network.slots import SlotPool, destroy, remove_all

DENIED = NetworkConfig().denied_cidrs


def _run(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout


def _layout(name: str, cidr: str = "10.119.240.0/27") -> Layout:
    return Layout(cidr, hashlib.sha256(f"{name}{os.getpid()}".encode()).hexdigest()[:4])


@pytest.fixture
async def layout(root: None, request: pytest.FixtureRequest) -> AsyncIterator[Layout]:
    layout = _layout(request.node.name)
    yield layout
    await asyncio.to_thread(remove_all, layout)


def _on_machine(layout: Layout) -> tuple[list[str], list[str]]:
    """Namespaces and links of a node."""
    links = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(layout.veth_prefix)]
    return netns.names(layout.namespace_prefix), sorted(links)


def _has_table(layout: Layout) -> bool:
    return layout.table in _run(["nft", "list", "tables"])


async def test_many_tenants_never_share_a_slot_and_leave_nothing(layout: Layout) -> None:
    """A hundred tasks, sixteen slots."""
    pool = SlotPool(layout, DENIED, ready=3)
    await pool.open(())
    held: set[int] = set()
    turns = random.Random(7)
    limited = 0

    async def tenant(delay_turns: int) -> None:
        nonlocal limited
        for _ in range(delay_turns):
            await asyncio.sleep(0.0005)
        while True:
            try:
                slot = await pool.acquire()
                break
            except LimitReached:
                limited += 1
                await asyncio.sleep(0.005)
        assert slot.number not in held, f"slot {slot.number} was handed out twice"
        assert netns.exists(slot.namespace)
        held.add(slot.number)
        await asyncio.sleep(0.001)
        held.discard(slot.number)
        await pool.release(slot.number)
        await pool.release(slot.number)

    async with asyncio.timeout(60):
        await asyncio.gather(*(tenant(turns.randrange(40)) for _ in range(100)))
        await pool.close()
    assert limited > 0, "the pool was never short: nothing was raced for"
    assert pool.counts() == {"ready": 0, "held": 0, "changing": 0}
    assert _on_machine(layout) == ([], [])


async def test_a_slot_has_what_a_guest_needs_and_nothing_stays(layout: Layout) -> None:
    pool = SlotPool(layout, DENIED, ready=1)
    await pool.open(())
    slot = await pool.acquire()

    def inside(*argv: str) -> str:
        return _run(["ip", "netns", "exec", slot.namespace, *argv])

    assert "169.254.0.22/30" in inside("ip", "-o", "addr", "show", "dev", "tap0")
    assert f"{slot.inner_ip}/31" in inside("ip", "-o", "addr", "show", "dev", "eth0")
    assert "02:00:00:00:00:01 PERMANENT" in inside("ip", "neigh", "show", "dev", "tap0")
    assert f"default via {slot.host_ip}" in inside("ip", "route")
    assert inside("cat", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/disable_ipv6").split() == ["1", "1"]
    assert 'oifname "eth0" goto egress' in inside("nft", "list", "ruleset")
    await pool.release(slot.number)
    await pool.settle()
    assert slot.namespace not in _on_machine(layout)[0]
    await pool.close()
    assert _on_machine(layout) == ([], [])
    assert _has_table(layout), "the host's rules stay: other servers of this node may run"
    await asyncio.to_thread(remove_all, layout)
    assert not _has_table(layout)


async def test_a_slot_is_under_the_policy_it_was_asked_with_and_then_under_another(layout: Layout) -> None:
    pool = SlotPool(layout, DENIED, ready=0)
    await pool.open(())
    slot = await pool.acquire(Egress(allow=("1.1.1.1/32",), deny=("0.0.0.0/0",)))

    def listed(name: str) -> str:
        return _run(["ip", "netns", "exec", slot.namespace, "nft", "list", "set", "ip", "slot", name])

    assert "1.1.1.1" in listed("allow_out")
    assert "0.0.0.0/0" in listed("deny_out")
    assert "10.0.0.0/8" in listed("denied_cidrs")
    await pool.apply(slot.number, Egress(deny=("9.9.9.9/32",)))
    assert "elements" not in listed("allow_out")
    assert "9.9.9.9" in listed("deny_out")
    assert "10.0.0.0/8" in listed("denied_cidrs"), "the node's own ranges are denied whatever the policy"
    await pool.apply(slot.number, OPEN)
    assert "elements" not in listed("allow_out") + listed("deny_out")
    await pool.release(slot.number)
    await pool.close()


async def test_leftovers_of_a_former_run_go_and_held_slots_stay(layout: Layout) -> None:
    former = SlotPool(layout, DENIED, ready=2)
    await former.open(())
    kept = await former.acquire()
    await former.close(destroy_ready=False)
    half_made = layout.names(13)[0]
    _run(["ip", "netns", "add", half_made])
    assert len(_on_machine(layout)[0]) >= 4

    pool = SlotPool(layout, DENIED, ready=0)
    await pool.open([kept.number])
    await pool.settle()
    assert _on_machine(layout) == ([kept.namespace], [kept.veth])
    assert pool.counts() == {"ready": 0, "held": 1, "changing": 0}
    await pool.release(kept.number)
    await pool.close()
    assert _on_machine(layout) == ([], [])


async def test_leftovers_of_a_larger_pool_go_too(layout: Layout) -> None:
    outside = layout.names(layout.count + 3)[0]
    _run(["ip", "netns", "add", outside])
    pool = SlotPool(layout, DENIED, ready=0)
    await pool.open(())
    await pool.close()
    assert _on_machine(layout) == ([], [])


async def test_another_node_on_the_machine_is_not_touched(layout: Layout) -> None:
    other = _layout("other", "10.119.241.0/27")
    neighbour = SlotPool(other, DENIED, ready=0)
    await neighbour.open(())
    slot = await neighbour.acquire()
    before = _on_machine(other)
    try:
        pool = SlotPool(layout, DENIED, ready=1)
        await pool.open(())
        await pool.settle()
        await pool.close()
        await asyncio.to_thread(remove_all, layout)
        assert _on_machine(other) == before == ([slot.namespace], [slot.veth])
        assert _has_table(other)
    finally:
        await neighbour.release(slot.number)
        await neighbour.close()
        await asyncio.to_thread(remove_all, other)


async def test_a_slot_that_cannot_be_made_leaves_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LimitReached("injected")

    pool = SlotPool(layout, DENIED, ready=0)
    await pool.open(())
    monkeypatch.setattr(slots_module, "_load_namespace_rules", fail)
    for egress in (OPEN, Egress(deny=("0.0.0.0/0",))):
        with pytest.raises(LimitReached, match="injected"):
            await pool.acquire(egress)
    monkeypatch.undo()
    await pool.settle()
    assert pool.counts() == {"ready": 0, "held": 0, "changing": 0}
    assert _on_machine(layout) == ([], [])
    slot = await pool.acquire()
    await pool.release(slot.number)
    await pool.close()


async def test_i05_a_slot_that_cannot_be_removed_at_first_goes_later_and_young_ones_stay(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups fail for a while, in both ways they can, under a burst of tenants."""
    monkeypatch.setattr(slots_module, "_DESTROY_WAITS_S", (0.05,) * 8)
    failures = iter([Internal("injected"), FileNotFoundError("injected")] * 10)

    def fail_at_first(namespace: str, veth: str) -> None:
        for error in failures:
            raise error
        destroy(namespace, veth)

    pool = SlotPool(layout, DENIED, ready=2)
    await pool.open(())
    monkeypatch.setattr(slots_module, "destroy", fail_at_first)
    old = [await pool.acquire() for _ in range(5)]
    for slot in old:
        await pool.release(slot.number)
    young = [await pool.acquire() for _ in range(5)]
    await pool.settle()
    present, _ = _on_machine(layout)
    assert {slot.namespace for slot in young} <= set(present)
    assert not {slot.namespace for slot in old} & set(present)
    assert pool.counts() == {"ready": 2, "held": 5, "changing": 0}
    for slot in young:
        await pool.release(slot.number)
    await pool.close()
    assert _on_machine(layout) == ([], [])


async def test_the_pool_is_full_again_whenever_a_slot_is_taken(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the very moment in which one was added."""
    monkeypatch.setattr(slots_module, "create", lambda slot, denied: None)
    monkeypatch.setattr(slots_module, "destroy", lambda namespace, veth: None)
    monkeypatch.setattr(netns, "exists", lambda namespace: True)
    pool = SlotPool(layout, DENIED, ready=2)
    await pool.open(())
    for _ in range(200):
        while not pool.counts()["ready"]:  # noqa: ASYNC110 - the very turn of the loop in which one is added is what this is about
            await asyncio.sleep(0)
        slot = await pool.acquire()
        await pool.settle()
        assert pool.counts() == {"ready": 2, "held": 1, "changing": 0}
        held = [slot, await pool.acquire(), await pool.acquire()]
        for each in held:
            await pool.release(each.number)
    await pool.close()


async def test_a_ready_slot_that_somebody_removed_is_not_handed_out(layout: Layout) -> None:
    pool = SlotPool(layout, DENIED, ready=1)
    await pool.open(())
    await pool.settle()
    [namespace] = _on_machine(layout)[0]
    number = layout.number_of(namespace)
    assert number is not None
    await asyncio.to_thread(destroy, *layout.names(number))
    slot = await pool.acquire()
    assert netns.exists(slot.namespace)
    await pool.release(slot.number)
    await pool.close()
    assert _on_machine(layout) == ([], [])


async def test_a_slot_can_be_limited_in_both_directions(layout: Layout) -> None:
    pool = SlotPool(layout, DENIED, ready=1)
    await pool.open(())
    limited, free = await pool.acquire(bytes_per_s=1_000_000), await pool.acquire()
    await pool.apply(limited.number, Egress(deny=("1.2.3.0/24",)))
    assert "tbf" in _run(["tc", "-n", limited.namespace, "qdisc", "show", "dev", "tap0"])
    assert "1000000 bytes/second" in _run(["ip", "netns", "exec", limited.namespace, "nft", "list", "table", "ip", "aenv_rate"])
    assert "tbf" not in _run(["tc", "-n", free.namespace, "qdisc", "show"])
    assert "aenv_rate" not in _run(["ip", "netns", "exec", free.namespace, "nft", "list", "tables"])
    for slot in (limited, free):
        await pool.release(slot.number)
    await pool.close()


async def test_a_full_pool_says_so(root: None) -> None:
    layout = _layout("full", "10.119.242.0/30")
    pool = SlotPool(layout, DENIED, ready=0)
    await pool.open(())
    try:
        held = [await pool.acquire() for _ in range(layout.count)]
        with pytest.raises(LimitReached, match=f"all {layout.count} network slots"):
            await pool.acquire()
        await pool.release(held[0].number)
        await pool.settle()
        assert (await pool.acquire()).number == held[0].number
    finally:
        await pool.close()
        await asyncio.to_thread(remove_all, layout)


async def test_slots_are_made_right_while_the_main_thread_is_in_another_namespace(layout: Layout) -> None:
    pool = SlotPool(layout, DENIED, ready=0)
    await pool.open(())
    other = await pool.acquire()
    making = asyncio.gather(*(pool.acquire() for _ in range(3)))
    while not making.done():
        with netns.entered(other.namespace):  # as whenever the server dials a guest, only longer
            time.sleep(0.005)  # noqa: ASYNC251
        await asyncio.sleep(0)
    slots = making.result()
    for slot in slots:
        assert Path(f"/sys/class/net/{slot.veth}").exists()
        await pool.release(slot.number)
    await pool.release(other.number)
    await pool.close()
    assert _on_machine(layout) == ([], [])
