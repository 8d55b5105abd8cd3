r"""Protocol between the sender of a spool and a collector, over one stream. No I/O.

Messages are lines of JSON in UTF-8 that end with ``\n`` and have at most :data:`LINE_LIMIT` bytes. The sender offers
one file at a time: ``{"v": 1, "name": ..., "size": bytes, "sha256": 64 hex digits}``. If the producer of the events is
a public key, the offer also has a ``"voucher"``, which is the producer's signature for the sender in 130 hex digits.

The collector answers with ``{"answer": "send"}`` or with a final answer. After ``send``, the sender sends ``size``
bytes, and the collector then sends the final answer, which is one of these:

* ``kept``: the file is on the collector's disk, maybe since an earlier delivery. The sender may remove it.
* ``later``: the collector cannot accept the file now; ``why`` is the reason. If the collector sends this answer while
  it is receiving the bytes of the file, it then closes the stream.
* ``refused``: the collector will never accept this file, but may accept others; ``why`` is the reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from dmsg.base.options import Number
from dmsg.base.printable import printable
from dmsg.errors import DmsgError
from dmsg.telemetry.schema import EVENTS_PREFIX, RECEIPTS_PREFIX, SEGMENT_SUFFIX

VERSION = 1
PORT = 900
"""Default dmsg port of a collector."""
PORT_NUMBER = Number(1, 65535, "")
LINE_LIMIT = 2048
"""Maximum length of a message line in bytes."""
FILE_LIMIT = 64 * 1024 * 1024
"""Maximum size of a file in bytes. Files are compressed."""
WHY_LIMIT = 300
"""Maximum length of the reason in an answer, in characters."""
_NAME = re.compile(
    f"(?:{re.escape(EVENTS_PREFIX)}|{re.escape(RECEIPTS_PREFIX)})[0-9a-f]{{32}}-[0-9]{{6,12}}{re.escape(SEGMENT_SUFFIX)}"
)
_DIGEST = re.compile("[0-9a-f]{64}")
_VOUCHER = re.compile("(?:[0-9a-f]{130})?")


class WireError(DmsgError):
    """Error: the remote side does not follow the protocol."""


class Kind(StrEnum):
    """Kind of a collector's answer."""

    SEND = "send"
    KEPT = "kept"
    LATER = "later"
    REFUSED = "refused"


@dataclass(frozen=True)
class Offer:
    """Offer of a file.

    :ivar size: size in bytes.
    :ivar sha256: digest of the file, 64 hex digits.
    :ivar voucher: the producer's signature for the sender, 130 hex digits (:mod:`dmsg.telemetry.vouchers`), or empty.
    """

    name: str
    size: int
    sha256: str
    voucher: str = ""

    def line(self) -> bytes:
        """Return the line without its end."""
        row = {"v": VERSION, "name": self.name, "size": self.size, "sha256": self.sha256}
        return json.dumps(row | ({"voucher": self.voucher} if self.voucher else {})).encode()


@dataclass(frozen=True)
class Answer:
    """Answer of a collector.

    :ivar why: reason, for ``later`` and ``refused``.
    """

    kind: Kind
    why: str = ""

    def line(self) -> bytes:
        """Return the line without its end. A reason that is too long is cut."""
        return json.dumps({"answer": self.kind, **({"why": self.why[:WHY_LIMIT]} if self.why else {})}).encode()


def is_spool_name(name: str) -> bool:
    """Whether a name is that of a sealed file of a spool."""
    return _NAME.fullmatch(name) is not None


def _row(line: bytes) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise WireError("a received line is not a JSON object, which the transfer protocol requires")
    return row


def parse_offer(line: bytes) -> Offer:
    """Parse an offer.

    :raises WireError: the line is not an offer.
    """
    row = _row(line)
    if row.get("v") != VERSION:
        raise WireError(
            f"version {str(row.get('v'))[:20]} of the transfer protocol is not supported, only version {VERSION}"
        )
    name, size, digest = row.get("name"), row.get("size"), row.get("sha256")
    if not isinstance(name, str) or not is_spool_name(name):
        raise WireError("the offer's name is not that of a finished file of events")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= FILE_LIMIT:
        raise WireError(f"the offer's size is not a number from 1 to {FILE_LIMIT}")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise WireError("the offer has no valid SHA-256")
    voucher = row.get("voucher", "")
    if not isinstance(voucher, str) or not _VOUCHER.fullmatch(voucher):
        raise WireError("the offer's voucher is malformed")
    return Offer(name, size, digest, voucher)


def parse_answer(line: bytes) -> Answer:
    """Parse an answer. Control characters in its reason are replaced, because a terminal would interpret them.

    :raises WireError: the line is not an answer.
    """
    row = _row(line)
    try:
        return Answer(Kind(str(row.get("answer"))), printable(str(row.get("why", ""))[:WHY_LIMIT]))
    except ValueError:
        raise WireError("a received line is not an answer of a collector") from None
