"""Network: change the settings of a running sandbox, and say what of them this node does not enforce."""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.errors import Conflict
from agentenv.core.lifecycle import State
from agentenv.core.model import Sandbox
from agentenv.core.network import NetworkSettings, unenforced
from agentenv.orchestrator.delete import alive
from agentenv.orchestrator.parts import Parts, note


async def set_network(parts: Parts, sandbox_id: str, wanted: NetworkSettings, allow_internet_access: bool | None) -> None:
    """Replace what can be replaced of a running sandbox's settings. Conflict when it does not run.

    The record comes first: whatever happens after it, the next start of the server puts the slot under the recorded policy.
    When the slot cannot be changed the record is taken back.
    """
    async with parts.shared.locked(sandbox_id):
        sandbox = alive(parts, sandbox_id)
        if sandbox.state is not State.RUNNING or sandbox.vm is None:
            raise Conflict(f"sandbox {sandbox_id} is {sandbox.state}", "resume it first: its network can be changed while it runs")
        kept = sandbox.network
        network = replace(wanted, mask_request_host=kept.mask_request_host, https_ports=kept.https_ports)
        changed = await parts.store.change(sandbox_id, network=network, allow_internet_access=allow_internet_access)
        try:
            await parts.slots.apply(sandbox.vm.slot, changed.egress)
        except BaseException:
            await parts.store.change(sandbox_id, network=kept, allow_internet_access=sandbox.allow_internet_access)
            await parts.slots.apply(sandbox.vm.slot, sandbox.egress)
            raise
    await note(parts, sandbox_id, "its network settings were replaced")
    await warn_unenforced(parts, changed)


async def warn_unenforced(parts: Parts, sandbox: Sandbox) -> None:
    """Tell, in the sandbox's log, which of its settings protect nobody on this node."""
    for what in unenforced(sandbox.network):
        await note(parts, sandbox.sandbox_id, f"not enforced: {what}", "warn")
