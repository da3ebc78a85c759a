"""What is asked of templates by name: which there are, their tags, their end."""

from __future__ import annotations

from agentenv.core import templates
from agentenv.core.model import Build, Template
from agentenv.core.references import parse_reference
from agentenv.orchestrator.parts import Parts
from agentenv.store.sqlite import Store


def resolve(parts: Parts, reference: str) -> tuple[Template, Build]:
    """A template and the build that the reference's tag names. NotFound, InvalidInput."""
    wanted = parse_reference(reference)
    template = templates.find(parts.store.templates(), wanted)
    return template, templates.build_of(template, wanted.tag)


def all_builds(store: Store) -> list[Build]:
    """The builds of all templates."""
    return [build for template in store.templates() for build in template.builds]


def hot_snapshot_ids(store: Store) -> set[str]:
    """The snapshots whose memory stays open and in the page cache: those of templates that are made to be started often.

    Snapshots of sandboxes may be many and most are started from once or never: their memory is opened when it is needed.
    """
    hot = (template for template in store.templates() if template.kind != "snapshot")
    return {build.snapshot_id for template in hot for build in template.builds}
