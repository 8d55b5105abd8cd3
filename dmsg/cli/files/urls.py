"""URLs of files that peers serve: ``dmsg://KEY:PORT/PATH``."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from urllib.parse import quote, unquote_to_bytes, urlsplit

from dmsg.base.printable import without_userinfo
from dmsg.clients.address_book import AddressBook
from dmsg.errors import DmsgError, WrongUse
from dmsg.net.addresses import parse_port

HTTP_PORT = 80
SCHEME = "dmsg"


def http_url(url: str) -> bytes:
    """Return a URL ``dmsg://KEY:PORT/PATH`` in the form that Twisted's HTTP client expects.

    :raises DmsgError: the URL is malformed.
    """
    try:
        parts = urlsplit(url if "://" in url else f"{SCHEME}://{url}")
        if parts.scheme != SCHEME or not parts.hostname:
            raise ValueError
        key = AddressBook().find_host(parts.hostname)
        port = parse_port(parts.netloc.rpartition(":")[2]) if ":" in parts.netloc else HTTP_PORT
    except DmsgError:
        raise
    except ValueError:
        raise WrongUse(f"{without_userinfo(url)[:200]!r} is not a URL such as dmsg://KEY:PORT/PATH") from None
    path = _escape(parts.path or "/") + (f"?{_escape(parts.query)}" if parts.query else "")
    return f"http://{key.text}:{port}{path}".encode()


def _escape(text: str) -> str:
    """Escape characters that a URL cannot have, such as blanks and umlauts, as ``%XX``.  Existing escapes stay."""
    text = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", text)
    return quote(os.fsencode(text), safe="/?%:@!$&'()*+,;=")


def name_of(url: str) -> str:
    """Return the last part of a URL's path as a file name.  Bytes that are not UTF-8 are preserved."""
    path = urlsplit(url if "://" in url else f"{SCHEME}://{url}").path
    return PurePosixPath(os.fsdecode(unquote_to_bytes(os.fsencode(path)))).name
