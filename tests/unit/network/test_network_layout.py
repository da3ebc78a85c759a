from __future__ import annotations

import ipaddress

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.network.layout import GATEWAY_IP, GUEST_IP, GUEST_PREFIX, Layout

_NAME_MAX = 15  # IFNAMSIZ less its terminator


@pytest.mark.parametrize("cidr", ["10.119.0.0/16", "10.0.0.0/8", "192.168.7.0/24", "10.1.2.4/30"])
def test_names_fit_the_kernel_and_addresses_are_disjoint(cidr: str) -> None:
    layout = Layout(cidr, "ab12")
    step = max(1, layout.count // 5000)
    slots = [layout.slot(number) for number in [*range(0, layout.count, step), layout.count - 1]]
    addresses = [ip for slot in {slot.number: slot for slot in slots}.values() for ip in (slot.inner_ip, slot.host_ip)]
    assert len(set(addresses)) == len(addresses)
    for slot in slots:
        assert len(slot.veth) <= _NAME_MAX
        assert layout.number_of(slot.namespace) == slot.number
        link = ipaddress.IPv4Network(f"{slot.inner_ip}/31")
        assert [str(ip) for ip in link] == [slot.inner_ip, slot.host_ip]
        assert link.subnet_of(layout.network)


def test_every_slot_of_the_default_pool_has_its_own_names() -> None:
    layout = Layout("10.119.0.0/16", "ab12")
    assert layout.count == 32768
    assert len({layout.slot(number).veth for number in range(layout.count)}) == layout.count


def test_guest_and_gateway_share_a_link() -> None:
    assert GATEWAY_IP in [str(ip) for ip in ipaddress.IPv4Interface(f"{GUEST_IP}/{GUEST_PREFIX}").network.hosts()]


@pytest.mark.parametrize("cidr", ["10.0.0.0/7", "10.0.0.0/31", "10.0.0.1/16", "fd00::/64", "ten", ""])
def test_pools_that_cannot_work_are_refused(cidr: str) -> None:
    with pytest.raises(InvalidInput, match=r"network\.pool_cidr"):
        Layout(cidr, "ab12")


@pytest.mark.parametrize("number", [-1, 128])
def test_numbers_outside_the_pool_are_refused(number: int) -> None:
    with pytest.raises(InvalidInput):
        Layout("10.0.0.0/24", "ab12").slot(number)


def test_names_of_others_are_nobodys_slots() -> None:
    layout = Layout("10.0.0.0/24", "ab12")
    for name in ("aenv-cd34-1", "aenv-ab12-", "aenv-ab12-x", "aenv-ab12-01", "aenv-ab12-1x", "aenv-ab12-٣", "other"):
        assert layout.number_of(name) is None
    assert layout.number_of("aenv-ab12-5000") == 5000, "a leftover of a larger pool is still ours to remove"


def test_nodes_on_one_machine_share_no_name() -> None:
    one, other = Layout("10.0.0.0/24", "ab12"), Layout("10.0.0.0/24", "ab13")
    names = {*one.names(1), one.table} & {*other.names(1), other.table}
    assert not names
