"""How an entry is written: names, order and escapes, which its signature covers.  No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmsg.discovery.gojson import go_string

if TYPE_CHECKING:
    from dmsg.discovery.entry import ClientMeta, Entry, ServerMeta, Successor


@dataclass(frozen=True, slots=True)
class Spelling:
    """The members of entries as one generation of programs calls them, in their order on the wire.

    What another generation calls otherwise is another instance; entries carry
    the one that they were signed in (``Entry.spelling``).

    :ivar delegated_servers: the member of ``client``.
    :ivar server: the members of ``server``: address, port, free connections.
    :ivar string: a string with its quotes and escapes.
    """

    delegated_servers: str
    server: tuple[str, str, str]
    string: Callable[[str], str]

    def write(self, entry: Entry, *, signed: bool) -> bytes:
        """The JSON of an entry without white space.

        :param signed: with its signature; without, it is what is signed.
        """
        parts = [
            f'{{"version":{self.string(entry.version)},"sequence":{entry.sequence}'
            f',"timestamp":{entry.timestamp},"static":"{entry.static}"'
        ]
        if entry.client is not None:
            parts.append(self._client(entry.client))
        if entry.server is not None:
            parts.append(self._server(entry.server))
        if entry.successor is not None:
            parts.append(self._successor(entry.successor))
        if signed and entry.signature:
            parts.append(f',"signature":"{entry.signature}"')
        parts.append("}")
        return "".join(parts).encode()

    def _client(self, client: ClientMeta) -> str:
        servers = client.delegated_servers
        listed = "null" if servers is None else "[" + ",".join(f'"{key}"' for key in servers) + "]"
        return f',"client":{{"{self.delegated_servers}":{listed}}}'

    def _server(self, server: ServerMeta) -> str:
        address, port, connections = self.server
        # who leaves the field out signs without it
        optional = "" if server.port is None else f'"{port}":{self.string(server.port)},'
        return (
            f',"server":{{"{address}":{self.string(server.address)},{optional}'
            f'"{connections}":{server.available_connections}}}'
        )

    def _successor(self, successor: Successor) -> str:
        return f',"successor":{{"static":"{successor.static}","signature":"{successor.signature}"}}'


SPELLING = Spelling("delegated_servers", ("address", "port", "available_connections"), go_string)
"""That of the seed documents and of 2019."""
