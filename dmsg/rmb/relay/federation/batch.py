"""Several messages in one POST between relays that both know how, and what is answered of each.  No I/O.

The reference knows one message a POST: that remains, and is where a relay says
that it takes more at once, by the header ``X-Rmb-Batch: 1`` of its answer.  The
request then is a POST to ``/batch``, of at most ``MAX_BATCH`` messages one behind the
other, each as ``flags(1) || length(4, big endian) || envelope``.  Bit 0 of the flags
is what ``X-Rmb-Only-Connected`` is to a single message; the others are zero.

The answer is 200 at once, and then, as each becomes known and in that order, lines
``NUMBER STATUS`` in ASCII: which message, from 0, and the status that a POST of it
alone would have had.  So no message waits for another whose receiver is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from dmsg.rmb.errors import EnvelopeError

PATH = "batch"
"""Below the URL of a relay."""
OFFER = b"x-rmb-batch"
"""The header of an answer whose relay takes batches."""
CONTENT_TYPE = "application/x-rmb-batch"
MAX_BATCH = 32
"""Messages: what verifying them takes, three milliseconds, others have to wait for."""
MAX_BATCH_SIZE = 1024 * 1024
"""Bytes of their envelopes; what is longer goes alone."""
LONGEST_LINE = 16
"""Bytes of a line of an answer that is read."""

_HEAD = Struct(">BI")
_ONLY_CONNECTED = 1


def encode(messages: Iterable[tuple[bytes, bool]]) -> bytes:
    """The body of a request.

    :param messages: envelopes, and whether each is refused unless its session is connected.
    """
    return b"".join(
        part for data, only_connected in messages for part in (_HEAD.pack(bool(only_connected), len(data)), data)
    )


def decode(body: bytes) -> list[tuple[bytes, bool]]:
    """:raises EnvelopeError: it is not whole, too much, or of a later kind."""
    found: list[tuple[bytes, bool]] = []
    at = 0
    while at < len(body):
        if len(found) >= MAX_BATCH:
            raise EnvelopeError(f"more than {MAX_BATCH} messages")
        if len(body) - at < _HEAD.size:
            raise EnvelopeError("batch is not whole")
        flags, size = _HEAD.unpack_from(body, at)
        at += _HEAD.size
        if flags & ~_ONLY_CONNECTED:
            raise EnvelopeError("unknown flags")
        if size > len(body) - at:
            raise EnvelopeError("batch is not whole")
        found.append((body[at : at + size], bool(flags)))
        at += size
    if not found:
        raise EnvelopeError("batch is empty")
    return found


def line(number: int, status: int) -> bytes:
    """What is answered of one message."""
    return b"%d %d\n" % (number, status)


class Lines:
    """The answer, as it comes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Number and status of each message that is known now.

        :raises ValueError: it is no such answer.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(len(self._rest), *map(len, lines), 0) > LONGEST_LINE:
            raise ValueError("line is too long")
        for one in lines:
            number, _, status = one.partition(b" ")
            if not (number.isdigit() and status.isdigit()):
                raise ValueError("not a number and a status")
            yield int(number), int(status)
