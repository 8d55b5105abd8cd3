"""HTTP requests that upgrade a connection to a websocket, and the answers to them (RFC 6455, section 4). No I/O."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode
from typing import NamedTuple

MAX_HEAD = 8192
"""Maximum number of bytes of an upgrade request."""
_HEAD = re.compile(rb"GET (/[!-~]*) HTTP/1\.1((?:\r\n[0-9A-Za-z-]+:[^\0\r\n]*){1,100})")
_FIELD = re.compile(rb"\r\n([0-9A-Za-z-]+):([^\r\n]*)")
_ONCE = frozenset((b"host", b"upgrade", b"connection", b"sec-websocket-key", b"sec-websocket-version"))
_ELSEWHERE = frozenset((b"content-length", b"transfer-encoding", b"origin", b"expect", b"te", b"trailer"))
_LISTS = frozenset((b"x-forwarded-for",))
"""Headers that may be repeated, because some proxies add a second header line instead of extending the first one."""
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""GUID of RFC 6455, section 1.3, for Sec-WebSocket-Accept."""


class Upgrade(NamedTuple):
    """Parsed upgrade request.

    :ivar headers: headers, with names in lower case.
    :ivar key: the header Sec-WebSocket-Key.
    :ivar rest: bytes that arrived after the request.
    """

    target: bytes
    key: bytes
    headers: dict[bytes, bytes]
    rest: bytes


def is_key(key: bytes) -> bool:
    """Whether a Sec-WebSocket-Key is valid: 16 bytes in base64."""
    try:
        return len(key) == 24 and len(b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def plain_upgrade(data: bytes) -> Upgrade | None:
    """Parse the upgrade request with which ``data`` begin. Return None if it is incomplete, or has unusual headers."""
    head, blank, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"GET ") or not blank or len(head) > MAX_HEAD:
        return None
    # Requests with empty, folded or repeated headers are left to the HTTP site.
    whole = _HEAD.fullmatch(head)
    if whole is None:
        return None
    fields = _FIELD.findall(whole[2])
    headers: dict[bytes, bytes] = {}
    for written, value in fields:
        name = written.lower()
        if name not in headers:
            headers[name] = value.strip(b" \t")
        elif name in _LISTS:
            headers[name] += b"," + value  # Repeated header lines may be joined with commas (RFC 9110, section 5.3).
        else:
            return None
    if not headers.keys() >= _ONCE or _ELSEWHERE & headers.keys():
        return None
    key = headers[b"sec-websocket-key"]
    if (
        headers[b"upgrade"].lower() != b"websocket"
        or b"upgrade" not in headers[b"connection"].lower()
        or headers[b"sec-websocket-version"] != b"13"
        or not is_key(key)
    ):
        return None
    return Upgrade(whole[1], key, headers, rest)


def accept_of(key: bytes) -> bytes:
    """Return the header Sec-WebSocket-Accept for a Sec-WebSocket-Key."""
    return b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())


def switching(key: bytes) -> bytes:
    """Return the answer that accepts an upgrade request with this Sec-WebSocket-Key."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept_of(key) + b"\r\n\r\n"
    )
