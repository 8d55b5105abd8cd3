"""Statements: files signed by an operator that say how many bytes servers delivered on a day, according to the receipts
of both ends of each transport. No I/O.

A statement consists of lines of canonical JSON (docs/pipeline/statement.md). All lines except the last are computed
only from the sealed files of receipts. Anybody who has these files can compute the same lines, byte for byte. The last
line is the operator's signature of all bytes before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from dmsg.errors import DmsgError, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature
from dmsg.telemetry.credits import Credits

VERSION = 1
MAX_SIZE = 512 * 1024 * 1024
"""Maximum size of a statement in bytes."""
_CONTEXT = b"dmsg statement 1\n"
_HEX_DIGITS = dict.fromkeys(("server", "initiator", "responder", "operator"), 66) | {"sha256": 64, "signature": 130}
"""Number of hexadecimal digits, in lower case, of the texts that consist of them."""
_FIELDS: dict[str, dict[str, type]] = {
    "statement": {"day": str, "first": str, "inputs": int, "pairs": int, "servers": int, "version": int},
    "input": {"sha256": str},
    "server": {
        "conflict": int,
        "credited": int,
        "difference": int,
        "one_sided": int,
        "server": str,
        "transports": int,
    },
    "pair": {"bytes_ab": int, "bytes_ba": int, "initiator": str, "responder": str, "server": str, "transports": int},
    "signature": {"operator": str, "signature": str},
}
"""Fields of each kind of line, apart from ``kind``, with their types."""
Line = Mapping[str, Any]


class StatementError(DmsgError):
    """Error: the file is not a valid statement. Its text says why."""


def body_of(credits: Credits) -> bytes:
    """Return the bytes of all lines of a statement except the signature."""
    lines: list[Line] = [
        {
            "kind": "statement",
            "version": VERSION,
            "day": str(credits.day),
            "first": str(credits.first),
            "inputs": len(credits.inputs),
            "servers": len(credits.servers),
            "pairs": len(credits.pairs),
        }
    ]
    lines += [{"kind": "input", "sha256": digest} for digest in sorted(credits.inputs)]
    for server, total in sorted(credits.servers.items()):
        counts = {name: getattr(total, name) for name in ("transports", "credited", "difference", "one_sided")}
        lines.append({"kind": "server", "server": server.hex(), "conflict": total.conflict, **counts})
    for (server, initiator, responder), pair in sorted(credits.pairs.items()):
        names = {"server": server.hex(), "initiator": initiator.hex(), "responder": responder.hex()}
        counts = {"transports": pair.transports, "bytes_ab": pair.bytes_ab, "bytes_ba": pair.bytes_ba}
        lines.append({"kind": "pair", **names, **counts})
    return b"".join(map(_encode_line, lines))


def sign_statement(body: bytes, key: SecKey) -> bytes:
    """Return the complete file: the lines and the operator's signature."""
    signature = key.sign(_CONTEXT + body).hex()
    return body + _encode_line({"kind": "signature", "operator": key.public.hex(), "signature": signature})


def _encode_line(line: Line) -> bytes:
    return json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Statement:
    """Statement of an operator about one day, whose signature was verified.

    :ivar body: bytes of all lines except the signature.
    :ivar operator: key that signed the statement.
    :ivar day: day on which the servers delivered the bytes.
    :ivar first: first day whose receipts were considered.
    """

    body: bytes
    operator: PubKey
    day: date
    first: date

    def lines(self, about: PubKey | None = None) -> Iterator[Line]:
        """Yield the lines except the signature.

        :param about: public key; yield only the lines that contain it. None for all lines.
        :raises StatementError: a line is malformed.
        """
        wanted = b"" if about is None else about.hex().encode()
        for number, line in enumerate(self.body.splitlines(keepends=True)):
            if wanted in line:
                yield _read_line(line, number + 1)

    def check_lines(self) -> None:
        """Check that the lines are sorted, and that the counts and sums in them are right.

        :raises StatementError: the operator has signed a malformed statement.
        """
        counts = dict.fromkeys(("statement", "input", "server", "pair"), 0)
        order = list(counts)
        last: tuple[Any, ...] = ()
        of_servers: dict[str, list[int]] = {}
        for number, line in enumerate(self.lines(), 1):
            kind = line["kind"]
            names = (line.get("sha256", ""), *(line.get(name, "") for name in ("server", "initiator", "responder")))
            place = (order.index(kind) if kind in counts else -1, *names)
            if place <= last or (kind == "statement") != (number == 1):
                raise StatementError(f"line {number} of the statement is out of order")
            last = place
            counts[kind] += 1
            if kind == "server":
                of_servers[line["server"]] = [line["transports"], line["credited"]]
            elif kind == "pair":
                left = of_servers.get(line["server"])
                if left is None:
                    raise StatementError(f"line {number} of the statement is about a server whose sum is missing")
                left[0] -= line["transports"]
                left[1] -= line["bytes_ab"] + line["bytes_ba"]
        head = next(self.lines())
        if any(counts[kind] != head[f"{kind}s"] for kind in ("input", "server", "pair")):
            raise StatementError("the statement's first line gives a wrong number of lines")
        if any(map(any, of_servers.values())):
            raise StatementError("a server's sums in the statement differ from the sums of its pairs of clients")


def read_statement(data: bytes) -> Statement:
    """Parse a statement's first and last line, and verify the signature over the whole file.

    :raises StatementError: the file is no statement, or was changed after it was signed.
    """
    if len(data) > MAX_SIZE:
        raise StatementError(f"a statement has at most {MAX_SIZE >> 20} MiB")
    if not data.startswith(b'{"day":') or not data.endswith(b"\n"):
        raise StatementError("the file is not a statement, or is incomplete")
    end = data.rfind(b"\n", 0, -1) + 1
    body = data[:end]
    last = _read_line(data[end:], 0)
    if last["kind"] != "signature":
        raise StatementError("the statement is not signed, or is incomplete")
    try:
        operator = PubKey.from_hex(last["operator"])
        operator.verify(_CONTEXT + body, Signature.from_hex(last["signature"]))
    except (KeyFormatError, SignatureError):
        raise StatementError("the statement was changed, or was not signed by the key that it names") from None
    head = _read_line(body[: body.find(b"\n") + 1], 1)
    try:
        day, first = date.fromisoformat(head["day"]), date.fromisoformat(head["first"])
    except (KeyError, ValueError):
        raise StatementError("the statement's first line is malformed") from None
    if head["version"] != VERSION:
        raise StatementError(f"the statement has the unknown format version {head['version']}: update dmsg")
    if (str(day), str(first)) != (head["day"], head["first"]) or first > day:
        raise StatementError("the statement's days are malformed")
    return Statement(body, operator, day, first)


def _read_line(line: bytes, number: int) -> Line:
    """Parse a line, which must have the canonical form.

    :param number: number of the line, for the text of an error; 0 for the last line.
    :raises StatementError: the line is malformed.
    """
    place = f"line {number}" if number else "the last line"
    try:
        found: dict[str, Any] = json.loads(line)
        fields = _FIELDS[found["kind"]]
        if found.keys() != fields.keys() | {"kind"} or _encode_line(found) != line:
            raise ValueError
        for name, kind in fields.items():
            value: Any = found[name]
            if type(value) is not kind or str(value).startswith("-"):
                raise ValueError
            if name in _HEX_DIGITS and not re.fullmatch(f"[0-9a-f]{{{_HEX_DIGITS[name]}}}", str(value)):
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StatementError(f"{place} of the statement is malformed") from None
    return dict(found)
