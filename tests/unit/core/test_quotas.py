from __future__ import annotations

from dataclasses import fields, replace

import pytest

from agentenv.core.errors import InvalidInput
from agentenv.core.quotas import NAMES, NONE, Quotas, capped, check

NODE = Quotas(200, 100 << 20, 1000, 10 << 20)


def test_every_field_has_a_name_for_clients() -> None:
    assert set(NAMES) == {one.name for one in fields(Quotas)}


@pytest.mark.parametrize("field", NAMES)
def test_more_than_the_node_gives_and_less_than_works_are_refused_by_name(field: str) -> None:
    most = getattr(NODE, field)
    check(replace(NONE, **{field: most}), NODE)
    check(NONE, NODE)
    check(replace(NONE, **{field: 10 * most}), NONE)
    for value, words in ((most + 1, "more than this node gives"), (1, "too little")):
        with pytest.raises(InvalidInput, match=f"limits.{NAMES[field]}: {value} is {words}"):
            check(replace(NONE, **{field: value}), NODE)


def test_the_lower_one_holds() -> None:
    assert capped(NONE, NODE) == NODE
    assert capped(NODE, NONE) == NODE
    assert capped(Quotas(50, 1 << 30), NODE) == Quotas(50, 100 << 20, 1000, 10 << 20)
    assert capped(NONE, NONE) == NONE
