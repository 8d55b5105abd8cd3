r"""What the sender of a spool and a collector say to each other, over one stream.  No I/O.

Lines of JSON in UTF-8 that end with ``\n``, at most :data:`LINE_LIMIT` bytes.
The sender offers one file at a time, ``{"v": 1, "name": ..., "size": bytes,
"sha256": 64 hex digits}``, with ``"voucher"``, 130 hex digits, where the events' producer is
a key that has signed for the sender.  The collector answers ``{"answer": "send"}``, after
which come ``size`` bytes and then its second answer, or at once one of these:

``kept``
    The file is on its disk, now or from before: the sender may remove it.
``later``
    It cannot take it now, ``why`` says for what reason.  It may say so within
    the bytes of a file, and ends the stream then.
``refused``
    It takes other files, but not this one, and will not; ``why`` says for what
    reason.
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
"""Of a collector's key, where nobody names another."""
PORT_NUMBER = Number(1, 65535, "")
LINE_LIMIT = 2048
"""Bytes of a line."""
FILE_LIMIT = 64 * 1024 * 1024
"""Bytes of a file, as it is sent."""
WHY_LIMIT = 300
"""Characters of a reason."""
_NAME = re.compile(
    f"(?:{re.escape(EVENTS_PREFIX)}|{re.escape(RECEIPTS_PREFIX)})[0-9a-f]{{32}}-[0-9]{{6,12}}{re.escape(SEGMENT_SUFFIX)}"
)
_DIGEST = re.compile("[0-9a-f]{64}")
_VOUCHER = re.compile("(?:[0-9a-f]{130})?")


class WireError(DmsgError):
    """The other side does not speak this."""


class Kind(StrEnum):
    """What a collector answers."""

    SEND = "send"
    KEPT = "kept"
    LATER = "later"
    REFUSED = "refused"


@dataclass(frozen=True)
class Offer:
    """A file that a sender has.

    :ivar size: bytes.
    :ivar sha256: 64 hex digits.
    :ivar voucher: 130 hex digits, the producer's signature for the sender (:mod:`dmsg.telemetry.vouchers`), or empty.
    """

    name: str
    size: int
    sha256: str
    voucher: str = ""

    def line(self) -> bytes:
        """Without the end of the line."""
        row = {"v": VERSION, "name": self.name, "size": self.size, "sha256": self.sha256}
        return json.dumps(row | ({"voucher": self.voucher} if self.voucher else {})).encode()


@dataclass(frozen=True)
class Answer:
    """:ivar why: for ``later`` and ``refused``."""

    kind: Kind
    why: str = ""

    def line(self) -> bytes:
        """Without the end of the line; a reason that is too long is cut."""
        return json.dumps({"answer": self.kind, **({"why": self.why[:WHY_LIMIT]} if self.why else {})}).encode()


def is_spool_name(name: str) -> bool:
    """Whether finished files of a spool are called so."""
    return _NAME.fullmatch(name) is not None


def _row(line: bytes) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise WireError("not a line of a spool's transfer")
    return row


def parse_offer(line: bytes) -> Offer:
    """:raises WireError: it is none."""
    row = _row(line)
    if row.get("v") != VERSION:
        raise WireError(f"version {str(row.get('v'))[:20]} of the transfer is not known here, but {VERSION}")
    name, size, digest = row.get("name"), row.get("size"), row.get("sha256")
    if not isinstance(name, str) or not is_spool_name(name):
        raise WireError("no name of a spool's file")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= FILE_LIMIT:
        raise WireError(f"a file has 1 to {FILE_LIMIT} bytes")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise WireError("no SHA-256")
    voucher = row.get("voucher", "")
    if not isinstance(voucher, str) or not _VOUCHER.fullmatch(voucher):
        raise WireError("no voucher")
    return Offer(name, size, digest, voucher)


def parse_answer(line: bytes) -> Answer:
    """What it says is made harmless for a terminal.

    :raises WireError: it is none.
    """
    row = _row(line)
    try:
        return Answer(Kind(str(row.get("answer"))), printable(str(row.get("why", ""))[:WHY_LIMIT]))
    except ValueError:
        raise WireError("no answer of a collector") from None
