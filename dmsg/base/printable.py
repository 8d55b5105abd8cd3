"""Cleaning of texts of strangers before they reach a terminal or a log."""

from __future__ import annotations

import re

MAX_ERROR = 1000
"""Maximum characters of an error that is quoted in another error. The rest of the line is for advice."""
MAX_WORDS_OF_STRANGERS = 300
"""Maximum characters of a text that a peer or a server wrote."""
_USERINFO = re.compile(r"://[^/?#\s]*@")
UNPRINTABLE = "\ufffd"
"""Replacement for a character that a terminal might interpret."""


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` without control characters, escape sequences and marks that change the direction of writing.

    :param keep: characters to leave as they are, as in ``"\\n"``.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else UNPRINTABLE for one in text)


def without_userinfo(text: str) -> str:
    """Return ``text`` with ``***`` in place of user and password in its URLs, so that it can be shown or logged."""
    return _USERINFO.sub("://***@", text) if "@" in text else text


def shorten(text: str, limit: int = MAX_ERROR) -> str:
    """Return ``text`` as one line of at most ``limit`` characters; a longer text is cut between words."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    kept = line[: limit - 3]
    if not line[limit - 3].isspace():
        # A single word of this length is cut inside the word.
        kept = kept.rpartition(" ")[0] or kept
    return kept.rstrip() + "..."
