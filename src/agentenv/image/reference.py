"""Names of images: `[registry/]repository[:tag][@digest]`, and which of them a node may use.

Short names mean what they mean to other container tools: `debian` is `docker.io/library/debian:latest`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from agentenv.core.errors import InvalidInput, PermissionDenied

DOCKER_HUB = "docker.io"
_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_NAME_MAX = 255  # of registry and repository together, as registries have it
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HINT = "write it as [registry/]name[:tag] or [registry/]name@sha256:<64 hexadecimal digits>"


@dataclass(frozen=True, slots=True)
class ImageReference:
    """A complete name. `tag` is empty when there is only a digest."""

    registry: str
    repository: str
    tag: str
    digest: str | None = None

    @property
    def name(self) -> str:
        """Without tag and digest: what allow and deny lists speak of."""
        return f"{self.registry}/{self.repository}"

    @property
    def exact(self) -> str:
        """What to ask a registry for: a digest is stronger than a tag."""
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag}"

    def at(self, digest: str) -> ImageReference:
        """The same image, named by a digest."""
        return replace(self, digest=digest)

    def at_tag(self, tag: str) -> ImageReference:
        """The image that has a tag in the same repository."""
        return replace(self, tag=tag, digest=None)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse(text: str, default_registry: str = DOCKER_HUB) -> ImageReference:
    """The reference that `text` names. InvalidInput says which part is wrong."""
    rest, at, digest = text.strip().partition("@")
    if at and not DIGEST.fullmatch(digest):
        raise InvalidInput(f"image '{text}': '{digest}' is no sha256 digest", _HINT)
    head, slash, last = rest.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidInput(f"image '{text}': '{tag}' is no tag", _HINT)
    registry, repository = _split(f"{head}{slash}{last}", default_registry)
    if not _REGISTRY.fullmatch(registry):
        raise InvalidInput(f"image '{text}': '{registry}' is no registry", _HINT)
    if not _REPOSITORY.fullmatch(repository) or len(f"{registry}/{repository}") > _NAME_MAX:
        raise InvalidInput(f"image '{text}': '{repository}' is no repository name (lower case letters, digits and . _ - /)", _HINT)
    return ImageReference(registry, repository, tag or ("" if digest else "latest"), digest or None)


def _split(path: str, default_registry: str) -> tuple[str, str]:
    first, slash, rest = path.partition("/")
    is_registry = bool(slash) and ("." in first or ":" in first or first == "localhost")
    registry, repository = (first, rest) if is_registry else (default_registry, path)
    if registry in _HUB_NAMES:
        return DOCKER_HUB, repository if "/" in repository else f"library/{repository}"
    return registry, repository


def check_allowed(reference: ImageReference, allow: Sequence[str], deny: Sequence[str]) -> None:
    """PermissionDenied unless the lists let the image in. Deny is stronger; an empty allow list means all.

    A pattern is compared with `registry/repository`; `*` stands for any text, and a pattern without `*` also for what is below it.
    """
    if hit := next((pattern for pattern in deny if _matches(pattern, reference.name)), None):
        raise PermissionDenied(f"image '{reference}' is not allowed here: images.deny has '{hit}'", "the node's operator sets images.deny")
    if allow and not any(_matches(pattern, reference.name) for pattern in allow):
        raise PermissionDenied(
            f"image '{reference}' is not allowed here: images.allow does not name it", "the node's operator sets images.allow"
        )


def _matches(pattern: str, name: str) -> bool:
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}/")


def pull_names(reference: ImageReference, mirrors: Sequence[str]) -> list[ImageReference]:
    """Where to look for an image, in order: the mirrors of its registry (`<registry>=<mirror>[/prefix]`), then the registry itself."""
    found = []
    for mirror in mirrors:
        registry, _, place = mirror.partition("=")
        if registry == reference.registry and place:
            host, _, prefix = place.partition("/")
            found.append(replace(reference, registry=host, repository="/".join(filter(None, (prefix, reference.repository)))))
    return [*found, reference]
