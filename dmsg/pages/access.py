"""Who may look at an entity's page: this machine, or who has the token."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import os
import stat
from typing import Protocol as Interface

from twisted.internet.interfaces import IAddress

from dmsg.errors import DmsgError

NOT_PUBLIC = "the numbers are for programs of this machine, or for others where --metrics opens them\n"
"""Said at a public port to whoever asks for /metrics from elsewhere."""
MIN_TOKEN, MAX_TOKEN = 16, 512
"""Characters of a token."""
_PROXIES = (
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"forwarded",
    b"via",
    b"x-real-ip",
    b"x-client-ip",
    b"true-client-ip",
    b"cf-connecting-ip",
)
"""Headers of who asks for somebody else; a proxy that sends none of them cannot be told from a program here."""


def read_token(path: str) -> bytes:
    """The token in a file, which others cannot read; white space around it does not count.

    :raises DmsgError: it cannot be read, others can read it, or it is too short, too long, or no ASCII.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(MAX_TOKEN + 64).strip()
    except OSError as error:
        raise DmsgError(f"{path}: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DmsgError(f"{path} is accessible by others (mode {mode & 0o777:04o}); do: chmod 600 {path}")
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not all(32 < byte < 127 for byte in token):
        raise DmsgError(f"{path}: a token is {MIN_TOKEN} to {MAX_TOKEN} visible characters of ASCII")
    return token


class Asking(Interface):
    """Request, as far as the rule looks at it."""

    def getHeader(self, key: bytes, /) -> bytes | None:
        """Return the value of a header."""

    def getClientAddress(self) -> IAddress:
        """Return the address of the client."""


class Access:
    """The rule.

    With a token everybody needs it: as a bearer, or as the password that a browser asks for.  Without one it is for
    connections from this machine alone, by an address or as localhost, so that no page of another site whose name
    leads here can read it.  Proxies that say for whom they ask are refused, too; one that does not looks like a
    program of this machine, and needs a token before it.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._token = token

    def refuses(self, request: Asking) -> tuple[int, str] | None:
        """Status and text; None: it may be shown."""
        if self._token is not None:
            given = _given(request.getHeader(b"authorization") or b"")
            if given is not None and hmac.compare_digest(given, self._token):
                return None
            return 401, "this page needs the token of its operator, as a password or a bearer token\n"
        if any(request.getHeader(name) is not None for name in _PROXIES):
            return 403, "this page is for its own machine, not through a proxy; see --page-token\n"
        if not _is_here(str(getattr(request.getClientAddress(), "host", ""))):
            return 403, "this page is for its own machine; see --page-token\n"
        if not _is_plain((request.getHeader(b"host") or b"").decode("ascii", "replace")):
            return 403, "this page is for its own machine, by an address or as localhost\n"
        return None


HERE = Access()
"""The rule for what a public port tells programs of its own machine alone, as monitoring there."""


def is_foreign(request: Asking) -> bool:
    """Whether a browser asks on behalf of another site's page.

    Browsers say so in Sec-Fetch-Site; older ones send Origin with requests to another site.  Programs send neither.
    """
    site = request.getHeader(b"sec-fetch-site")
    if site is not None:
        return site.lower() not in (b"same-origin", b"none")
    origin = request.getHeader(b"origin")
    return origin is not None and origin.rpartition(b"//")[2] != request.getHeader(b"host")


def is_script(request: Asking) -> bool:
    """Whether a page in a browser asks, not a person who opens the address.

    A name of another site can be made to lead here after its page was loaded; then the browser takes both for one site.
    """
    mode = request.getHeader(b"sec-fetch-mode")
    return mode is not None and mode.lower() != b"navigate"


def _given(header: bytes) -> bytes | None:
    kind, _, value = header.partition(b" ")
    value = value.strip()
    if kind.lower() == b"bearer":
        return value
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_plain(host: str) -> bool:
    """An address, or localhost: names may lead here whose owners are others."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
