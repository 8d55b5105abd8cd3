"""Encoding of several messages in one POST between two relays of this package, and of the answers to it. No I/O.

The reference knows one message per POST. Such a POST remains possible; in its answer a relay offers batches with the
header ``X-Rmb-Batch: 1``. A batch is a POST to ``/batch`` of at most ``MAX_BATCH`` messages, one after the other, each
as ``flags(1) || length(4, big endian) || envelope``. Bit 0 of the flags means what ``X-Rmb-Only-Connected`` means for
a single message; the other bits are zero.

The answer is 200 at once. Lines ``NUMBER STATUS`` in ASCII follow as the outcomes become known. The number is that of
the message, counted from 0. The status is the one that a POST of this message alone would have had.  Because outcomes
are sent as they become known, no message waits for another one whose receiver is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from dmsg.rmb.errors import EnvelopeError

PATH = "batch"
"""Path of batches below the URL of a relay."""
OFFER = b"x-rmb-batch"
"""Header of an answer by which a relay offers batches."""
CONTENT_TYPE = "application/x-rmb-batch"
MAX_BATCH = 32
"""Maximum number of messages in a batch; verifying them takes three milliseconds, during which the relay does nothing
else."""
MAX_BATCH_SIZE = 1024 * 1024
"""Maximum bytes of the envelopes in a batch; a longer envelope is sent alone."""
LONGEST_LINE = 16
"""Maximum bytes of a line of an answer."""

_HEAD = Struct(">BI")
_ONLY_CONNECTED = 1


def encode(messages: Iterable[tuple[bytes, bool]]) -> bytes:
    """Encode the body of a request.

    :param messages: envelopes, and for each whether the other relay has to refuse it unless its session is connected.
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
        # An unknown flag may change what a message means, so it is refused and not ignored.
        if flags & ~_ONLY_CONNECTED:
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
    """Parser of an answer that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield the number and status of each message in the lines that are now complete.

        :raises ValueError: a line is malformed.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        # An incomplete line counts towards the limit too: a relay that never ends its line would otherwise fill the
        # memory.
        if max(len(self._rest), *map(len, lines), 0) > LONGEST_LINE:
            raise ValueError("a line of the answer to a batch is too long")
        for one in lines:
            number, _, status = one.partition(b" ")
            if not (number.isdigit() and status.isdigit()):
                raise ValueError("a line is not a number and a status")
            yield int(number), int(status)
