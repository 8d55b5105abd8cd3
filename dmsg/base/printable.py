"""Text of strangers, before it comes to a terminal or a log."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"://[^/?#\s]*@")
UNPRINTABLE = "\ufffd"
"""What stands for a character that a terminal might act upon."""


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
