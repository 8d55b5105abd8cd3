"""Access rule of the status page: programs of the same machine, or anybody with the token."""

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

NOT_PUBLIC = "metrics are served to programs on this machine; --metrics opens an endpoint for other machines\n"
"""Answer at a public port to requests for /metrics from other machines."""
MIN_TOKEN, MAX_TOKEN = 16, 512
"""Length of a token in characters: shortest and longest."""
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
"""Headers that proxies add. A proxy that adds none of them cannot be distinguished from a program on this machine."""


def read_token(path: str) -> bytes:
    """Return the token in a file, without surrounding white space.

    :raises DmsgError: the file cannot be read, others can access it, or the token is too short, too long or not ASCII.
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


class PageRequest(Interface):
    """Interface of a request, with the parts that the access rule examines."""

    def getHeader(self, key: bytes, /) -> bytes | None:
        """Return the value of a header."""

    def getClientAddress(self) -> IAddress:
        """Return the address of the client."""


class Access:
    """Access rule for the status page.

    If there is a token, every request needs it, as a bearer token or as the password that a browser asks for. Without a
    token, only requests from this machine are allowed, and only if their Host header is an address or ``localhost``.
    Otherwise an attacker could let the name of a web site lead to this machine (DNS rebinding), and its page could read
    the status page. Requests through a proxy that names its client are refused as well. A proxy that does not name it
    looks like a program of this machine; behind such a proxy set a token.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._token = token

    def refuses(self, request: PageRequest) -> tuple[int, str] | None:
        """Return the status and text of a refusal, or None if the request is allowed."""
        if self._token is not None:
            given = _given_token(request.getHeader(b"authorization") or b"")
            # The comparison takes constant time, because one that stops early would reveal how much of a guess is
            # right.
            if given is not None and hmac.compare_digest(given, self._token):
                return None
            return 401, "this page needs the token of its operator, as a password or a bearer token\n"
        if any(request.getHeader(name) is not None for name in _PROXIES):
            return (
                403,
                "this page is served to its own machine only, not through a proxy; the option --page-token opens it\n",
            )
        if not _is_here(str(getattr(request.getClientAddress(), "host", ""))):
            return 403, "this page is served to its own machine only; the option --page-token opens it to others\n"
        if not _is_plain((request.getHeader(b"host") or b"").decode("ascii", "replace")):
            return 403, "this page is served to its own machine only, by an IP address or as localhost\n"
        return None


HERE = Access()
"""Rule without a token, for pages of a public port that only programs on the same machine may read, such as
monitoring."""


def is_foreign(request: PageRequest) -> bool:
    """Whether a browser sends the request for a page of another site.

    Browsers say so in Sec-Fetch-Site; older ones send Origin with requests to another site. Programs send neither.
    """
    site = request.getHeader(b"sec-fetch-site")
    if site is not None:
        return site.lower() not in (b"same-origin", b"none")
    origin = request.getHeader(b"origin")
    return origin is not None and origin.rpartition(b"//")[2] != request.getHeader(b"host")


def is_script(request: PageRequest) -> bool:
    """Whether a script in a browser sends the request, not a person who opens the address.

    The check catches DNS rebinding: if another site's name leads to this machine after its page was loaded, the browser
    takes both for the same site.
    """
    mode = request.getHeader(b"sec-fetch-mode")
    return mode is not None and mode.lower() != b"navigate"


def _given_token(header: bytes) -> bytes | None:
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
    """Whether a Host header is an address or localhost. Other names may belong to an attacker."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
