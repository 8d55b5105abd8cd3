"""Invitations: one line of text with all that a machine needs to join a network.

An invitation is ``dmsg1`` and then base32 (RFC 4648, lower case, without padding) of a payload and its checksum, the
first 4 bytes of the payload's SHA-256. Numbers are big endian. The payload:

====================  ==========================================================================================
bytes                 meaning
====================  ==========================================================================================
1                     flags: 1 discovery speaks TLS, 2 the server has a host of its own, 4 the URL has a path
HOST                  host of discovery
2                     port of discovery
1 + n                 length and ASCII text of the path, with flag 4 only
33                    public key of the server, compressed point
HOST                  host of the server, with flag 2 only; else the server is at discovery's host
2                     port of the server
1 + n                 length and ASCII text of the network's name, which its host has chosen
====================  ==========================================================================================

HOST begins with one byte for its kind: 4 for an IPv4 address (4 bytes), 6 for an IPv6 address (16 bytes), or 0 for a
DNS name in ASCII with its length in one byte before it.

An invitation contains no secret. It says where a network is, but gives no permission to use it. With the key of the
server, the reader can check whether discovery belongs to the right network: discovery's entry for this key must have
the key's signature. But an impostor could present a recorded entry, so only a handshake with the server is a proof.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from dmsg.clients.address_book import check_name
from dmsg.errors import DmsgError, KeyFormatError, WrongUse
from dmsg.keys import PUBKEY_SIZE, PubKey, sha256
from dmsg.net.addresses import is_host, parse_address

PREFIX = "dmsg1"
"""Prefix of every invitation. Its digit is the version of the format."""
CHECKSUM_SIZE = 4
MAX_INVITATION = 1024
"""Maximum number of characters of an invitation."""
DEFAULT_PORTS = {"http": 80, "https": 443}
_TLS, _OWN_HOST, _PATH = 1, 2, 4
_NAME, _IPV4, _IPV6 = 0, 4, 6
_URL_PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")
"""Regular expression for the path of a URL, with the characters that RFC 3986 allows."""


class NotAnInvitation(WrongUse, ValueError):
    """Error: a text is not an invitation, or a value does not fit into one."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Content of an invitation.

    :ivar name: name of the network, chosen by its host. Names of the address book follow the same rules.
    :ivar discovery: URL of its discovery, ``http://HOST:PORT`` or ``https://HOST:PORT/PATH``.
    :ivar server: public key of one of its servers.
    :ivar address: ``HOST:PORT`` of that server.
    """

    name: str
    discovery: str
    server: PubKey
    address: str

    @property
    def text(self) -> str:
        """Encoded invitation, one word.

        :raises NotAnInvitation: a value does not fit into an invitation.
        """
        url = urlsplit(self.discovery)
        host, port = parse_address(self.address)
        if url.scheme not in DEFAULT_PORTS or not url.hostname or url.username or url.query or url.fragment:
            raise NotAnInvitation("the URL of discovery may have a scheme, a host, a port and a path, but nothing else")
        path = url.path.rstrip("/")
        if path and not _is_path(path):
            raise NotAnInvitation(f"{path[:80]!r} is not a valid path of the URL of discovery in an invitation")
        flags = _TLS if url.scheme == "https" else 0
        flags |= _OWN_HOST if host != url.hostname else 0
        flags |= _PATH if path else 0
        parts = [bytes([flags]), _host(url.hostname), _number(url.port or DEFAULT_PORTS[url.scheme])]
        parts += [_short(path)] if path else []
        parts += [bytes(self.server), *([_host(host)] if flags & _OWN_HOST else []), _number(port), _short(self.name)]
        payload = b"".join(parts)
        return PREFIX + base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()


def parse_invitation(text: str) -> Invitation:
    """Parse an invitation. White space and upper case are accepted, because people and QR codes add both.

    :raises NotAnInvitation: ``text`` is not an invitation, or a mistake was made in copying it; the error says which.
    """
    # White space is removed, because mail programs and terminals break the long line. Upper case is accepted, because
    # QR codes are smaller in upper case.
    text = "".join(text.split()).lower()
    if len(text) > MAX_INVITATION or not text.startswith(PREFIX):
        raise NotAnInvitation(f"an invitation begins with {PREFIX}: copy the invitation that 'dmsg host' prints")
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b32decode(encoded.upper() + "=" * (-len(encoded) % 8))
    except (binascii.Error, ValueError):
        raise NotAnInvitation("this invitation has a character too many, too few, or a wrong one") from None
    payload, checksum = data[:-CHECKSUM_SIZE], data[-CHECKSUM_SIZE:]
    if _checksum(payload) != checksum:
        raise NotAnInvitation("this invitation was not copied whole: its checksum does not match")
    try:
        found = _read(_Reader(payload))
    except (ValueError, IndexError) as error:
        raise NotAnInvitation(f"this invitation is malformed: {error}") from None
    if found.text != text:
        raise NotAnInvitation("this invitation is malformed: its fields are not in their shortest form")
    return found


class _Reader:
    """Reader of fields from the front of a payload."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def rest(self) -> int:
        """Number of bytes that are not read yet."""
        return len(self._data)

    def take(self, size: int) -> bytes:
        """Read the next ``size`` bytes.

        :raises ValueError: the payload has fewer bytes left.
        """
        if len(self._data) < size:
            raise ValueError("its last field is incomplete")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def text(self) -> str:
        return self.take(self.number(1)).decode("ascii")

    def host(self) -> str:
        """Read a host.

        :raises ValueError: the host is neither IPv4, nor IPv6, nor a name.
        """
        kind = self.number(1)
        if kind == _IPV4:
            return str(IPv4Address(self.take(4)))
        if kind == _IPV6:
            return str(IPv6Address(self.take(16)))
        if kind != _NAME:
            raise ValueError("discovery's host is neither an IPv4 address, nor an IPv6 address, nor a name")
        name = self.text()
        if ":" in name or name != name.lower() or not is_host(name):
            raise ValueError("discovery's host is not a DNS name")
        return name

    def path(self) -> str:
        """Read the path of a URL.

        :raises ValueError: the path has a character or a segment, such as ``..``, that is not allowed.
        """
        path = self.text()
        if not _is_path(path):
            raise ValueError("discovery's path has characters that a URL cannot have")
        return path


def _read(payload: _Reader) -> Invitation:
    flags = payload.number(1)
    # An unknown flag is an error, because it may stand for a further field. Without that field, the rest of the payload
    # would be misread.
    if flags & ~(_TLS | _OWN_HOST | _PATH):
        raise ValueError("a newer version of dmsg is needed to read this invitation")
    scheme = "https" if flags & _TLS else "http"
    host, port = payload.host(), payload.number(2)
    path = payload.path() if flags & _PATH else ""
    try:
        key = PubKey(payload.take(PUBKEY_SIZE))
    except KeyFormatError as error:
        raise ValueError(str(error)) from None
    own = payload.host() if flags & _OWN_HOST else host
    address = at_port(own, payload.number(2))
    name = payload.text()
    # Trailing bytes are an error, so that each invitation has only one valid text.
    if payload.rest:
        raise ValueError("bytes follow the last field")
    shown = _bracket(host) if port == DEFAULT_PORTS[scheme] else at_port(host, port)
    try:
        parse_address(address)
        return Invitation(check_name(name), f"{scheme}://{shown}{path}", key, address)
    except DmsgError as error:
        raise ValueError(str(error)) from None


def _is_path(text: str) -> bool:
    return _URL_PATH.fullmatch(text) is not None and not {".", ".."} & set(text.split("/"))


def at_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address."""
    return f"{_bracket(host)}:{port}"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host(host: str) -> bytes:
    try:
        number = ip_address(host)
    except ValueError:
        return bytes([_NAME]) + _short(host)
    return bytes([number.version]) + number.packed


def _number(value: int) -> bytes:
    return value.to_bytes(2, "big")


def _short(text: str) -> bytes:
    """Encode an ASCII text, with its length in one byte before it.

    :raises NotAnInvitation: the text is longer than 255 characters, or not ASCII.
    """
    try:
        data = text.encode("ascii")
        return bytes([len(data)]) + data
    except ValueError:
        raise NotAnInvitation(
            f"{text[:80]!r} does not fit into an invitation: at most 255 characters of ASCII"
        ) from None


def _checksum(payload: bytes) -> bytes:
    return sha256(payload)[:CHECKSUM_SIZE]
