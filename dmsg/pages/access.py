"""Access rule of the status page: it is open to programs on the same machine, or to anybody with the token."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import os
import secrets
import stat
from typing import Protocol as Interface

from twisted.internet.interfaces import IAddress

from dmsg.errors import DmsgError
from dmsg.keys import write_new

NOT_PUBLIC = "metrics are served to programs on this machine; --metrics opens an endpoint for other machines\n"
"""Answer to requests for /metrics from other machines at an entity's public port."""
MIN_TOKEN, MAX_TOKEN = 16, 512
"""Minimum and maximum length of a token in characters."""
TOKEN_BYTES = 18
"""Number of random bytes of a new token, which has 24 characters."""
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
"""Headers that proxies add to requests. A proxy on this machine that adds none of them cannot be distinguished from
another program."""


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


def ensure_token(path: str) -> None:
    """Write a file with a new random token, unless the file exists.

    :raises DmsgError: the file cannot be written, or its token cannot be used, as for :func:`read_token`.
    """
    if not os.path.lexists(path):
        write_new(path, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n")
    read_token(path)


class PageRequest(Interface):
    """Interface of a request: the methods that the access rule uses."""

    def getHeader(self, key: bytes, /) -> bytes | None:
        """Return the value of a header; None if the request does not have it."""

    def getClientAddress(self) -> IAddress:
        """Return the address of the client."""


class Access:
    """Access rule for the status page.

    With a token, every request must contain it, as a bearer token or as the password of basic authentication.

    Without a token, only requests from this machine are allowed, and only if their Host header is an IP address or
    ``localhost``. Otherwise the page of an attacker's web site could read the status page, if the attacker lets the
    site's name resolve to this machine (DNS rebinding). Requests from a proxy are refused, too, if the proxy adds a
    header that names its client. A proxy on this machine without such a header looks like any program. Behind such a
    proxy, set a token.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._token = token

    def refuses(self, request: PageRequest) -> tuple[int, str] | None:
        """Return the status and text of a refusal, or None if the request is allowed."""
        if self._token is not None:
            given = _given_token(request.getHeader(b"authorization") or b"")
            # The comparison takes constant time. The duration of an ordinary comparison would reveal how many
            # characters of a guess are right.
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


LOCAL_ONLY = Access()
"""Access rule without a token. It is for paths of a public port that only programs on the same machine may read, such
as ``/metrics``."""


def is_foreign(request: PageRequest) -> bool:
    """Whether a browser sends the request on behalf of a page of another site.

    Browsers report this in the header Sec-Fetch-Site. Older browsers send the header Origin with requests to another
    site. Other programs send neither header.
    """
    site = request.getHeader(b"sec-fetch-site")
    if site is not None:
        return site.lower() not in (b"same-origin", b"none")
    origin = request.getHeader(b"origin")
    return origin is not None and origin.rpartition(b"//")[2] != request.getHeader(b"host")


def is_script(request: PageRequest) -> bool:
    """Whether a script in a browser sends the request, and not a person who opens the address.

    This check protects against DNS rebinding, which :func:`is_foreign` cannot detect: if the name of another site
    resolves to this machine after the site's page was loaded, the browser considers both as the same site.
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
    """Whether a Host header is an IP address or localhost. Any other name may belong to an attacker."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
