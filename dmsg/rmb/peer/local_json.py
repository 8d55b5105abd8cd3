"""JSON messages that local programs and the peer exchange over Redis.

``dat`` is base64 with padding; ``dst`` of a request is a list of twins. ``ref``, ``tag``, ``shm`` and ``err`` may be
null or missing; all other members are required, and unknown members are ignored. (The seed document requires ``shm`` in
requests, too; this module also accepts requests without it.)
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from dataclasses import dataclass

from dmsg.rmb.errors import RmbError
from dmsg.rmb.twins.address import MAX_TWIN, Session

VERSION = 1
MAX_COMMAND = 256
"""Maximum length of a command in characters."""
MAX_DESTINATIONS = 1000
"""Maximum number of destinations of one request."""
MAX_JSON = 24 * 1024 * 1024
"""Maximum size in bytes of a JSON message that programs and the peer exchange through Redis."""
RESERVED_PREFIXES = ("system.", "backlog.", "seen.", "outgoing.")
"""Prefixes that no command may have. With them, ``msgbus.<command>`` would be one of the peer's own keys in Redis."""


def may_be_called(command: str) -> bool:
    """Whether other twins may request this command: it is not too long, and ``msgbus.<command>`` is not a key of the
    peer."""
    try:
        command.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(command) <= MAX_COMMAND and not command.startswith(RESERVED_PREFIXES)


class LocalError(RmbError, ValueError):
    """Error: a message of a local program is malformed.

    :ivar reply_to: name of the list to which the error can be pushed, or None.
    :ivar reference: program's own reference of the message, or None.
    """

    def __init__(self, text: str, reply_to: str | None = None, reference: str | None = None) -> None:
        super().__init__(text)
        self.reply_to = reply_to
        self.reference = reference


@dataclass(frozen=True)
class LocalRequest:
    """Request that a client pushed to ``msgbus.system.local``."""

    reference: str | None
    command: str
    expiration: int
    data: bytes
    tags: str | None
    destinations: tuple[int, ...]
    reply_to: str
    schema: str | None
    timestamp: int


@dataclass(frozen=True)
class LocalResponse:
    """Response that a service pushed to ``msgbus.system.reply``.

    :ivar error: code and text of an error, or None.
    """

    uid: str
    data: bytes
    destination: Session
    schema: str | None
    timestamp: int
    error: tuple[int, str] | None


class _Members:
    """Members of a JSON object, whose types are checked when they are read."""

    def __init__(self, raw: bytes) -> None:
        self.reply_to: str | None = None
        self.reference: str | None = None
        if len(raw) > MAX_JSON:
            raise LocalError(f"the message has more than {MAX_JSON} bytes")
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise LocalError(f"the message is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise LocalError("the message is not a JSON object")
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise LocalError("a text has an incomplete character (a lone surrogate)") from None
        self._content: dict[str, object] = content
        for name in ("ret", "ref"):
            value = content.get(name)
            if isinstance(value, str) and value:
                setattr(self, "reply_to" if name == "ret" else "reference", value)

    def wrong(self, text: str) -> LocalError:
        return LocalError(text, self.reply_to, self.reference)

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str):
            raise self.wrong(f"{name} is missing or not a text")
        return value

    def optional(self, name: str) -> str | None:
        value = self._content.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"{name} is not a text")
        return value

    def number(self, name: str) -> int:
        value = self._content.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
            raise self.wrong(f"{name} is missing or not a number")
        return value

    def data(self) -> bytes:
        text = self.text("dat")
        try:
            return b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise self.wrong("dat is not base64") from None

    def get(self, name: str) -> object:
        return self._content.get(name)


def parse_request(raw: bytes) -> LocalRequest:
    """Parse the JSON of a request.

    :raises LocalError: ``raw`` is not a valid request.
    """
    members = _Members(raw)
    members.number("ver")
    destinations = members.get("dst")
    if not isinstance(destinations, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 < one <= MAX_TWIN for one in destinations
    ):
        raise members.wrong("dst is missing or not a list of twins")
    if not 0 < len(destinations) <= MAX_DESTINATIONS:
        raise members.wrong(f"dst must name 1 to {MAX_DESTINATIONS} twins")
    command = members.text("cmd")
    if not 0 < len(command) <= MAX_COMMAND:
        raise members.wrong(f"cmd must have 1 to {MAX_COMMAND} characters")
    return LocalRequest(
        members.optional("ref"),
        command,
        members.number("exp"),
        members.data(),
        members.optional("tag"),
        tuple(dict.fromkeys(destinations)),
        members.text("ret"),
        members.optional("shm") or None,
        members.number("now"),
    )


def parse_response(raw: bytes) -> LocalResponse:
    """Parse the JSON of a response.

    :raises LocalError: ``raw`` is not a valid response.
    """
    members = _Members(raw)
    members.number("ver")
    error = members.get("err")
    if error is not None and not (
        isinstance(error, dict)
        and isinstance(error.get("code"), int)
        and 0 <= error["code"] < 2**32
        and isinstance(error.get("message"), str)
    ):
        raise members.wrong("err is not an object with a code and a message")
    uid = members.optional("ref")
    if not uid:
        raise members.wrong("ref is missing: it says which request this answers")
    try:
        destination = Session.parse(members.text("dst"))
    except ValueError as wrong:
        raise members.wrong(f"dst is not valid: {wrong}") from None
    return LocalResponse(
        uid,
        b"" if error is not None and members.get("dat") is None else members.data(),
        destination,
        members.optional("shm") or None,
        members.number("now"),
        None if error is None else (error["code"], error["message"]),
    )


def _encode(content: dict[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def incoming_request(
    uid: str,
    source: Session,
    command: str,
    expiration: int,
    data: bytes,
    tags: str | None,
    reply_to: str,
    schema: str | None,
    timestamp: int,
) -> bytes:
    """Return the JSON of a request from the bus, as a service reads it from the list ``msgbus.<command>``."""
    return _encode(
        {
            "ver": VERSION,
            "ref": uid,
            "src": str(source),
            "cmd": command,
            "exp": expiration,
            "dat": b64encode(data).decode(),
            "tag": tags,
            "ret": reply_to,
            "shm": schema or "",  # In the seed document ``shm`` is a text, never null.
            "now": timestamp,
        }
    )


def incoming_response(
    reference: str | None,
    data: bytes,
    source: str,
    schema: str | None,
    timestamp: int,
    error: tuple[int, str] | None = None,
) -> bytes:
    """Return the JSON of a response from the bus, as a client reads it from its reply list.

    :param source: ``TWIN[:SESSION]``; ``0`` for a relay; empty for the peer itself.
    """
    return _encode(
        {
            "ver": VERSION,
            "ref": reference,
            "dat": b64encode(data).decode(),
            "src": source,
            "shm": schema,
            "now": timestamp,
            "err": None if error is None else {"code": error[0], "message": error[1]},
        }
    )


def outgoing_request(
    command: str,
    destinations: list[int],
    data: bytes,
    reply_to: str,
    *,
    now: int,
    expiration: int = 300,
    reference: str | None = None,
    tags: str | None = None,
    schema: str | None = None,
) -> bytes:
    """Return the JSON of a request, as a client pushes it to the list ``msgbus.system.local``."""
    return _encode(
        {
            "ver": VERSION,
            "ref": reference,
            "cmd": command,
            "exp": expiration,
            "dat": b64encode(data).decode(),
            "tag": tags,
            "dst": destinations,
            "ret": reply_to,
            "shm": schema,
            "now": now,
        }
    )


def outgoing_response(
    request: dict[str, object], data: bytes, *, now: int, error: tuple[int, str] | None = None
) -> bytes:
    """Return the JSON of a response, as a service pushes it to the list ``msgbus.system.reply``.

    :param request: request as the service has read it.
    """
    return _encode(
        {
            "ver": VERSION,
            "ref": request["ref"],
            "dat": b64encode(data).decode(),
            "dst": request["src"],
            "shm": request.get("shm"),
            "now": now,
            "err": None if error is None else {"code": error[0], "message": error[1]},
        }
    )
