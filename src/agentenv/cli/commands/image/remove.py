"""`aenv image remove`: forget images."""

from __future__ import annotations

import click

from agentenv.cli.many import each
from agentenv.cli.verb import verb


@verb("remove", section="Images", aliases=("rm",))
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
def command(images: tuple[str, ...]) -> None:
    """Forget images, by name or by digest.

    An image goes with its last name, and by its digest with all of them. Templates that were built from it, and their
    sandboxes, keep what they need; the rest of its bytes is freed a moment later.
    """
    from agentenv.cli.api import Api

    with Api() as api:

        def remove(image: str) -> str:
            api.remove_image(image)
            return image

        each(images, remove, "removing")
