"""Addresses at which clients have reached discovery, according to the Host headers of their requests.

A machine behind a router does not know its public address. A client outside connects to that address, and writes it
into the Host header.
"""

from __future__ import annotations

from twisted.logger import Logger
from twisted.web.iweb import IRequest

from dmsg.net.addresses import MAX_ADDRESS, is_public, parse_ip

REACHED_AT = "has reached discovery at"
"""Words of a log line between the client's address and the address that the client used. ``dmsg host`` parses the line.
"""
MAX_REACHED = 8
"""Maximum number of addresses that are logged. The number is limited because a client can write any address into the
header.
"""

_log = Logger()


class ReachedAt:
    """Logger of the public IP addresses at which clients have reached discovery. Each address is logged once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def requested(self, request: IRequest) -> None:
        """Log the host in the request's Host header, if it is a public IP address that was not logged yet."""
        if len(self._known) >= MAX_REACHED:
            return
        host = request.getRequestHostname().decode("latin-1").strip("[]")
        if host in self._known or len(host) > MAX_ADDRESS or not is_public(host):
            return
        host = str(parse_ip(host))
        self._known.add(host)
        client = str(getattr(request.getClientAddress(), "host", "?"))
        _log.info("{client} " + REACHED_AT + " {host}", client=client, host=host)
