"""Addresses at which clients have reached discovery, as the Host headers of their requests name them.

A machine behind a router does not know its public address, but a client that came from outside does.
"""

from __future__ import annotations

from twisted.logger import Logger
from twisted.web.iweb import IRequest

from dmsg.net.addresses import MAX_ADDRESS, is_public, parse_ip

REACHED_AT = "has reached discovery at"
"""Words of the line in the log, between the client's address and the one that it used. ``dmsg host`` reads the line."""
MAX_REACHED = 8
"""Maximum number of addresses that are logged. A client can name any address, so further ones are ignored."""

_log = Logger()


class ReachedAt:
    """Log of the public IP addresses at which clients have reached discovery, each once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def requested(self, request: IRequest) -> None:
        """Log the host that a request names, if it is a public IP address and new."""
        if len(self._known) >= MAX_REACHED:
            return
        host = request.getRequestHostname().decode("latin-1").strip("[]")
        if host in self._known or len(host) > MAX_ADDRESS or not is_public(host):
            return
        host = str(parse_ip(host))
        self._known.add(host)
        client = str(getattr(request.getClientAddress(), "host", "?"))
        _log.info("{client} {reached} {host}", client=client, reached=REACHED_AT, host=host)
