"""What is asked of templates by name: which there are, their tags, their end. Works on any store of templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from agentenv.core import templates
from agentenv.core.errors import InvalidInput
from agentenv.core.lifecycle import VISIBLE
from agentenv.core.model import Build, Sandbox, Template
from agentenv.core.references import DEFAULT_TAG, parse_reference


class TemplateStore(Protocol):
    """What this module needs of `store.sqlite.Store`."""

    def templates(self) -> list[Template]:
        """All templates, newest first."""
        ...

    def sandboxes(self) -> list[Sandbox]:
        """All sandboxes in any state."""
        ...

    async def change_templates(self, change: Callable[[list[Template]], Template]) -> Template:
        """Record the template that `change` makes of those there are; one without builds is forgotten."""
        ...


def resolve(store: TemplateStore, reference: str) -> tuple[Template, Build]:
    """A template and the build that the reference's tag names. NotFound, InvalidInput."""
    wanted = parse_reference(reference)
    template = templates.find(store.templates(), wanted)
    return template, templates.build_of(template, wanted.tag)


def named(store: TemplateStore, reference: str) -> Template:
    """A template by id or name; when a tag is given too, it must have it. NotFound, InvalidInput."""
    wanted = parse_reference(reference)
    template = templates.find(store.templates(), wanted)
    if wanted.tag is not None:
        templates.build_of(template, wanted.tag)
    return template


async def assign_tags(store: TemplateStore, target: str, tags: Iterable[str], now_ms: int) -> Build:
    """Give `tags` to the build that `target` names, taking them from others. NotFound, InvalidInput, LimitReached."""
    wanted, tags = parse_reference(target, "target"), tuple(tags)

    def change(present: list[Template]) -> Template:
        template = templates.find(present, wanted)
        build = templates.build_of(template, wanted.tag)
        if template.kind == "builtin" and DEFAULT_TAG in tags and build != templates.build_of(template, None):
            raise InvalidInput(f"'{DEFAULT_TAG}' of '{template.name}' is the node's own, which `aenv up` sets", "use another tag")
        return templates.with_tags(template, build, tags, now_ms)

    return templates.build_of(await store.change_templates(change), tags[0])


async def remove_tags(store: TemplateStore, name: str, tags: Iterable[str], now_ms: int) -> None:
    """Take `tags` off a template; builds that none names any more go. NotFound, InvalidInput for `default`."""
    wanted = parse_reference(name, "name")
    if wanted.tag is not None:
        raise InvalidInput(f"name: {name!r} holds a tag", "put the tags into `tags`")
    await store.change_templates(lambda present: templates.without_tags(templates.find(present, wanted), tags, now_ms))


async def delete(store: TemplateStore, reference: str, now_ms: int) -> None:
    """Remove a template, or with a tag that tag and its build if no other tag names it. NotFound the second time.

    InvalidInput while sandboxes made from it run or are paused (contract section 2.4), and for the node's own templates.
    """
    wanted = parse_reference(reference)

    def change(present: list[Template]) -> Template:
        template = templates.find(present, wanted)
        tags = {tag.tag for tag in template.tags} if wanted.tag is None else {wanted.tag}
        left = templates.without(template, tags, now_ms)
        if template.kind == "builtin" and DEFAULT_TAG in tags:
            raise InvalidInput(
                f"template '{template.name}' is the node's own and cannot be deleted",
                f"`aenv up` makes it and keeps it current; another tag of it can go: `aenv template delete {template.name}:TAG`",
            )
        _refuse_in_use(template, left, store.sandboxes())
        return left

    await store.change_templates(change)


def _refuse_in_use(template: Template, left: Template, sandboxes: list[Sandbox]) -> None:
    gone = {build.build_id for build in template.builds} - {build.build_id for build in left.builds}
    users = [
        sandbox.sandbox_id
        for sandbox in sandboxes
        if sandbox.state in VISIBLE and sandbox.template_id == template.template_id and (not left.builds or sandbox.build_id in gone)
    ]
    if users:
        more = f" and {len(users) - 1} more" if len(users) > 1 else ""
        raise InvalidInput(
            f"cannot delete template '{template.name}': sandbox {users[0]}{more} made from it still runs or is paused", "kill them first"
        )


async def set_public(store: TemplateStore, reference: str, is_public: bool, now_ms: int) -> Template:
    """Note whether a template is for everyone; on a node, which is one team, nothing depends on it. NotFound."""
    wanted = parse_reference(reference)
    return await store.change_templates(lambda present: templates.with_public(templates.find(present, wanted), is_public, now_ms))


def all_builds(store: TemplateStore) -> list[Build]:
    """The builds of all templates."""
    return [build for template in store.templates() for build in template.builds]


def hot_snapshot_ids(store: TemplateStore) -> set[str]:
    """The snapshots whose memory stays open and in the page cache: those of templates that are made to be started often.

    Snapshots of sandboxes may be many and most are started from once or never: their memory is opened when it is needed.
    """
    hot = (template for template in store.templates() if template.kind != "snapshot")
    return {build.snapshot_id for template in hot for build in template.builds}
