"""Recognition of other implementations of discovery, or of programs that post to this one, by the form of their answers
and entries. No I/O."""

from __future__ import annotations

import json

OTHER_PATH = "/dmsg-discovery/available_servers"
"""Path that other implementations of discovery have in common with this one; their other paths differ."""
NO_SERVERS = "no delegated dmsg servers available for remote"
"""Message of a discovery of today's dmsg (version 1) that lists no server."""
TODAY = (
    "it is a discovery of today's dmsg (version 1), whose network this program cannot join; name one of the network of "
    "2019, as `twistd dmsg-discovery` runs it"
)
GO_2019 = (
    "it is a discovery of the Go program of 2019, which lacks the paths that this program asks for; name one that "
    "`twistd dmsg-discovery` runs: programs of 2019 can use that, too"
)
POSTED_TODAY = (
    "this entry is of today's dmsg (version 1), and this is a discovery of the network of 2019: the two cannot talk to "
    "each other, and it is not listed here"
)


def is_foreign(status: int, body: bytes) -> bool:
    """Whether an answer may come from a program that does not know the path, not from a discovery without the entry."""
    return status == 404 and body.lstrip()[:1] not in (b"{", b"[", b"")


def recognise(status: int, body: bytes, *, path_is_unknown: bool) -> str:
    """Return what kind of program answers, by its answer to ``OTHER_PATH``; empty if the answer does not show it.

    :param path_is_unknown: whether the program lacks a path that every discovery of the seed documents has.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if status == 404 and isinstance(value, dict) and value.get("message") == NO_SERVERS:
        return TODAY
    if status != 200 or not isinstance(value, list):
        return ""
    if any(_is_of_today(one) for one in value):
        return TODAY
    return GO_2019 if path_is_unknown else ""


def is_posted_today(body: bytes) -> bool:
    """Whether ``body``, a posted entry with an invalid signature, has the form of entries of dmsg 1.x."""
    try:
        return _is_of_today(json.loads(body))
    except (ValueError, RecursionError):
        return False


def _is_of_today(entry: object) -> bool:
    """Whether an entry has members that entries of 2019 lack."""
    if not isinstance(entry, dict):
        return False
    server = entry.get("server")
    return "client_type" in entry or "protocol" in entry or (isinstance(server, dict) and "availableSessions" in server)
