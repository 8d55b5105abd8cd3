"""Recognition of other programs by their JSON: of implementations of discovery by their answers, and of clients and
servers by the entries that they post. No I/O.
"""

from __future__ import annotations

import json

COMMON_PATH = "/dmsg-discovery/available_servers"
"""URL path that all implementations of discovery have, and whose answer shows which implementation it is."""
NO_SERVERS = "no delegated dmsg servers available for remote"
"""Error message with which a discovery of today's dmsg (version 1) says that it lists no server."""
VERSION_1 = (
    "it is a discovery of today's dmsg (version 1), whose network this program cannot join; use a discovery of the "
    "network of 2019, such as one run by `twistd dmsg-discovery`"
)
GO_2019 = (
    "it is a discovery of the Go program of 2019, which lacks the paths that this program requests; use a discovery "
    "run by `twistd dmsg-discovery`, which programs of 2019 can use, too"
)
VERSION_1_POSTED = (
    "this entry is of today's dmsg (version 1), and this is a discovery of the network of 2019: the two cannot talk to "
    "each other, so the entry is refused"
)


def is_foreign(status: int, body: bytes) -> bool:
    """Whether a program that is not a discovery of this network may have sent the answer.

    The answer of such a program has the status 404 and a body other than JSON. A discovery of this network also answers
    404 if there is no such entry, but with JSON.
    """
    return status == 404 and body.lstrip()[:1] not in (b"{", b"[", b"")


def describe_foreign(status: int) -> str:
    """Describe the program that sent an error without a message of a discovery.

    A reverse proxy sends some of these errors itself: while the discovery behind it does not run, or after too many
    requests.
    """
    if status == 429:
        return "a proxy at this URL refuses further requests for now; try again later"
    if status in (502, 503, 504):
        return "a proxy at this URL cannot reach its discovery, or refuses requests for now; try again later"
    return "the program at this URL is not a discovery"


def recognise(status: int, body: bytes, *, path_is_unknown: bool) -> str:
    """Recognise a program by its answer to ``COMMON_PATH``.

    :param path_is_unknown: whether the program is known to lack a path of the seed documents.
    :returns: a description of the program for an error message; empty if the answer does not show what it is.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if status == 404 and isinstance(value, dict) and value.get("message") == NO_SERVERS:
        return VERSION_1
    if status != 200 or not isinstance(value, list):
        return ""
    if any(_has_version_1_members(one) for one in value):
        return VERSION_1
    return GO_2019 if path_is_unknown else ""


def is_version_1(body: bytes) -> bool:
    """Whether ``body``, a posted entry with an invalid signature, is of today's dmsg (version 1)."""
    try:
        return _has_version_1_members(json.loads(body))
    except (ValueError, RecursionError):
        return False


def _has_version_1_members(entry: object) -> bool:
    """Whether an entry has members that only entries of today's dmsg (version 1) have."""
    if not isinstance(entry, dict):
        return False
    server = entry.get("server")
    return "client_type" in entry or "protocol" in entry or (isinstance(server, dict) and "availableSessions" in server)
