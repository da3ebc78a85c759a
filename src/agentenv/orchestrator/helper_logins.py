"""Keep the logins of credential helpers fresh for layers that are read from registries as needed."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

from agentenv.image import native
from agentenv.image.credentials import registry_name
from agentenv.orchestrator.parts import Parts

_log = logging.getLogger(__name__)
_INTERVAL_MS = 5 * 60_000  # the shortest-lived passwords that registries give last half an hour


async def run(parts: Parts) -> None:
    """Ask the helpers now and again until cancelled."""
    while True:
        try:
            await asyncio.to_thread(_refresh, parts)
        except Exception:  # noqa: BLE001 - whatever it is, the next turn must come
            _log.exception("asking credential helpers failed, will be tried again")
        await parts.clock.sleep_ms(_INTERVAL_MS)


def _refresh(parts: Parts) -> None:
    registries = set[str]()
    for layer_id in parts.layers.sizes():
        if native.is_native(layer_id) and (place := native.place_of(parts.layers.path(layer_id))) is not None:
            registries.add(registry_name(urlsplit(place).netloc))
    if registries:
        parts.native_images.helpers.refresh(registries)
