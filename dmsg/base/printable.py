"""Cleaning of texts from strangers before a terminal or a log shows them."""

from __future__ import annotations

import re

MAX_ERROR = 1000
"""Maximum number of characters of another error's text that an error message quotes. The message then still has room
for advice."""
MAX_PEER_TEXT = 300
"""Maximum number of characters that are shown of a text from a peer or a server."""
_USERINFO = re.compile(r"://[^/?#\s]*@")
UNPRINTABLE = "\ufffd"
"""Replacement for a character that a terminal might interpret as a control character."""


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with :data:`UNPRINTABLE` in place of each control character, escape character and
    bidirectional formatting character.

    :param keep: characters to leave as they are, for example ``"\\n"``.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else UNPRINTABLE for one in text)


def without_userinfo(text: str) -> str:
    """Return ``text`` with ``***`` in place of the user and password in its URLs, so that a terminal or log may show
    it."""
    return _USERINFO.sub("://***@", text) if "@" in text else text


def shorten(text: str, limit: int = MAX_ERROR) -> str:
    """Return ``text`` as one line of at most ``limit`` characters; a longer text is cut between words."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    kept = line[: limit - 3]
    if not line[limit - 3].isspace():
        # A single word that is longer than the limit is cut, too.
        kept = kept.rpartition(" ")[0] or kept
    return kept.rstrip() + "..."
