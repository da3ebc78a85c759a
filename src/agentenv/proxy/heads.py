"""Request and response heads: parsing, the checks against request smuggling, and rewriting for the next hop.

Invariants:
- A head that parses has one meaning only: one framing, one Host, no control bytes, strict CRLF. Everything doubtful raises `HeadError`.
- What leaves here is written anew from the parsed fields; no byte of a received head is passed on unparsed.
- Hop-by-hop fields (also those that `Connection` lists) never pass; framing fields cannot be removed by listing them.
- A parsed head is not changed any more: `LastHead` may hand it out again.

`httptools` does the parsing; this module adds what it leaves open (single spaces in the request line, exact `chunked`, limits).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from httptools import (
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
    HttpResponseParser,
)

from agentenv.proxy.limits import CONTENT_LENGTH_DIGITS_MAX, HEADER_COUNT_MAX, LAST_HEAD_BYTES_MAX

Field = tuple[bytes, bytes, bytes]
"""Lower-cased name, name as sent, value."""

_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9])\.([0-9])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?\r\n")
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?#@]+)((?:[/?].*)?)", re.DOTALL)
_HOST = re.compile(rb"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_BARE_LF = re.compile(rb"(?<!\r)\n")

_NOTED = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"te", b"e2b-sandbox-id", b"e2b-sandbox-port")
)
_SINGLE = frozenset((b"host", b"content-length", b"transfer-encoding", b"e2b-sandbox-id", b"e2b-sandbox-port"))
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"proxy-authenticate",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    )
)
_REWRITTEN = HOP_BY_HOP | {b"host"}
_FORWARDED = frozenset((b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded"))
_NEVER_LISTED = frozenset((b"host", b"content-length", b"transfer-encoding", b"close", b"keep-alive", b"upgrade", b"te"))
_IDEMPOTENT: Final = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"))

TRAFFIC_TOKEN_HEADER: Final = b"e2b-traffic-access-token"


class HeadError(Exception):
    """A head that must not be passed on. `status` is what a client gets for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(slots=True)
class RequestHead:
    """One parsed request head. `target` is always in origin form (or `*`); `host` is empty only in HTTP/1.0."""

    method: bytes
    target: bytes
    minor_version: int
    fields: list[Field]
    host: bytes = b""
    content_length: int = 0
    chunked: bool = False
    keep_alive: bool = True
    upgrade: bytes = b""
    listed: frozenset[bytes] = frozenset()
    te_trailers: bool = False
    sandbox_id: bytes | None = None
    sandbox_port: bytes | None = None
    rendered: tuple[Forwarding, bytes] | None = field(default=None, compare=False, repr=False)
    """What it last became for the next hop; kept by `upstream_request_head`."""

    @property
    def has_body(self) -> bool:
        """Whether any body byte follows the head."""
        return self.chunked or self.content_length > 0

    @property
    def idempotent(self) -> bool:
        """Whether RFC 9110 allows repeating the request unasked."""
        return self.method in _IDEMPOTENT

    def get(self, name: bytes) -> bytes | None:
        """The value of the first field of that (lower-case) name."""
        for lower, _, value in self.fields:
            if lower == name:
                return value
        return None


@dataclass(slots=True)
class ResponseHead:
    """One parsed response head. `content_length` is None when none was sent."""

    status: int
    minor_version: int
    reason: bytes
    fields: list[Field]
    content_length: int | None = None
    chunked: bool = False
    keep_alive: bool = True
    upgrade: bytes = b""
    listed: frozenset[bytes] = frozenset()
    rendered: tuple[tuple[bytes, bool, bool], bytes] | None = field(default=None, compare=False, repr=False)
    """What it last became for the client; kept by `client_response_head`."""


Head = TypeVar("Head")


class LastHead(Generic[Head]):
    """Parses the heads of one connection, and knows the last one again: who polls sends the same bytes each time, and gets the same."""

    __slots__ = ("_data", "_head", "_parse")

    def __init__(self, parse: Callable[[bytes], Head]) -> None:
        self._parse = parse
        self._data = b""
        self._head: Head | None = None

    def parse(self, data: bytes) -> Head:
        """The head that `data` is. Raises HeadError."""
        if self._head is not None and data == self._data:
            return self._head
        head = self._parse(data)
        if len(data) <= LAST_HEAD_BYTES_MAX:
            self._data, self._head = data, head
        return head


class _Sink:
    """Collects what httptools reports."""

    __slots__ = ("complete", "fields")

    def __init__(self) -> None:
        self.fields: list[Field] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


def _collect(parser_class: type[HttpRequestParser] | type[HttpResponseParser], data: bytes, fault_status: int) -> list[Field]:
    sink = _Sink()
    try:
        parser_class(sink).feed_data(data)
    except HttpParserUpgrade:
        pass  # only says that a tunnel may follow; the caller decides that
    except HttpParserError as error:
        raise HeadError(fault_status, f"Malformed HTTP head: {error}") from None
    if not sink.complete:
        raise HeadError(fault_status, "Malformed HTTP head: it ends too early")
    if len(sink.fields) > HEADER_COUNT_MAX:
        raise HeadError(431 if fault_status == 400 else fault_status, f"More than {HEADER_COUNT_MAX} header fields")
    return sink.fields


def valid_host(value: bytes) -> bool:
    """Whether `value` is a host name or address, with or without a port."""
    return _HOST.fullmatch(value) is not None


def has_bare_line_feed(data: bytes | bytearray, start: int) -> bool:
    """Whether a head in progress already holds a line end that is not CRLF, so that waiting for its end is pointless."""
    return _BARE_LF.search(data, max(0, start - 1)) is not None


def _length(value: bytes, fault_status: int) -> int:
    if not value.isdigit() or len(value) > CONTENT_LENGTH_DIGITS_MAX:
        raise HeadError(fault_status, "Content-Length is not a plain decimal number")
    return int(value)


def _tokens(value: bytes) -> list[bytes]:
    return [token for part in value.split(b",") if (token := part.strip().lower())]


def parse_request(data: bytes) -> RequestHead:
    """Parse a whole request head, its empty line included. Raises HeadError."""
    line = _REQUEST_LINE.match(data)
    if line is None:
        raise HeadError(400, "Malformed request line")
    if line[3] != b"1" or line[4] not in (b"0", b"1"):
        raise HeadError(505, "Only HTTP/1.0 and HTTP/1.1 are spoken here")
    if line[1] == b"CONNECT":
        raise HeadError(405, "CONNECT is not supported")
    minor = 1 if line[4] == b"1" else 0
    fields = _collect(HttpRequestParser, data, 400)
    head = RequestHead(method=line[1], target=line[2], minor_version=minor, fields=fields, keep_alive=minor == 1)
    note_request_fields(head)
    _set_target(head)
    if minor == 1 and not head.host:
        raise HeadError(400, "Host is missing")
    return head


def note_request_fields(head: RequestHead) -> None:
    """Take what the proxy acts on from the fields, and refuse fields that contradict each other. Raises HeadError."""
    seen: set[bytes] = set()
    connection: list[bytes] = []
    upgrade = b""
    for name, _, value in head.fields:
        if name not in _NOTED:
            continue
        if name in _SINGLE:
            if name in seen:
                raise HeadError(400, f"{name.decode()} is sent more than once")
            seen.add(name)
        if name == b"host":
            if _HOST.fullmatch(value) is None:
                raise HeadError(400, "Host is not a valid name")
            head.host = value
        elif name == b"content-length":
            head.content_length = _length(value, 400)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or head.minor_version == 0:
                raise HeadError(400, "The only Transfer-Encoding accepted is chunked, in HTTP/1.1")
            head.chunked = True
        elif name == b"connection":
            connection += _tokens(value)
        elif name == b"upgrade":
            upgrade = upgrade + b", " + value if upgrade else value
        elif name == b"te":
            head.te_trailers = b"trailers" in _tokens(value)
        elif name == b"e2b-sandbox-id":
            head.sandbox_id = value
        else:
            head.sandbox_port = value
    if head.chunked and b"content-length" in seen:
        raise HeadError(400, "Content-Length and Transfer-Encoding exclude each other")
    if connection:
        if b"close" in connection:
            head.keep_alive = False
        elif b"keep-alive" in connection:
            head.keep_alive = True
        if b"upgrade" in connection and head.minor_version == 1:
            head.upgrade = upgrade
        head.listed = frozenset(connection) - _NEVER_LISTED


def _set_target(head: RequestHead) -> None:
    target = head.target
    if b"#" in target:
        raise HeadError(400, "A request target must not hold a fragment")
    if target[0] == 0x2F:
        return
    if target == b"*" and head.method == b"OPTIONS":
        return
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or _HOST.fullmatch(absolute[1]) is None:
        raise HeadError(400, "Malformed request target")
    # RFC 9112 section 3.2.2: the authority of the target wins over Host.
    head.host = absolute[1]
    rest = absolute[2]
    head.target = rest if rest.startswith(b"/") else b"/" + rest


def parse_response(data: bytes) -> ResponseHead:
    """Parse a whole response head, its empty line included. Raises HeadError (status 502)."""
    line = _STATUS_LINE.match(data)
    if line is None:
        raise HeadError(502, "Malformed status line")
    minor = 1 if line[1] == b"1" else 0
    head = ResponseHead(int(line[2]), minor, line[3] or b"", _collect(HttpResponseParser, data, 502), keep_alive=minor == 1)
    for name, _, value in head.fields:
        if name not in _NOTED:
            continue
        if name == b"content-length":
            length = _length(value, 502)
            if head.content_length not in (None, length):
                raise HeadError(502, "Several different Content-Length fields")
            head.content_length = length
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or head.chunked:
                raise HeadError(502, "The only Transfer-Encoding accepted is chunked")
            head.chunked = True
        elif name == b"connection":
            tokens = _tokens(value)
            if b"close" in tokens:
                head.keep_alive = False
            elif b"keep-alive" in tokens:
                head.keep_alive = True
            head.listed = head.listed | (frozenset(tokens) - _NEVER_LISTED)
        elif name == b"upgrade":
            head.upgrade = value
    if head.chunked and head.content_length is not None:
        raise HeadError(502, "Content-Length and Transfer-Encoding exclude each other")
    return head


@dataclass(slots=True)
class Forwarding:
    """What one hop adds to a request. `mask_host` replaces Host; `drop_token` keeps the traffic token from the guest."""

    client_host: bytes
    proto: bytes
    trust_forwarded: bool = False
    mask_host: bytes | None = None
    drop_token: bool = False
    upgrade: bytes = b""


def upstream_request_head(head: RequestHead, forwarding: Forwarding) -> bytes:
    """Write the head for the upstream, always as HTTP/1.1."""
    if head.rendered is not None and head.rendered[0] == forwarding:
        return head.rendered[1]
    trust = forwarding.trust_forwarded
    host = forwarding.mask_host or head.host or b"localhost"
    out = [head.method, b" ", head.target, b" HTTP/1.1\r\nHost: ", host, b"\r\n"]
    listed = head.listed
    forwarded_for, proto = forwarding.client_host, forwarding.proto
    for lower, name, value in head.fields:
        if lower in _REWRITTEN or lower in listed:
            continue
        if lower in _FORWARDED:
            if not trust:
                continue
            if lower == b"x-forwarded-for":
                forwarded_for = value + b", " + forwarded_for if forwarded_for is forwarding.client_host else forwarded_for
                continue
            if lower == b"x-forwarded-proto":
                proto = value
                continue
            if lower == b"x-forwarded-host" and forwarding.mask_host:
                continue
        if forwarding.drop_token and lower == TRAFFIC_TOKEN_HEADER:
            continue
        out += (name, b": ", value, b"\r\n")
    if head.chunked:
        out.append(b"Transfer-Encoding: chunked\r\n")
    if head.te_trailers:
        out.append(b"TE: trailers\r\n")
    if forwarding.upgrade:
        out += (b"Connection: Upgrade\r\nUpgrade: ", forwarding.upgrade, b"\r\n")
    if forwarding.mask_host and head.host:
        out += (b"X-Forwarded-Host: ", head.host, b"\r\n")
    out += (b"X-Forwarded-For: ", forwarded_for, b"\r\nX-Forwarded-Proto: ", proto, b"\r\n\r\n")
    head.rendered = (forwarding, b"".join(out))
    return head.rendered[1]


def client_response_head(head: ResponseHead, connection: bytes, *, chunked: bool, with_length: bool) -> bytes:
    """Write the head for the client. `connection` is the value of the Connection field, or empty for none."""
    how = (connection, chunked, with_length)
    if head.rendered is not None and head.rendered[0] == how:
        return head.rendered[1]
    out = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
    listed = head.listed
    for lower, name, value in head.fields:
        if lower in HOP_BY_HOP or lower in listed:
            continue
        if lower == b"content-length":
            continue
        out += (name, b": ", value, b"\r\n")
    if with_length and head.content_length is not None:
        out.append(b"Content-Length: %d\r\n" % head.content_length)
    if chunked:
        out.append(b"Transfer-Encoding: chunked\r\n")
    if head.status == 101:
        out += (b"Upgrade: ", head.upgrade, b"\r\n")
    if connection:
        out += (b"Connection: ", connection, b"\r\n")
    out.append(b"\r\n")
    head.rendered = (how, b"".join(out))
    return head.rendered[1]
