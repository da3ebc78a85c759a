"""Every limit and deadline of the proxy, by name, with its reason, and the settings that may change them.

Invariant: no other module of this package holds a number that bounds memory, time or count.
Units are in the names. Constants are fixed; what an operator may want to change is a field of `ProxySettings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024

HEAD_BYTES_MAX: Final = 64 * KIB
"""One request or response head. Larger than any real cookie jar, small enough to hold for every connection."""
LAST_HEAD_BYTES_MAX: Final = 2 * KIB
"""A head that is remembered on its connection in case it comes again; longer ones are parsed anew."""
HEADER_COUNT_MAX: Final = 200
"""Header lines in one head: bounds the work per head whatever its size."""
CHUNK_LINE_BYTES_MAX: Final = 256
"""One chunk-size line with its extensions, which are pure overhead and have no known use."""
TRAILER_BYTES_MAX: Final = 8 * KIB
"""All trailer lines of one message."""
CONTENT_LENGTH_DIGITS_MAX: Final = 18
"""Below 10**18: fits a signed 64-bit number in every server behind us."""

PENDING_BYTES_MAX: Final = 64 * KIB
"""Bytes a client may send ahead (early body, pipelined requests) before reading from it stops."""
WRITE_HIGH_BYTES: Final = 256 * KIB
"""A peer with this much unsent data pauses the other side: about one receive call's worth."""
WRITE_LOW_BYTES: Final = 64 * KIB
"""The paused side goes on when this little is left: keeps the pipe from running dry."""
LISTEN_BACKLOG: Final = 4096
"""Bursts of thousands of sandboxes connect at once; the kernel clips this to its own limit."""

DIAL_DELAYS_MS: Final = (100, 200, 300, 400)
"""Pauses between the dials of a refused port, so five dials in one second (contract section 1.6)."""
API_DIAL_DELAYS_MS: Final = (10, 40)
"""A full accept queue of the API socket clears in milliseconds; a missing server should be told at once."""
LAST_GASP_BYTES_MAX: Final = 64 * KIB
"""What is read from an upstream that died while we wrote to it: room for one early answer."""

HTTP2_STREAMS_MAX: Final = 100
"""Streams of one HTTP/2 connection at a time: what RFC 9113 section 6.5.2 recommends as the least."""
HTTP2_WINDOW_BYTES: Final = 256 * KIB
"""What a peer may send on a stream before we have passed it on."""
HTTP2_CONNECTION_WINDOW_BYTES: Final = 1024 * KIB
"""The same for a whole connection; given back as it arrives, because every stream is held by its own window."""
HTTP2_STREAM_BUFFER_BYTES: Final = 64 * KIB
"""What waits on one stream for the peer's window before the other side is paused."""
HTTP2_CONTROL_BYTES_MAX: Final = 2048 * KIB
"""Unsent bytes on a connection, far above what data may make up: beyond it a peer floods us and reads no answers."""
HTTP2_RESETS_MAX: Final = 200
"""Streams that may be reset within `HTTP2_RESETS_WINDOW_S` on one connection: opening and resetting costs a peer nothing, us a dial."""
HTTP2_RESETS_WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """What an operator may change. Seconds unless the name says otherwise.

    `domains` are the names whose first label may be `<port>-<sandboxId>` (a port part is ignored).
    `trust_forwarded` keeps the `X-Forwarded-*` headers of the caller: only behind another proxy of your own.
    """

    domains: tuple[str, ...] = ()
    trust_forwarded: bool = False
    head_timeout_s: float = 60.0
    """From the first byte of a request head to its end; stops slow-loris clients."""
    handshake_timeout_s: float = 15.0
    """A TLS handshake, from the accept to its end."""
    keepalive_idle_s: float = 620.0
    """A client connection between requests; official clients keep theirs 300 s, load balancers up to 600 s."""
    leaving_idle_s: float = 30.0
    """The same in a server that has made way for another, which takes the next request anyway."""
    stream_idle_s: float = 3600.0
    """An exchange or tunnel with no byte moved in either direction; must stay >= 600 s (contract section 1.6)."""
    half_closed_idle_s: float = 60.0
    """The same after the client has shut its sending side, when its death can no longer be seen by reading."""
    resolve_timeout_s: float = 120.0
    """Finding the route, which may include resuming the sandbox."""
    dial_timeout_s: float = 30.0
    """One connect to an upstream. A closed port refuses at once; silence is a guest without CPU on a busy host, or a firewall in it."""
    linger_s: float = 2.0
    """After our last answer: silence of a client that has not closed yet. What it sends meanwhile is dropped."""
    linger_total_s: float = 30.0
    """The same for a client that goes on sending, so that a big upload can end and its early answer be read."""
    pool_idle_s: float = 4.0
    """An idle upstream connection; below the five seconds after which common servers close theirs."""
    pool_idle_per_upstream: int = 64
    """Idle connections kept for one sandbox port: as many as a busy client talks over at once, since each dial costs several requests."""
    pool_idle_api: int = 128
    """Idle connections kept for the API."""
    pool_idle_total: int = 2048
    """Idle connections kept in all: each is a file descriptor."""
    connections_per_sandbox: int = 2000
    """Upstream connections of one sandbox; beyond it requests get 429."""
    client_connections: int = 20000
    """Client connections in all; beyond it new ones get 503 and are closed."""
    sweep_interval_s: float = 0.5
    """How often deadlines and half-dead clients are looked for: the precision of the times above."""
