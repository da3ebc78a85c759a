"""HTTP/2 field lists: the checks that make a request safe to write as HTTP/1.1, and back.

Invariants: `h2` has refused what RFC 9113 section 8.2 and 8.3 call malformed (pseudo-fields out of order, repeated or unknown, upper case,
connection fields); here goes the rest, so that a request has one meaning behind us, the same as over HTTP/1.1: one authority, one
path, one length, no byte that could end a line. Everything doubtful raises `HeadError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from agentenv.proxy.chunked import FORBIDDEN_TRAILERS, FramingError
from agentenv.proxy.heads import HOP_BY_HOP, Field, HeadError, RequestHead, ResponseHead, note_request_fields, valid_host
from agentenv.proxy.limits import HEADER_COUNT_MAX

Fields = list[tuple[bytes, bytes]]

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PATH = re.compile(rb"/[!-\"$-~]*")
_GRPC = re.compile(rb"application/grpc(?:[+; ].*)?", re.IGNORECASE | re.DOTALL)


def parse_fields(fields: Iterable[tuple[bytes, bytes]], ended: bool) -> RequestHead:
    """The request that a decoded field list asks for; `ended` says that no body follows. Raises HeadError."""
    pseudo: dict[bytes, bytes] = {}
    plain: list[Field] = []
    cookies: list[bytes] = []
    for name, value in fields:
        name, value = bytes(name), bytes(value)
        if name.startswith(b":"):
            pseudo[name] = value
            continue
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise HeadError(400, "A header field holds characters that are not allowed")
        if name == b"cookie":
            cookies.append(value)  # RFC 9113 section 8.2.3: HTTP/1.1 knows one cookie field only
        else:
            plain.append((name, name, value))
    if cookies:
        plain.append((b"cookie", b"cookie", b"; ".join(cookies)))
    if len(plain) > HEADER_COUNT_MAX:
        raise HeadError(431, f"More than {HEADER_COUNT_MAX} header fields")
    return _request(pseudo, plain, ended)


def _request(pseudo: dict[bytes, bytes], plain: list[Field], ended: bool) -> RequestHead:
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if method == b"CONNECT" or b":protocol" in pseudo:
        raise HeadError(405, "CONNECT is not supported")
    if _METHOD.fullmatch(method) is None:
        raise HeadError(400, "The method is not a valid name")
    if pseudo.get(b":scheme", b"") not in (b"http", b"https"):
        raise HeadError(400, "The scheme is neither http nor https")
    if _PATH.fullmatch(path) is None and not (path == b"*" and method == b"OPTIONS"):
        raise HeadError(400, "Malformed path")
    head = RequestHead(method=method, target=path, minor_version=1, fields=plain)
    note_request_fields(head)
    authority = pseudo.get(b":authority")
    if authority is not None:
        if not valid_host(authority):
            raise HeadError(400, "The authority is not a valid name")
        if head.host and head.host.lower() != authority.lower():
            raise HeadError(400, "Host and :authority name different hosts")
        head.host = authority
    if not head.host:
        raise HeadError(400, "The authority is missing")
    if ended and head.content_length:
        raise HeadError(400, "The request ends before its Content-Length")
    head.chunked = not ended and head.get(b"content-length") is None
    return head


def is_grpc(head: RequestHead) -> bool:
    """Whether only an HTTP/2 server can answer: gRPC proper, not gRPC-Web."""
    return _GRPC.fullmatch(head.get(b"content-type") or b"") is not None


def upstream_fields(head: RequestHead, forwarded: bytes, host: bytes) -> Fields:
    """The field list for an HTTP/2 server, from the bytes of the HTTP/1.1 head that any other server would get."""
    fields: Fields = [(b":method", head.method), (b":scheme", b"http"), (b":authority", host), (b":path", head.target)]
    for line in forwarded.split(b"\r\n")[1:]:
        name, _, value = line.partition(b": ")
        lower = name.lower()
        if lower and lower not in HOP_BY_HOP and lower != b"host":
            fields.append((lower, value))
    if head.te_trailers:
        fields.append((b"te", b"trailers"))
    return fields


def response_fields(head: ResponseHead, with_length: bool) -> Fields:
    """A response of an HTTP/1.1 server as a field list."""
    fields: Fields = [(b":status", b"%d" % head.status)]
    for lower, _, value in head.fields:
        if lower in HOP_BY_HOP or lower in head.listed or lower == b"content-length":
            continue
        fields.append((lower, value.strip()))
    if with_length and head.content_length is not None and head.status != 304:  # clients made of `h2` count the body of a 304 as well
        fields.append((b"content-length", b"%d" % head.content_length))
    return fields


def trailer_lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Trailers as the end of a chunked body. Raises FramingError."""
    lines = b""
    for name, value in fields:
        if _NAME.fullmatch(bytes(name)) is None or _VALUE.fullmatch(bytes(value)) is None or name in FORBIDDEN_TRAILERS:
            raise FramingError("a trailer field is not allowed")
        lines += name + b": " + value + b"\r\n"
    return b"0\r\n" + lines + b"\r\n"
