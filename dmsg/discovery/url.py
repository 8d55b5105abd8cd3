"""Where a discovery is."""

from __future__ import annotations

from urllib.parse import urlsplit

from dmsg.base.printable import without_userinfo


def check_url(url: str) -> str:
    """A URL of a discovery.

    :raises ValueError: it cannot be one; the text says so in one line.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{without_userinfo(url)[:80]!r} is not a URL, as http://127.0.0.1:9090 is")
    return url
