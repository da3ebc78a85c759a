"""Network settings in request bodies (contract section 2.6): their shape, their limits, and what they become.

Here a field nobody knows is refused, unlike elsewhere: who sends it relies on it.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from agentenv.api.bodies import Body
from agentenv.core.errors import InvalidInput
from agentenv.core.network import EVERYWHERE, EgressProxy, HeaderRule, NetworkSettings, ProxyTls, is_address
from agentenv.guest.client import ENVD_PORT

MAX_DESTINATIONS = 1000  # entries of one list; each is an element of a set in the packet filter
MAX_DNS_SERVERS = 16
MAX_HTTPS_PORTS = 100
MAX_RULE_DOMAINS = 100
MAX_RULES_PER_DOMAIN = 10
MAX_HEADERS_PER_RULE = 50
MAX_HEADER_VALUE_CHARS = 8192
MAX_CA_CERT_CHARS = 65_536
MAX_CREDENTIAL_BYTES = 255  # RFC 1929
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_DOMAIN = re.compile(rf"(?=.{{1,253}}\Z)(\*\.)?{_LABEL}(\.{_LABEL})*")
_HOST = re.compile(rf"(?i:(?=.{{1,259}}\Z)({_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\])(:[0-9]{{1,5}})?)")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_PORT_MARK = "${PORT}"


def _check_domain(text: str) -> str:
    """A domain or `*.domain`, in lower case. One that looks like an address is neither."""
    domain = text.lower().removesuffix(".")
    last = domain.rpartition(".")[2]
    if not _DOMAIN.fullmatch(domain) or last.isdigit():
        raise ValueError(f"{text[:80]!r} is not a domain name such as example.com or *.example.com")
    return domain


def _check_allowed(entries: list[str]) -> list[str]:
    return [entry if is_address(entry) else _check_allowed_domain(entry) for entry in entries]


def _check_allowed_domain(entry: str) -> str:
    try:
        return _check_domain(entry)
    except ValueError as error:
        raise ValueError(f"{entry[:80]!r} is not an IP address, a CIDR range or a domain name") from error


def _check_denied(entries: list[str]) -> list[str]:
    for entry in entries:
        if not is_address(entry):
            raise ValueError(f"{entry[:80]!r} is not an IP address or a CIDR range; domains cannot be denied")
    return entries


def _check_dns_server(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError as error:
        raise ValueError(f"{text[:80]!r} is not an IPv4 address") from error


def _check_mask(mask: str) -> str:
    if not _is_host(mask.replace(_PORT_MARK, "49999")):
        raise ValueError(f"{mask[:80]!r} is not a host name with an optional port; ${{PORT}} stands for the port")
    return mask


def _is_host(text: str) -> bool:
    if not _HOST.fullmatch(text):
        return False
    host, port = _split_host(text)
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return False
    return port is None or 1 <= int(port) <= 65535


def _split_host(text: str) -> tuple[str, str | None]:
    match = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([0-9]+))?", text)
    return (match[1], match[2]) if match else (text, None)


def _check_proxy_address(address: str) -> str:
    if not _is_host(address) or _split_host(address)[1] is None:
        raise ValueError(f"{address[:80]!r} is not host:port")
    return address


def _check_credential(text: str) -> str:
    if not 1 <= len(text.encode()) <= MAX_CREDENTIAL_BYTES:
        raise ValueError(f"must be 1 to {MAX_CREDENTIAL_BYTES} bytes long")
    return text


def _check_port(port: int) -> int:
    if port == ENVD_PORT:
        raise ValueError(f"{ENVD_PORT} is the guest agent's port and cannot be listed")
    return port


def _check_header(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a header name")
        if len(value) > MAX_HEADER_VALUE_CHARS or any(character in value for character in "\r\n\0"):
            raise ValueError(f"the value of {name} has a line break or more than {MAX_HEADER_VALUE_CHARS} characters")
    return headers


_Domain = Annotated[str, AfterValidator(_check_domain)]
_Credential = Annotated[str, AfterValidator(_check_credential)]


class ProxyTlsBody(Body, extra="forbid"):
    """`egressProxy.tls`."""

    enabled: bool
    server_name: Annotated[str, AfterValidator(_check_domain)] | None = Field(None, alias="serverName")
    ca_cert: str | None = Field(None, alias="caCert", max_length=MAX_CA_CERT_CHARS)


class EgressProxyBody(Body, extra="forbid"):
    """`egressProxy`."""

    address: Annotated[str, AfterValidator(_check_proxy_address)]
    username: _Credential | None = None
    password: _Credential | None = None
    tls: ProxyTlsBody | None = None


class TransformBody(Body, extra="forbid"):
    """`transform` of a rule."""

    headers: Annotated[dict[str, str], Field(max_length=MAX_HEADERS_PER_RULE), AfterValidator(_check_header)] | None = None


class RuleBody(Body, extra="forbid"):
    """One rule of a domain."""

    transform: TransformBody | None = None


class NetworkUpdateBody(Body, extra="forbid"):
    """`PUT /sandboxes/{id}/network`: all that can be replaced while a sandbox runs. What is left out is cleared."""

    allow_out: Annotated[list[str], Field(max_length=MAX_DESTINATIONS), AfterValidator(_check_allowed)] | None = Field(
        None, alias="allowOut"
    )
    deny_out: Annotated[list[str], Field(max_length=MAX_DESTINATIONS), AfterValidator(_check_denied)] | None = Field(None, alias="denyOut")
    dns_servers: Annotated[list[Annotated[str, AfterValidator(_check_dns_server)]], Field(max_length=MAX_DNS_SERVERS)] | None = Field(
        None, alias="dnsServers"
    )
    egress_proxy: EgressProxyBody | None = Field(None, alias="egressProxy")
    rules: (
        Annotated[dict[_Domain, Annotated[list[RuleBody], Field(max_length=MAX_RULES_PER_DOMAIN)]], Field(max_length=MAX_RULE_DOMAINS)]
        | None
    ) = None
    allow_internet_access: bool | None = None


class NetworkBody(NetworkUpdateBody):
    """`network` of a creation."""

    allow_internet_access: None = None  # it stands beside `network` there
    allow_public_traffic: bool = Field(True, alias="allowPublicTraffic")
    mask_request_host: Annotated[str, AfterValidator(_check_mask)] | None = Field(None, alias="maskRequestHost")
    https_ports: (
        Annotated[list[Annotated[int, Field(ge=1, le=65535), AfterValidator(_check_port)]], Field(max_length=MAX_HTTPS_PORTS)] | None
    ) = Field(None, alias="httpsPorts")


def to_settings(body: NetworkUpdateBody) -> NetworkSettings:
    """The settings a body asks for. InvalidInput for combinations that cannot be meant."""
    domains = [entry for entry in body.allow_out or () if not is_address(entry)]
    if domains and EVERYWHERE not in (body.deny_out or ()):
        raise InvalidInput(  # the contract's own words
            "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other traffic.",
            f"ALL_TRAFFIC is {EVERYWHERE}",
        )
    return NetworkSettings(
        allow_out=_tuple(body.allow_out),
        deny_out=_tuple(body.deny_out),
        dns_servers=_tuple(body.dns_servers),
        egress_proxy=_egress_proxy(body.egress_proxy),
        rules=None if body.rules is None else {domain: tuple(map(_rule, rules)) for domain, rules in body.rules.items()},
        mask_request_host=body.mask_request_host if isinstance(body, NetworkBody) else None,
        https_ports=tuple(body.https_ports) if isinstance(body, NetworkBody) and body.https_ports is not None else None,
    )


def _tuple(entries: list[str] | None) -> tuple[str, ...] | None:
    return None if entries is None else tuple(entries)


def _rule(body: RuleBody) -> HeaderRule:
    return HeaderRule(body.transform.headers if body.transform else None)


def _egress_proxy(body: EgressProxyBody | None) -> EgressProxy | None:
    if body is None:
        return None
    if body.password is not None and body.username is None:
        raise InvalidInput("egressProxy: a password needs a username")
    if body.tls is not None and not body.tls.enabled and (body.tls.server_name or body.tls.ca_cert):
        raise InvalidInput("egressProxy.tls: serverName and caCert need enabled: true")
    tls = None if body.tls is None else ProxyTls(body.tls.enabled, body.tls.server_name, body.tls.ca_cert)
    return EgressProxy(body.address, body.username, body.password, tls)
