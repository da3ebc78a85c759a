from __future__ import annotations

import subprocess

import pytest

from agentenv.config.schema import NetworkConfig
from agentenv.core.errors import InvalidInput
from agentenv.core.network import OPEN, Egress
from agentenv.network import rules
from agentenv.network.layout import Layout

DENIED: dict[str, tuple[str, ...]] = {
    "the default": NetworkConfig().denied_cidrs,
    "none": (),
    "one": ("10.0.0.0/8",),
    "overlapping": ("10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/8"),
    "host bits and a single address": ("10.1.2.3/8", "8.8.8.8"),
    "everything": ("0.0.0.0/0",),
}


EGRESS = (
    OPEN,
    Egress(deny=("0.0.0.0/0",)),
    Egress(allow=("1.1.1.1/32",), deny=("0.0.0.0/0", "1.0.0.0/8")),
    Egress(allow=("0.0.0.0/0", "8.8.8.8/32")),
)


def _nft(namespace: str, text: str, *options: str) -> str:
    argv = ["ip", "netns", "exec", namespace, "nft", *options, "-f", "-"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("denied", DENIED.values(), ids=DENIED)
def test_the_kernel_takes_every_rule_set(scratch_namespace: str, denied: tuple[str, ...]) -> None:
    layout = Layout("10.119.0.0/16", "ab12")
    texts = [*(rules.namespace_rules(denied, egress) for egress in EGRESS), rules.host_rules(layout, denied)]
    for text in texts:
        _nft(scratch_namespace, text, "-c")
        _nft(scratch_namespace, text)
        _nft(scratch_namespace, text)  # loading again replaces


def test_host_rules_come_and_go_as_a_whole(scratch_namespace: str) -> None:
    one, other = Layout("10.119.0.0/24", "ab12"), Layout("10.120.0.0/24", "cd34")

    def tables() -> str:
        return _nft(scratch_namespace, "list tables")

    for layout in (one, other):
        _nft(scratch_namespace, rules.host_rules(layout, DENIED["the default"]))
    _nft(scratch_namespace, rules.remove_host_rules(one))
    _nft(scratch_namespace, rules.remove_host_rules(one))
    assert (one.table in tables(), other.table in tables()) == (False, True)


def test_a_range_that_is_none_is_refused_by_name() -> None:
    for cidr in ("ten", "fd00::/8", "10.0.0.0/40", "1.2.3.4 } }; flush ruleset"):
        with pytest.raises(InvalidInput, match=r"network\.denied_cidrs"):
            rules.namespace_rules((cidr,), OPEN)
