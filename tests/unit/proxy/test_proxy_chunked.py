"""The chunk scanner against a plain decoder, at every split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_rig import chunks, dechunk

from agentenv.proxy.chunked import ChunkScanner, FramingError, LengthBody

GOOD = b"5;x=y\r\nhello\r\n12C\r\n" + b"x" * 300 + b"\r\n000\r\nX-A: 1\r\nX-B: two words\r\n\r\n"


def scan(parts):
    """Feed the parts; returns (consumed bytes, payload, scanner)."""
    scanner, payload, consumed = ChunkScanner(), [], 0
    for part in parts:
        count = scanner.take(part, payload)
        consumed += count
        if count < len(part):
            break
    return consumed, b"".join(payload), scanner


@pytest.mark.parametrize("split", range(len(GOOD) + 1))
def test_every_split_in_two(split):
    consumed, payload, scanner = scan([GOOD[:split], GOOD[split:] + b"NEXT"])
    assert (consumed, payload, scanner.done) == (len(GOOD), b"hello" + b"x" * 300, True)


def test_byte_by_byte():
    consumed, payload, scanner = scan([GOOD[pos : pos + 1] for pos in range(len(GOOD))])
    assert (consumed, payload, scanner.done) == (len(GOOD), b"hello" + b"x" * 300, True)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.lists(st.integers(1, 40), max_size=30), st.binary(max_size=10))
def test_random_bodies_and_splits(parts, steps, extra):
    body = chunks(*parts)
    pieces, pos = [], 0
    for step in steps:
        pieces.append(body[pos : pos + step])
        pos = min(len(body), pos + step)
    pieces.append(body[pos:] + extra)
    consumed, payload, scanner = scan(pieces)
    assert scanner.done
    assert consumed == len(body)
    assert payload == dechunk(body) == b"".join(parts)


@pytest.mark.parametrize(
    "body",
    [
        b"5 \r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5_0\r\nhello\r\n0\r\n\r\n",
        b"\r\n",
        b";x\r\n",
        b"g\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5;\x00\r\nhello\r\n0\r\n\r\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"1" * 16 + b"\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello\rX0\r\n\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\nX: y\n\r\n",
        b"0\r\n folded\r\n\r\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0\r\nhost: x\r\n\r\n",
        b"0\r\n\n",
        b"5;" + b"x" * 300 + b"\r\n",
        b"0\r\n" + b"X: y\r\n" * 2000 + b"\r\n",
        b"0\r\nX: " + b"y" * 9000,
    ],
)
def test_bad_chunks(body):
    for step in (len(body), 1, 3):
        with pytest.raises(FramingError):
            scan([body[pos : pos + step] for pos in range(0, len(body), step)])


@pytest.mark.parametrize("start", [b"5 ", b"x", b"-", b"5\r\nhelloX", b"0x", b"1" * 16])
def test_hopeless_starts_are_refused_without_waiting(start):
    with pytest.raises(FramingError):
        ChunkScanner().take(start)


def test_length_body():
    body = LengthBody(5)
    assert body.take(b"123") == 3
    assert not body.done
    assert body.take(b"45NEXT") == 2
    assert body.done
