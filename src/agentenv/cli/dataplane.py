"""Reaching into a sandbox through the official E2B SDK, and its errors in our words.

Invariants: a paused sandbox is never woken by accident; connecting never shortens a sandbox's life, and lengthens it
only when under `MIN_LIFE_S` are left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentenv.cli.api import Api, is_loopback
from agentenv.cli.exits import CliError, Exit

if TYPE_CHECKING:
    from e2b import Sandbox

MARGIN_S = 1
"""Connecting asks for what is left less this, as the request takes time on its way."""
MIN_LIFE_S = 15
"""What connecting asks for at least, so that a sandbox about to end can still answer."""


def open_sandbox(api: Api, given_id: str) -> Sandbox:
    """The running sandbox `given_id` names (in full, or by a unique beginning)."""
    sandbox_id = api.full_id(given_id)
    detail = api.sandbox(sandbox_id)
    if detail["state"] == "paused":
        raise CliError(f"sandbox {sandbox_id} is paused", f"`aenv resume {sandbox_id}` continues it")
    _bypass_proxy(api.target.sandbox_url or api.target.api_url)
    from e2b import Sandbox

    left_s = (datetime.fromisoformat(detail["endAt"]) - datetime.now(UTC)).total_seconds()
    with sdk_errors(sandbox_id):
        return Sandbox.connect(sandbox_id, timeout=max(MIN_LIFE_S, int(left_s) - MARGIN_S), **sdk_options(api))


def sdk_options(api: Api) -> Any:
    """Every option that the SDK would otherwise take from the environment."""
    target = api.target
    return {
        "api_key": target.api_key,
        "api_url": target.api_url,
        "sandbox_url": target.sandbox_url,
        "domain": target.domain or None,
        "debug": False,
    }


def _bypass_proxy(url: str) -> None:
    """The SDK's transport obeys HTTP_PROXY, and a proxy cannot reach our loopback."""
    host = urlsplit(url).hostname or ""
    if is_loopback(url):
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name, ""), host)))


@contextlib.contextmanager
def sdk_errors(sandbox_id: str) -> Iterator[None]:
    """Turn the SDK's exceptions into `CliError`."""
    import e2b.exceptions as sdk
    import httpx

    try:
        yield
    except (sdk.SandboxNotFoundException, sdk.SandboxNotRunningException) as error:
        raise CliError(f"sandbox {sandbox_id} is gone or paused", "`aenv ls --all` shows what there is", Exit.NOT_FOUND) from error
    except sdk.AuthenticationException as error:
        raise CliError(f"the sandbox refused: {error}", "is the user name right, and the API key this node's?") from error
    except sdk.SandboxUnreachableException as error:
        raise CliError(
            f"sandbox {sandbox_id} does not answer: {first_sentence(error)}", f"`aenv logs {sandbox_id}` may say why", Exit.UNREACHABLE
        ) from error
    except sdk.TimeoutException as error:
        raise CliError(f"no answer in time: {first_sentence(error)}", "`aenv doctor` looks at the node", Exit.UNREACHABLE) from error
    except sdk.InvalidArgumentException as error:
        raise CliError(str(error), code=Exit.USAGE) from error
    except sdk.SandboxException as error:
        raise CliError(str(error), f"`aenv logs {sandbox_id}` may say more") from error
    except (OSError, httpx.TransportError) as error:
        raise _lost(sandbox_id, error) from error
    except Exception as error:
        if not _is_transport_error(error):
            raise
        raise _lost(sandbox_id, error) from error


def _is_transport_error(error: Exception) -> bool:
    """Some failures of a stream leave the SDK as they are: those of its transport, and a bare `Exception` at an early end."""
    return type(error) is Exception or type(error).__module__.split(".")[0] in ("connectrpc", "pyqwest")


def _lost(sandbox_id: str, error: Exception) -> CliError:
    return CliError(
        f"lost the connection to sandbox {sandbox_id}: {error}",
        "`aenv ls --all` shows whether it lives, `aenv doctor` whether the node does",
        Exit.UNREACHABLE,
    )


def first_sentence(error: BaseException) -> str:
    """The cause in an SDK message, without the advice about SDK options that follows it."""
    return str(error).split(": This error", 1)[0].split(": The sandbox", 1)[0]
