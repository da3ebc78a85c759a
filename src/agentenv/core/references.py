"""How templates are named: `[namespace/]name[:tag]` (contract section 2.1). Input is trimmed and lower-cased.

`name` is one of a template's aliases or its id. A node is one team, so it has one namespace, `local`; what is in another does
not exist here. No tag means `default`. In the place of a tag the id of a build names that build, which is why no tag may look
like one.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from agentenv.core.errors import InvalidInput, NotFound
from agentenv.core.ids import TAG, TEMPLATE_NAME

NAMESPACE = "local"
DEFAULT_TAG = "default"
_PART_CHARS = 128  # of a name, a tag or a namespace; the database and the lists stay readable
_QUOTED_CHARS = 80  # of the caller's text that an error repeats
_SHAPE = re.compile(r"(?:(?P<namespace>[^/:]*)/)?(?P<name>[^/:]*)(?::(?P<tag>[^/:]*))?")
_NEXT_STEP = f"names are made of a-z, 0-9, - and _, tags also of dots, each at most {_PART_CHARS} characters"


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed name. `tag` is None when none was given."""

    name: str
    tag: str | None = None

    def __str__(self) -> str:
        return self.name if self.tag is None else f"{self.name}:{self.tag}"


def parse_reference(text: str, field: str = "templateID") -> Reference:
    """What `text` names. InvalidInput, by the name of the `field`, when it has not the form; NotFound in a foreign namespace."""
    reference, namespace = _parse(text, field)
    if namespace != NAMESPACE:
        raise NotFound(f"template {text.strip()[:_QUOTED_CHARS]!r} not found", f"the namespace of this node is {NAMESPACE!r}")
    return reference


def parse_new_name(text: str, field: str = "name") -> Reference:
    """The name and tag under which something new is to be kept. InvalidInput also in a foreign namespace and for a build's id as tag."""
    reference, namespace = _parse(text, field)
    if namespace != NAMESPACE:
        raise InvalidInput(f"{field}: namespace {namespace[:_QUOTED_CHARS]!r} is not yours", f"leave it out, or write {NAMESPACE}/<name>")
    if reference.tag is not None:
        check_tag(reference.tag, field)
    return reference


def check_tag(text: str, field: str = "tags") -> str:
    """`text` as a tag that may be given out, trimmed and in lower case. InvalidInput when it cannot be one."""
    tag = text.strip().lower()
    if not (TAG.fullmatch(tag) and len(tag) <= _PART_CHARS):
        raise InvalidInput(f"{field}: {text[:_QUOTED_CHARS]!r} is not a tag", _NEXT_STEP)
    if is_build_id(tag):
        raise InvalidInput(f"{field}: {tag!r} has the form of a build id, which no tag may have", "choose another tag")
    return tag


def is_build_id(text: str) -> bool:
    """Whether `text` is a UUID in its usual form, as build ids are."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def full_name(name: str, tag: str) -> str:
    """`local/<name>:<tag>`."""
    return f"{NAMESPACE}/{name}:{tag}"


def _parse(text: str, field: str) -> tuple[Reference, str]:
    tidy = text.strip().lower()
    match = _SHAPE.fullmatch(tidy)
    if match is None or not _fits(match):
        raise InvalidInput(f"{field}: {text[:_QUOTED_CHARS]!r} is not a template id, name or name:tag", _NEXT_STEP)
    namespace = NAMESPACE if match["namespace"] is None else match["namespace"]
    return Reference(match["name"], match["tag"]), namespace


def _fits(match: re.Match[str]) -> bool:
    parts = ((match["namespace"], TEMPLATE_NAME), (match["name"], TEMPLATE_NAME), (match["tag"], TAG))
    return all(part is None or (len(part) <= _PART_CHARS and pattern.fullmatch(part)) for part, pattern in parts)
