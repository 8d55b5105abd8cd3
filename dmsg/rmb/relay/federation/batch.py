"""Encoding of several messages in one POST between two relays of this package, and of the answers to it. No I/O.

The reference implementation sends one message per POST, and relays of this package accept this, too. With the header
``X-Rmb-Batch: 1`` in its answers, a relay says that it accepts batches. A batch is a POST to ``/batch`` of at most
``MAX_BATCH`` messages, one after the other, each encoded as ``flags(1) || length(4, big endian) || envelope``. Bit 0 of
the flags means the same as the header ``X-Rmb-Only-Connected`` of a single message; the other bits are zero.

The answer begins at once, with status 200. It has a line ``NUMBER STATUS`` in ASCII for each message, sent as soon as
its outcome is known, so that no message waits for another message whose receiver is slow. The number is the index of
the message, counted from 0. The status is the one that a POST of this message alone would have got.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from dmsg.rmb.errors import EnvelopeError

PATH = "batch"
"""Path of batches, relative to the URL of a relay."""
OFFER = b"x-rmb-batch"
"""Header by which a relay says in its answers that it accepts batches."""
CONTENT_TYPE = "application/x-rmb-batch"
MAX_BATCH = 32
"""Maximum number of messages in a batch. Verifying a full batch takes three milliseconds, during which the relay does
nothing else."""
MAX_BATCH_SIZE = 1024 * 1024
"""Maximum bytes of the envelopes in a batch. A larger envelope is sent in a request by itself."""
MAX_LINE = 16
"""Maximum length in bytes of a line in the answer to a batch."""

_HEAD = Struct(">BI")
_ONLY_CONNECTED_FLAG = 1


def encode(messages: Iterable[tuple[bytes, bool]]) -> bytes:
    """Encode the body of a request.

    :param messages: for each message, its envelope, and whether the other relay must refuse it if its session is not
        connected.
    """
    return b"".join(
        part for data, only_connected in messages for part in (_HEAD.pack(bool(only_connected), len(data)), data)
    )


def decode(body: bytes) -> list[tuple[bytes, bool]]:
    """Decode the body of a request.

    :raises EnvelopeError: the batch is incomplete, too large, or has unknown flags.
    """
    found: list[tuple[bytes, bool]] = []
    at = 0
    while at < len(body):
        if len(found) >= MAX_BATCH:
            raise EnvelopeError(f"the batch has more than {MAX_BATCH} messages")
        if len(body) - at < _HEAD.size:
            raise EnvelopeError("the batch is cut off")
        flags, size = _HEAD.unpack_from(body, at)
        at += _HEAD.size
        # Unknown flags are refused, because they may change what the message means.
        if flags & ~_ONLY_CONNECTED_FLAG:
            raise EnvelopeError("a message of the batch has unknown flags")
        if size > len(body) - at:
            raise EnvelopeError("the batch is cut off")
        found.append((body[at : at + size], bool(flags)))
        at += size
    if not found:
        raise EnvelopeError("batch is empty")
    return found


def encode_answer(number: int, status: int) -> bytes:
    """Encode the answer to one message."""
    return b"%d %d\n" % (number, status)


class AnswerParser:
    """Parser of the answer to a batch, which arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Parse further data, and yield the number and status of each message whose line is now complete.

        :raises ValueError: a line is malformed.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        # The limit also applies to an incomplete line. Otherwise a relay that never ends its line could fill the
        # memory.
        if max(len(self._rest), *map(len, lines), 0) > MAX_LINE:
            raise ValueError("a line of the answer to a batch is too long")
        for one in lines:
            number, _, status = one.partition(b" ")
            if not (number.isdigit() and status.isdigit()):
                raise ValueError("a line of the answer to a batch is not of the form NUMBER STATUS")
            yield int(number), int(status)
