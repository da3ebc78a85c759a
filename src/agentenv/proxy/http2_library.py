"""How the `h2` library is set up on both sides of the proxy, and the one limit it does not keep by itself."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from agentenv.proxy.limits import HEAD_BYTES_MAX, HTTP2_CONNECTION_WINDOW_BYTES, HTTP2_STREAMS_MAX, HTTP2_WINDOW_BYTES

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DEFAULT_WINDOW_BYTES = 65535  # RFC 9113 section 6.9.2
_FRAME_HEAD_BYTES = 9
_FRAME_BYTES_MAX = 16384  # RFC 9113 section 4.2; we never ask for more


def make_h2(client_side: bool) -> H2Connection:
    """The library's connection with our limits; its first bytes are ready to be sent."""
    h2 = H2Connection(
        H2Configuration(client_side=client_side, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False)
    )
    limits = {
        SettingCodes.INITIAL_WINDOW_SIZE: HTTP2_WINDOW_BYTES,
        SettingCodes.MAX_CONCURRENT_STREAMS: HTTP2_STREAMS_MAX,
        SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
    }
    h2.local_settings = Settings(client=client_side, initial_values=limits | ({SettingCodes.ENABLE_PUSH: 0} if client_side else {}))
    h2.decoder.max_header_list_size = HEAD_BYTES_MAX
    h2.initiate_connection()
    h2.increment_flow_control_window(HTTP2_CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
    return h2


class FrameLengths:
    """Watches the lengths that a peer announces: the library looks at a frame only when all of it has arrived, up to 16 MiB."""

    __slots__ = ("_head", "_skip_bytes")

    def __init__(self, from_client: bool) -> None:
        self._head = b""
        self._skip_bytes = len(PREFACE) if from_client else 0

    def exceed(self, data: bytes) -> bool:
        """Whether `data`, the next bytes from the peer, begins a frame that is too long."""
        pos, end = 0, len(data)
        while pos < end:
            if self._skip_bytes:
                step = min(self._skip_bytes, end - pos)
                self._skip_bytes -= step
            else:
                step = min(_FRAME_HEAD_BYTES - len(self._head), end - pos)
                self._head += data[pos : pos + step]
                if len(self._head) == _FRAME_HEAD_BYTES:
                    self._skip_bytes = int.from_bytes(self._head[:3], "big")
                    self._head = b""
                    if self._skip_bytes > _FRAME_BYTES_MAX:
                        return True
            pos += step
        return False
