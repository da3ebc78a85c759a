"""Variables in arguments, and the keys that say which step may stand for which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.core.builds import Step, base_key, step_key
from agentenv.core.errors import InvalidInput
from agentenv.core.model import Context
from agentenv.template.expand import expand, names_in

VARIABLES = {"A": "1", "EMPTY": "", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("plain", "plain"),
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$Ab", ""),
        ("/opt:$PATH", "/opt:/bin"),
        ("$MISSING-", "-"),
        ("${MISSING:-word}", "word"),
        ("${EMPTY:-word}", "word"),
        ("${A:-word}", "1"),
        ("${MISSING:-$A}", "1"),
        ("${A:+word}", "word"),
        ("${EMPTY-word}|${MISSING-word}|${EMPTY+word}|${MISSING+word}", "|word|word|"),
        ("${PATH#/b}|${PATH%n}|${PATH/i/I}|${PATH//[/x}", "in|/bi|/bIn|/bin"),
        ("${MISSING:-a${A}b}c", "a1bc"),
        (r"${MISSING:-a\}b} C:\new '$A'", r"a}b C:\new '1'"),
        ("${A:?must}", "1"),
        ("${MISSING:+word}", ""),
        (r"\$A costs $A", "$A costs 1"),
        ("$", "$"),
        ("5$ and $1 and ${", "5$ and $1 and ${"),
        ("${A", "${A"),
        ("$(id)", "$(id)"),
        ("a=b c\n$A", "a=b c\n1"),
    ],
)
def test_variables_are_replaced(text: str, expanded: str):
    assert expand(text, VARIABLES) == expanded


@pytest.mark.parametrize("text", ["${MISSING:?must be set}", "${EMPTY:?must be set}", "${MISSING?must be set}"])
def test_a_variable_that_must_be_set(text: str):
    with pytest.raises(InvalidInput, match="must be set"):
        expand(text, VARIABLES)


def test_names_that_are_referred_to():
    assert names_in(r"$A ${B:-$C} \$D ${E:+x} $5") == {"A", "B", "C", "E"}


RUN = Step("RUN", ("make",))


def key_of(parent: str, step: Step, context: Context, vcpu_count: int, memory_mb: int) -> str:
    return step_key(parent, step.content(), context, vcpu_count, memory_mb)


CONTEXT = Context()


@pytest.mark.parametrize(
    "change",
    [
        {"parent": base_key("other")},
        {"step": replace(RUN, arguments=("make", "root"))},
        {"step": replace(RUN, kind="ENV")},
        {"step": replace(RUN, files_hash="f")},
        {"context": replace(CONTEXT, user="root")},
        {"context": replace(CONTEXT, workdir="/")},
        {"context": replace(CONTEXT, env_vars={"A": "1"})},
        {"vcpu_count": 2},
        {"memory_mb": 1024},
    ],
    ids=str,
)
def test_whatever_a_step_depends_on_is_in_its_key(change: dict):
    given = {"parent": base_key("base"), "step": RUN, "context": CONTEXT, "vcpu_count": 1, "memory_mb": 512}
    assert key_of(**given) == key_of(**given)
    assert key_of(**(given | change)) != key_of(**given)


def test_force_is_not_in_the_key_and_arguments_are_not_run_together():
    given = (base_key("base"), CONTEXT, 1, 512)
    assert key_of(given[0], replace(RUN, force=True), *given[1:]) == key_of(given[0], RUN, *given[1:])
    parted, joined = Step("ENV", ("A", "B", "C", "D")), Step("ENV", ("A", "BC", "D", ""))
    assert key_of(given[0], parted, *given[1:]) != key_of(given[0], joined, *given[1:])
