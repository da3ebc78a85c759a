"""What may be done to a template, as pure functions from one value to the next.

Invariants: every tag names a build the template has; every build has a tag (one that loses its last tag goes, and with it its
bytes); tags are in order, `default` first; builds are newest first. A template without builds is no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agentenv.core.built_in import BUILT_IN
from agentenv.core.errors import InvalidInput, LimitReached, NotFound
from agentenv.core.ids import new_assignment_id, new_template_id
from agentenv.core.model import Build, Tag, Template, TemplateKind
from agentenv.core.references import DEFAULT_TAG, Reference, full_name

TAGS_MAX = 100  # of one template: each may hold a build, and they are listed in one reply
_HISTORY_MAX = 200  # former assignments that are remembered, of all tags of one template together
_NEXT_STEP = "`aenv templates` lists what there is"


def find(templates: Iterable[Template], reference: Reference) -> Template:
    """The template of that id or alias, whatever the tag. NotFound."""
    for template in templates:
        if reference.name == template.template_id or reference.name in template.aliases:
            return template
    hint = f"it is made by `aenv down`, then `aenv up --template {reference.name}`" if reference.name in BUILT_IN else _NEXT_STEP
    raise NotFound(f"template '{reference.name}' not found", hint)


def build_of(template: Template, tag: str | None) -> Build:
    """The build that a tag, or a build's own id, names. NotFound."""
    wanted = tag or DEFAULT_TAG
    build_id = next((t.build_id for t in template.tags if t.tag == wanted), wanted)
    for build in template.builds:
        if build.build_id == build_id:
            return build
    has = ", ".join(t.tag for t in template.tags[:10])
    raise NotFound(f"template '{template.name}' has no tag '{wanted}'", f"it has {has}")


def first(build: Build, aliases: tuple[str, ...], kind: TemplateKind, tags: Iterable[str], now_ms: int) -> Template:
    """A new template with one build."""
    empty = Template(new_template_id(), aliases, kind, (), (), now_ms, now_ms, build_count=0)
    return with_build(empty, build, tags, now_ms)


def with_build(template: Template, build: Build, tags: Iterable[str], now_ms: int) -> Template:
    """`template` with one more build, which `tags` name from now on."""
    grown = replace(template, builds=(build, *template.builds), build_count=template.build_count + 1)
    return with_tags(grown, build, tags, now_ms)


def with_tags(template: Template, build: Build, tags: Iterable[str], now_ms: int) -> Template:
    """`tags` name `build`, one of the template's. LimitReached beyond `TAGS_MAX`."""
    given = tuple(Tag(tag, build.build_id, new_assignment_id(), now_ms, build.created_at_ms) for tag in dict.fromkeys(tags))
    names = {tag.tag for tag in given}
    kept = tuple(tag for tag in template.tags if tag.tag not in names)
    former = tuple(tag for tag in template.tags if tag.tag in names)
    if len(kept) + len(given) > TAGS_MAX:
        raise LimitReached(f"template '{template.name}' would have more than {TAGS_MAX} tags", "remove tags that nobody uses")
    return _tidied(replace(template, tags=kept + given, history=former + template.history, updated_at_ms=now_ms))


def without_tags(template: Template, tags: Iterable[str], now_ms: int) -> Template:
    """`template` without these tags. NotFound when it lacks one, InvalidInput for `default`."""
    gone = set(tags)
    if DEFAULT_TAG in gone:
        raise InvalidInput(f"the tag '{DEFAULT_TAG}' cannot be removed", "delete the template, or give the tag to another build")
    return without(template, gone, now_ms)


def without(template: Template, tags: Iterable[str], now_ms: int) -> Template:
    """As `without_tags`, `default` among them."""
    gone = set(tags)
    if missing := gone - {tag.tag for tag in template.tags}:
        raise NotFound(f"template '{template.name}' has no tag '{min(missing)}'")
    kept = tuple(tag for tag in template.tags if tag.tag not in gone)
    history = tuple(tag for tag in template.history if tag.tag not in gone)
    return _tidied(replace(template, tags=kept, history=history, updated_at_ms=now_ms))


def with_public(template: Template, is_public: bool, now_ms: int) -> Template:
    """`template`, for everyone or not."""
    return replace(template, public=is_public, updated_at_ms=now_ms)


def snapshot_home(templates: Iterable[Template], name: Reference | None) -> Template | None:
    """The template that a new snapshot of that name belongs to; None when it gets one of its own. InvalidInput: the node's own."""
    if name is None:
        return None
    for template in templates:
        if name.name == template.template_id or name.name in template.aliases:
            if template.kind == "builtin":
                raise InvalidInput(f"name: '{name.name}' is a template of the node itself", "choose another name")
            return template
    return None


def with_snapshot(templates: Iterable[Template], build: Build, name: Reference | None, now_ms: int) -> Template:
    """The template that holds a new snapshot: one of those there are, or a new one."""
    home = snapshot_home(templates, name)
    tags = ((name and name.tag) or DEFAULT_TAG,)
    if home is not None:
        return with_build(home, build, tags, now_ms)
    return first(build, () if name is None else (name.name,), "snapshot", tags, now_ms)


def snapshot_name(template: Template, tag: str) -> str:
    """How a snapshot is called (contract section 2.4): by its name if it has one, else by the template's id."""
    return full_name(template.aliases[0], tag) if template.aliases else f"{template.template_id}:{tag}"


def _tidied(template: Template) -> Template:
    named = {tag.build_id for tag in template.tags}
    return replace(
        template,
        tags=tuple(sorted(template.tags, key=lambda tag: (tag.tag != DEFAULT_TAG, tag.tag))),
        builds=tuple(build for build in template.builds if build.build_id in named),
        history=template.history[:_HISTORY_MAX],
    )
