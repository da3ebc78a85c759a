"""Amazon's registries: keys of an account become a password for its registry, which Amazon gives out for 12 hours.

Needs the extra `aws` (botocore), which signs the call as Amazon wants it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from agentenv.core.errors import AgentEnvError, HostNotReady, InvalidInput, PermissionDenied, Unavailable
from agentenv.image.credentials import Credentials

_PUBLIC = "public.ecr.aws"
_PUBLIC_REGION = "us-east-1"  # the only one where Amazon gives out logins for its public registry
_CONNECT_DEADLINE_S, _READ_DEADLINE_S, _ATTEMPTS = 5, 15, 3
_NO_PROFILE = {"profile": (None, None, None, None)}
"""So that a profile of the node's own environment is not looked for."""
_REGION_HINT = "name one like eu-central-1"
_HINT = "check awsAccessKeyId, awsSecretAccessKey and awsRegion; the account needs ecr:GetAuthorizationToken"


def login(registry: str, settings: Mapping[str, str]) -> Credentials:
    """A user and password for `registry`, from the settings of an `aws` account. Blocks for a call to Amazon.

    HostNotReady: the node lacks the extra. InvalidInput: no such region. PermissionDenied: Amazon refuses the keys. Unavailable: no answer.
    """
    try:
        import botocore.config
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        raise HostNotReady(
            "this node has nothing to sign calls to AWS with",
            "install it on the node: pip install 'agentenv[aws]'; or give registry credentials: "
            "user name AWS, password from `aws ecr get-login-password`",
        ) from error
    public = registry == _PUBLIC
    if not settings["awsRegion"]:
        raise InvalidInput("awsRegion is empty", _REGION_HINT)
    deadlines = botocore.config.Config(
        connect_timeout=_CONNECT_DEADLINE_S, read_timeout=_READ_DEADLINE_S, retries={"mode": "standard", "total_max_attempts": _ATTEMPTS}
    )
    try:
        client = botocore.session.Session(_NO_PROFILE).create_client(
            "ecr-public" if public else "ecr",
            region_name=_PUBLIC_REGION if public else settings["awsRegion"],
            aws_access_key_id=settings["awsAccessKeyId"],
            aws_secret_access_key=settings["awsSecretAccessKey"],
            config=deadlines,
        )
        answer = client.get_authorization_token()
    except botocore.exceptions.ClientError as error:
        raise _refusal(registry, error.response) from error
    except (botocore.exceptions.InvalidRegionError, ValueError) as error:
        raise InvalidInput(f"awsRegion: {error}", _REGION_HINT) from error
    except botocore.exceptions.BotoCoreError as error:
        raise Unavailable(f"Amazon gave no login for {registry}: {error}", "try again; see that the node reaches AWS") from error
    return _credentials(registry, answer)


def _refusal(registry: str, response: Mapping[str, Any]) -> AgentEnvError:
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    told = response.get("Error", {})
    message = f"Amazon gave no login for {registry}: {told.get('Code', status)}: {told.get('Message', '')}"[:500]
    if status >= 500 or status == 429 or "Throttl" in str(told.get("Code")):
        return Unavailable(message, "try again later")
    return PermissionDenied(message, _HINT)


def _credentials(registry: str, answer: Mapping[str, Any]) -> Credentials:
    data = answer.get("authorizationData")
    first = data[0] if isinstance(data, list) and data else data
    token = first.get("authorizationToken", "") if isinstance(first, Mapping) else ""
    try:
        username, _, password = base64.b64decode(token, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        username = password = ""
    if not username or not password:
        raise Unavailable(f"Amazon's answer has no login for {registry}", "try again")
    return Credentials(username, password)
