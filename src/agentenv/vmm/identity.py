"""Whether a snapshot made elsewhere, or by another version, can run here."""

from __future__ import annotations

from dataclasses import fields

from agentenv.core.errors import HostNotReady
from agentenv.core.model import VmIdentity

#: Kernel and initramfs are part of the memory image once booted; they are recorded to tell where a snapshot comes from.
_MUST_MATCH = tuple(f.name for f in fields(VmIdentity) if f.name not in ("kernel_sha256", "initramfs_sha256"))


def refuse_mismatch(made: VmIdentity, here: VmIdentity) -> None:
    """HostNotReady, naming each difference, when a snapshot `made` elsewhere cannot run `here`."""
    differing = [
        f"{name} {getattr(made, name)!r} (here {getattr(here, name)!r})"
        for name in _MUST_MATCH
        if getattr(made, name) != getattr(here, name)
    ]
    if differing:
        raise HostNotReady(
            "the snapshot needs another host: " + ", ".join(differing),
            "resume it on a node that matches, or create a new sandbox from the template",
        )
