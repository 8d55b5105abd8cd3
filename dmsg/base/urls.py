"""Checks of URLs of HTTP services.  No I/O."""

from __future__ import annotations

from urllib.parse import urlsplit

from dmsg.base.options import Text
from dmsg.base.printable import without_userinfo


def check_url(url: str) -> str:
    """Return ``url`` if it is an HTTP URL that has a host, and has no user, password, blank or control character.

    :raises ValueError: ``url`` is not acceptable; the message says why in one line.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and url.isprintable() and " " not in url
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{without_userinfo(url)[:80]!r} is not a URL such as http://127.0.0.1:9090")
    if parts.username is not None:
        raise ValueError(f"{without_userinfo(url)[:80]!r}: a user and password in this URL are not supported")
    return url


URL = Text("URL", check_url)
