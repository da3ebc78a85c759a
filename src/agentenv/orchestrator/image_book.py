"""The record of a node's images: finding one, naming it, forgetting it.

Invariants: a name belongs to the record that got it last, and a record that loses its last name goes.
"""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.errors import InvalidInput, NotFound
from agentenv.core.images import Image
from agentenv.image import native, reference
from agentenv.orchestrator.parts import Parts
from agentenv.orchestrator.sweep import sweep_soon

_SHORT_DIGEST_MIN = 6
_NAMES_LOCK = "image names"


class ImageBook:
    """All methods belong to one event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def all(self) -> list[Image]:
        """Every recorded image, the one used last first."""
        return sorted(self._parts.store.images.all(), key=lambda image: (image.used_at_ms, image.digest), reverse=True)

    def find(self, text: str) -> Image:
        """By name, by digest, or by the beginning of a digest. NotFound, InvalidInput (it could be several)."""
        wanted = text.strip()
        images = self._parts.store.images.all()
        digits = wanted.removeprefix("sha256:")
        if len(digits) >= _SHORT_DIGEST_MIN and not set(digits) - set("0123456789abcdef"):
            found = [image for image in images if image.digest.removeprefix("sha256:").startswith(digits)]
            if len(found) > 1:
                raise InvalidInput(f"the digests of {len(found)} images begin with '{digits}'", "give more of it")
            if found:
                return found[0]
        named = self.named(str(reference.parse(wanted, self._parts.config.images.default_registry)))
        if named is None:
            raise NotFound(
                f"image '{wanted[:200]}' is not on this node", "`aenv images` lists those there are; `aenv image pull` gets others"
            )
        return named

    async def remove(self, text: str) -> Image:
        """Forget a name and, with its last one, the image. Its bytes go with the next sweep unless something else reaches them."""
        async with self._parts.shared.locked(_NAMES_LOCK):
            image = self.find(text)
            name = next((name for name in image.names if name == _canonical(text, self._parts.config.images.default_registry)), None)
            left = tuple(other for other in image.names if other != name) if name else ()
            await self._name(image, left)
        sweep_soon(self._parts)
        return replace(image, names=left)

    async def record(self, image: Image, name: str) -> Image:
        """Record the image as called `name`, which it takes from whatever had it, and as used now."""
        async with self._parts.shared.locked(_NAMES_LOCK):
            former = self._parts.store.images.get(image.digest)
            names = () if former is None else former.names
            recorded = replace(image, names=tuple(dict.fromkeys((name, *names))), used_at_ms=self._parts.clock.now_ms())
            await self._parts.store.images.put(recorded)
            for other in self._parts.store.images.all():
                if other.digest != image.digest and name in other.names:
                    await self._name(other, tuple(theirs for theirs in other.names if theirs != name))
                    sweep_soon(self._parts)
            return recorded

    async def _name(self, image: Image, names: tuple[str, ...]) -> None:
        if names:
            await self._parts.store.images.put(replace(image, names=names))
        else:
            await self._parts.store.images.remove(image.digest)

    def is_current(self, image: Image) -> bool:
        """Whether it was converted as this node converts now, and its files are there."""
        is_so = all(map(native.is_native, image.layer_ids)) or list(image.layer_ids) == self._parts.image_converter.planned(
            image.config.diff_ids
        )
        return is_so and all(self._parts.layers.path(layer_id).exists() for layer_id in image.layer_ids)

    def named(self, name: str) -> Image | None:
        """The image of that full name, or None."""
        found = (image for image in self._parts.store.images.all() if name in image.names)
        return max(found, key=lambda image: image.used_at_ms, default=None)  # two have it when a crash came between their records

    def parse(self, text: str) -> reference.ImageReference:
        """A name in full, if images of it may be used. InvalidInput, PermissionDenied."""
        wanted = reference.parse(text, self._parts.config.images.default_registry)
        reference.check_allowed(wanted, self._parts.config.images.allow, self._parts.config.images.deny)
        return wanted


def _canonical(text: str, default_registry: str) -> str:
    try:
        return str(reference.parse(text, default_registry))
    except InvalidInput:
        return ""  # a digest
