"""Text of strangers, before it comes to a terminal or a log."""

from __future__ import annotations

import re

MAX_ERROR = 1000
"""Characters of an error that is repeated in another one: with its advice, which is the end of it."""
MAX_WORDS_OF_STRANGERS = 300
"""Characters of what a peer or a server says in its own words."""
_USERINFO = re.compile(r"://[^/?#\s]*@")
UNPRINTABLE = "\ufffd"
"""Replacement for a character that a terminal might act upon."""


def printable(text: str, keep: str = "") -> str:
    """``text`` without control characters, escape sequences and marks that turn its direction.

    :param keep: characters that are left as they are, as in ``"\\n"``.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else UNPRINTABLE for one in text)


def without_userinfo(text: str) -> str:
    """Return ``text`` with ``***`` in place of user and password in its URLs: what is shown or logged is no secret."""
    return _USERINFO.sub("://***@", text) if "@" in text else text


def shorten(text: str, most: int = MAX_ERROR) -> str:
    """Return ``text`` as one line of at most ``most`` characters, cut between two words, with dots where it is cut."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    kept = line[: most - 3]
    if not line[most - 3].isspace():
        # one word that is as long as all of it has no other place to be cut
        kept = kept.rpartition(" ")[0] or kept
    return kept.rstrip() + "..."
