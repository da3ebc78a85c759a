"""What a registry is asked with, for each kind of account that a caller may give."""

from __future__ import annotations

import asyncio

from agentenv.core.builds import Registry
from agentenv.image import ecr
from agentenv.image.credentials import Credentials


async def login(account: Registry | None, registry: str) -> Credentials | None:
    """A login for `registry`, by its name in references. With AWS it takes a call to Amazon, and fails as `ecr.login` does."""
    if account is None:
        return None
    match account.kind:
        case "registry":
            return Credentials(account.settings["username"], account.settings["password"])
        case "gcp":
            return Credentials("_json_key", account.settings["serviceAccountJson"])
        case "aws":
            return await asyncio.to_thread(ecr.login, registry, account.settings)
