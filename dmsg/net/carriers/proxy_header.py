"""Header of the PROXY protocol, versions 1 and 2, by which a proxy names the client of a connection. No I/O.

Source: The PROXY protocol, versions 1 and 2 (HAProxy, 2020). A header stands before all other bytes of a connection.
Anybody could write one, so a receiver may only expect it from its own proxies.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
"""First bytes of a PROXY protocol header of version 2. No other protocol begins with these bytes."""
MAX_LINE = 107
"""Maximum number of bytes of a PROXY protocol header of version 1, including CRLF, as its specification says."""
MAX_LENGTH = 2048
"""Maximum number of bytes after the fixed part of a PROXY protocol header of version 2. These bytes are the addresses
and the extensions. The extensions are skipped."""
_BEGINNING = b"PROXY "
_FIXED = 16
"""Number of bytes of the fixed part of a PROXY protocol header of version 2."""
_LINE = re.compile(rb"PROXY TCP([46]) ([0-9A-Fa-f:.]{2,39}) ([0-9A-Fa-f:.]{2,39}) ([0-9]{1,5}) ([0-9]{1,5})\r\n")
_UNKNOWN = re.compile(rb"PROXY UNKNOWN( [^\r\n]*)?\r\n")
_LOCAL, _PROXY = 0, 1
_ADDRESSES = {0: 0, 1: 12, 2: 36, 3: 216}
"""Number of bytes of the two addresses in a PROXY protocol header of version 2, by address family: unspecified, IPv4,
IPv6, UNIX."""
_PROTOCOLS = 3
"""Number of transport protocols that a PROXY protocol header of version 2 can name: unspecified, stream, datagram."""
_STREAM = 1


class ProxyHeaderError(ValueError):
    """Error: the first bytes of a connection are not a valid header of the PROXY protocol."""


class ProxyHeader:
    """Parser of one PROXY protocol header.

    :ivar client: address of the client once the header is complete; empty if the proxy opened the connection for
        itself, or does not know the client.
    :ivar rest: bytes that arrived after the header.
    """

    __slots__ = ("_data", "client", "rest")

    def __init__(self) -> None:
        self._data = b""
        self.client = ""
        self.rest = b""

    def feed(self, data: bytes) -> bool:
        """Process the next bytes, and return whether the header is complete. Do not call the method again after that.

        :raises ProxyHeaderError: the bytes are not a valid header.
        """
        self._data += data
        data = self._data
        if data.startswith(SIGNATURE[: len(data)]):
            size = self._size()
            if not size or len(data) < size:
                return False
            self.client = _client_of_block(data[:size])
        elif data.startswith(_BEGINNING[: len(data)]):
            size = data.find(b"\n", 0, MAX_LINE) + 1
            if not size:
                if len(data) >= MAX_LINE:
                    raise ProxyHeaderError("the line is too long")
                return False
            self.client = _client_of_line(data[:size])
        else:
            raise ProxyHeaderError("the connection does not begin with a header")
        self._data, self.rest = b"", data[size:]
        return True

    def _size(self) -> int:
        """Return the number of bytes of a PROXY protocol header of version 2; 0 if too few bytes have arrived to know
        it."""
        data = self._data
        if len(data) > len(SIGNATURE) and data[len(SIGNATURE)] not in (0x20 | _LOCAL, 0x20 | _PROXY):
            raise ProxyHeaderError("the header's version or command is unknown")
        if len(data) < _FIXED:
            return 0
        length = int.from_bytes(data[_FIXED - 2 : _FIXED], "big")
        if length > MAX_LENGTH:
            raise ProxyHeaderError("the header is too long")
        return _FIXED + length


def _client_of_line(line: bytes) -> str:
    if _UNKNOWN.fullmatch(line):
        return ""
    found = _LINE.fullmatch(line)
    if found is None:
        raise ProxyHeaderError("the line is malformed")
    kind = IPv4Address if found[1] == b"4" else IPv6Address
    try:
        source, _ = kind(found[2].decode()), kind(found[3].decode())
    except ValueError:
        raise ProxyHeaderError("an address is malformed") from None
    if any(int(port) > 65535 or (len(port) > 1 and port.startswith(b"0")) for port in found.group(4, 5)):
        raise ProxyHeaderError("a port is malformed")
    return str(source)


def _client_of_block(header: bytes) -> str:
    if header[12] & 0x0F == _LOCAL:
        return ""  # The proxy has opened the connection for itself, so the rest of the header has no meaning.
    family, protocol = header[13] >> 4, header[13] & 0x0F
    size = _ADDRESSES.get(family)
    if size is None or protocol >= _PROTOCOLS:
        raise ProxyHeaderError("the family or the protocol is unknown")
    block = header[_FIXED:]
    if len(block) < size:
        raise ProxyHeaderError("the addresses are cut off")
    if not family:
        return ""  # An address of the family "unspecified" has no defined format.
    _check_extensions(block[size:])
    if protocol != _STREAM:
        return ""
    if family == 1:
        return str(IPv4Address(block[:4]))
    return str(IPv6Address(block[:16])) if family == 2 else ""


def _check_extensions(data: bytes) -> None:
    """Check that the extensions of a PROXY protocol header fill ``data`` exactly. An extension has a type of 1 byte, a
    length of 2 bytes, and a value."""
    at = 0
    while at < len(data):
        at += 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        if at > len(data):
            raise ProxyHeaderError("an extension is cut off")
