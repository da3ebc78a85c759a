"""Building a built-in template over fakes: what runs in the guest, in which order, and what a failure leaves."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import agentenv
from agentenv.config.schema import TemplatesConfig
from agentenv.core.built_in import BUILT_IN, CODE_INTERPRETER
from agentenv.core.errors import Internal
from agentenv.core.model import Service, Template
from agentenv.orchestrator.sweep import sweep
from agentenv.template import base
from agentenv.template.base import BaseBuilder, BaseInputs
from agentenv.template.recipes import RECIPES, Recipe
from agentenv.testing.fake_node import FakeNode
from agentenv.vmm.driver import BootSpec
from agentenv.wiring import base_builder

RECIPE = Recipe(name="service", start="start it", ready="is it ready", warm_up="warm it", min_memory_mb=1024)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    made = FakeNode(tmp_path)
    await made.start_server()
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_READY_INTERVAL_S", 0.0)


def builder(node: FakeNode, recipe: Recipe) -> BaseBuilder:
    return base_builder(node.parts, recipe)


async def build(node: FakeNode, recipe: Recipe, digest: str = "d1") -> Template:
    image = node.paths.home / "root.ext4"
    image.write_text("{}")
    inputs = BaseInputs(image, digest, BootSpec(Path("/kernel"), Path("/initramfs"), ""))
    return await builder(node, recipe).build(inputs, lambda *_: None)


async def test_service_is_started_and_awaited_before_the_warm_up(node: FakeNode) -> None:
    asked = 0

    def answer(command: str) -> tuple[int, str]:
        nonlocal asked
        asked += command == RECIPE.ready
        return (0, "") if command != RECIPE.ready or asked == 3 else (7, "not yet")

    node.guest.answers_to = answer
    template = await build(node, RECIPE)
    assert node.guest.commands[:5] == [RECIPE.start, *[RECIPE.ready] * 3, RECIPE.warm_up]
    assert "sync" in node.guest.commands[-1]
    assert template.name == "service"
    assert template.builds[0].machine.memory_mb == 1024
    assert template.builds[0].service == Service("start it", "is it ready")
    assert [t for t in node.parts.store.templates() if t.name == "service"] == [template]
    assert node.processes.alive() == []


async def test_recipe_without_a_service_only_warms(node: FakeNode) -> None:
    template = await build(node, Recipe(name="plain"))
    assert len(node.guest.commands) == 1
    assert template.builds[0].service is None
    assert template.builds[0].machine.memory_mb == node.config.guest.memory_mb


@pytest.mark.parametrize(("failing", "said"), [("start it", "start command"), ("warm it", "warm-up"), ("is it ready", "not ready within")])
async def test_failure_names_the_step_and_leaves_nothing(node: FakeNode, failing: str, said: str) -> None:
    node.parts.config = node.config.model_copy(update={"guest": node.config.guest.model_copy(update={"service_deadline_s": 0})})
    node.guest.answers_to = lambda command: (9, "the cause") if command == failing else (0, "")
    with pytest.raises(Internal, match=f"{said}.*(?s:.*)the cause"):
        await build(node, RECIPE)
    assert [t.name for t in node.parts.store.templates()] == ["base"]
    assert node.processes.alive() == []


async def test_a_sweep_at_any_step_of_the_build_takes_nothing_of_it(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """`aenv up` builds beside VMs it has taken over: when one ends there is a sweep."""
    started = len(node.points.passed)
    await build(node, RECIPE)
    steps, hit = node.points.passed[started:], node.points.hit
    assert steps[-2:] == ["store.commit", "store.commit"], "the snapshot, then the template"
    for number in range(len(steps)):
        left, swept = number + 1, ""

        async def sweep_at_step(name: str, *, can_fail: bool = True) -> None:
            nonlocal left, swept
            await hit(name, can_fail=can_fail)
            left -= can_fail
            if left == 0 and not swept:
                swept = name
                await sweep(node.parts)

        with monkeypatch.context() as patched:
            patched.setattr(node.points, "hit", sweep_at_step)
            await build(node, RECIPE, f"d{number}")
        assert swept == steps[number]
        await node.quiesce()  # what was only of the template before goes
        assert node.problems() == [], f"after a sweep at {swept}"


async def test_template_is_up_to_date_until_an_input_changes(node: FakeNode) -> None:
    assert not builder(node, RECIPE).up_to_date("d1")
    first = await build(node, RECIPE)
    assert builder(node, RECIPE).up_to_date("d1")
    assert not builder(node, RECIPE).up_to_date("d2")
    for changed in (
        replace(RECIPE, warm_up="other"),
        replace(RECIPE, start="other"),
        replace(RECIPE, ready="other"),
        replace(RECIPE, min_memory_mb=2048),
    ):
        assert not builder(node, changed).up_to_date("d1"), changed
    again = await build(node, replace(RECIPE, warm_up="other"))
    assert again.template_id == first.template_id
    assert again.builds[0].build_id != first.builds[0].build_id


def test_every_recipe_is_found_by_its_name() -> None:
    assert "base" in RECIPES
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert bool(recipe.start) == bool(recipe.ready), name


def test_names_are_the_same_everywhere() -> None:
    assert tuple(RECIPES) == BUILT_IN
    for name in BUILT_IN:
        assert TemplatesConfig(built_in=(name,)).built_in == (name,)
    with pytest.raises(ValidationError):
        TemplatesConfig(built_in=("other",))


def test_code_interpreter_puts_its_whole_package_into_the_guest() -> None:
    files = {Path(file.path).name: file for file in RECIPES[CODE_INTERPRETER].files()}
    source = Path(agentenv.__file__).parent / "interpreter"
    assert set(files) == {path.name for path in source.iterdir() if path.is_file()}
    assert {file.path.rsplit("/", 1)[0] for file in files.values()} == {"/usr/local/lib/agentenv/aenv_interpreter"}
    assert [name for name, file in files.items() if file.mode != 0o644] == ["run.sh"]
    assert files["run.sh"].path in RECIPES[CODE_INTERPRETER].start
