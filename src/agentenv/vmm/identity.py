"""Whether a snapshot made elsewhere, or by another version, can run here."""

from __future__ import annotations

from agentenv.core.errors import SnapshotOfAnotherHost
from agentenv.core.model import VmIdentity
from agentenv.host.tsc import same_tsc_rate

#: Kernel and initramfs are part of the memory image once booted; they are recorded to tell where a snapshot comes from.
_MUST_BE_EQUAL = ("driver", "accelerator", "cpu_model", "vmm_version")


def differences(made: VmIdentity, here: VmIdentity) -> list[str]:
    """What keeps a snapshot `made` elsewhere from running `here`, a phrase each."""
    names = [name for name in _MUST_BE_EQUAL if getattr(made, name) != getattr(here, name)]
    if made.machine_type and made.machine_type != here.machine_type:  # older records do not say
        names.append("machine_type")
    if not same_tsc_rate(made.tsc_khz, here.tsc_khz):
        names.append("tsc_khz")
    return [f"{name} {getattr(made, name)!r} (here {getattr(here, name)!r})" for name in names]


def refuse_mismatch(made: VmIdentity, here: VmIdentity) -> None:
    """SnapshotOfAnotherHost, naming each difference, when a snapshot `made` elsewhere cannot run `here`."""
    if found := differences(made, here):
        raise SnapshotOfAnotherHost(
            "the snapshot's memory needs another host: " + ", ".join(found),
            "start it on a node that matches, or from its disk alone (resume or connect with memory false); templates can be built again",
        )
