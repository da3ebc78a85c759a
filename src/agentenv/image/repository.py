"""What skopeo does not ask a registry: where a repository is, and which images refer to another one (OCI distribution-spec 1.1).

A registry is asked as a container tool would: first without a secret, then with the token or password that it wants to see.
"""

from __future__ import annotations

import base64
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agentenv.config.schema import ImagesConfig
from agentenv.core.errors import AgentEnvError, PermissionDenied, Unavailable
from agentenv.image.credentials import Credentials
from agentenv.image.docker_config import DockerConfig
from agentenv.image.manifest import MANIFEST_BYTES_MAX
from agentenv.image.reference import DOCKER_HUB, ImageReference

_HUB_HOST = "registry-1.docker.io"
_DEADLINE_S = 15.0
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of a registry. `url` has no slash at its end."""

    url: str
    host: str
    check_certificate: bool
    certificates: Path = field(repr=False)

    def referrers(self, digest: str, artifact_type: str, login: Credentials | None) -> bytes | None:
        """The index of what refers to a manifest; None when the registry does not know of such things. Unavailable, PermissionDenied."""
        try:
            with httpx.Client(verify=self._trust(), timeout=_DEADLINE_S, follow_redirects=False) as client:
                address = f"{self.url}/referrers/{digest}"
                reply = client.get(address, params={"artifactType": artifact_type})
                if reply.status_code == httpx.codes.UNAUTHORIZED:
                    proof = self._proof(client, reply, login)
                    reply = client.get(address, params={"artifactType": artifact_type}, headers={"authorization": proof})
        except httpx.HTTPError as error:
            raise Unavailable(f"the registry {self.host} does not answer: {error or type(error).__name__}", "try again") from error
        if reply.status_code == httpx.codes.OK:
            return reply.content[: MANIFEST_BYTES_MAX + 1]
        if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise PermissionDenied(
                f"the registry {self.host} refuses to list what refers to {digest}", "give credentials for this registry"
            )
        if reply.status_code >= 500 or reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise Unavailable(f"the registry {self.host} answers with status {reply.status_code}", "try again")
        return None

    def _proof(self, client: httpx.Client, refusal: httpx.Response, login: Credentials | None) -> str:
        """The header that the registry asked for: a token of the server it names, or the password itself."""
        scheme, _, rest = refusal.headers.get("www-authenticate", "").partition(" ")
        basic = None if login is None else _basic(login)
        if scheme.lower() == "bearer":
            facts = dict(_PARAMETER.findall(rest))
            realm = facts.pop("realm", "")
            if self.url.startswith("https:") and not realm.startswith("https:"):
                raise PermissionDenied(f"the registry {self.host} names a token server without TLS")
            wanted = {name: facts[name] for name in ("service", "scope") if name in facts}
            reply = client.get(realm, params=wanted, headers={"authorization": basic} if basic else {})
            found = _token(reply)
            if found:
                return f"Bearer {found}"
        elif scheme.lower() == "basic" and basic:
            return basic
        raise PermissionDenied(f"the registry {self.host} wants to know who asks", "give credentials, or `docker login` as the node's user")

    def _trust(self) -> ssl.SSLContext | bool:
        if not self.check_certificate:
            return False
        extra = sorted(self.certificates.glob("*.crt"))
        if not extra:
            return True
        context = ssl.create_default_context()
        for file in extra:
            context.load_verify_locations(file)
        return context


def repository_of(place: ImageReference, config: ImagesConfig) -> Repository:
    """Where a repository is. Registries named insecure may have no TLS at all, which is found out by asking. Unavailable."""
    host = _HUB_HOST if place.registry == DOCKER_HUB else place.registry
    check = host not in config.insecure_registries
    scheme = "https" if check or _speaks_tls(host) else "http"
    return Repository(f"{scheme}://{host}/v2/{place.repository}", host, check, config.certs_dir / place.registry)


def known_login(place: ImageReference, config: ImagesConfig) -> Credentials | None:
    """What `docker login` has left for a repository, in docker's config itself or in a credential helper. Blocks."""
    try:
        return DockerConfig(config.docker_config_file).login(place.registry)
    except AgentEnvError:
        return None  # none that can be had: the registry says what it thinks of that


def _basic(login: Credentials) -> str:
    return f"Basic {base64.b64encode(f'{login.username}:{login.password}'.encode()).decode()}"


def _token(reply: httpx.Response) -> str:
    try:
        body: Any = reply.json()
        return str(body.get("token") or body.get("access_token") or "")
    except (ValueError, AttributeError):
        return ""


def _speaks_tls(host: str) -> bool:
    try:
        httpx.get(f"https://{host}/v2/", verify=False, timeout=_DEADLINE_S)
    except httpx.TimeoutException as error:
        raise Unavailable(f"the registry {host} does not answer", "see that it can be reached") from error
    except httpx.TransportError:
        return False
    return True
