"""`aenv image list`: the images of the node."""

from __future__ import annotations

from typing import Any

from agentenv.cli.output import info, print_json, print_table, size, when
from agentenv.cli.verb import json_option, verb


@verb("list", section="Images", aliases=("ls",))
@json_option
def command(as_json: bool) -> None:
    """List the images, the one used last first.

    SIZE is what the layers of an image take; OWN is the part that nothing else on the node needs, which removing it frees.
    """
    from agentenv.cli.api import Api

    with Api() as api:
        images, layers = api.images(), api.layers()
    own = {image["digest"]: _own_bytes(image, layers) for image in images}
    if as_json:
        print_json([image | {"ownBytes": own[image["digest"]]} for image in images])
    elif images:
        rows = [_row(name, image, own[image["digest"]]) for image in images for name in image["names"]]
        print_table(("NAME", "DIGEST", "LAYERS", "SIZE", "OWN", "USED"), rows)
    else:
        info("no images; `aenv image pull NAME` brings one, and template builds bring what they need")


def _own_bytes(image: dict[str, Any], layers: list[dict[str, Any]]) -> int:
    user = [f"image {image['names'][0]}"]
    return sum(layer["sizeBytes"] for layer in layers if layer["users"] == user)


def _row(name: str, image: dict[str, Any], own_bytes: int) -> tuple[str, ...]:
    digest = image["digest"].removeprefix("sha256:")[:12]
    return name, digest, str(len(image["layers"])), size(image["sizeBytes"]), size(own_bytes), when(image["usedAt"])
