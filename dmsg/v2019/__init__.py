"""Protocol family v2019 (dmsg): clients, servers, and streams that are encrypted end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.v2019.client": "Client",
        "dmsg.v2019.server": "Server",
        "dmsg.v2019.core.policing": "Limits",
        "dmsg.v2019.transport_streams": "Encryption",
        "dmsg.v2019.strings": "client_endpoint server_endpoint shared_client",
    },
)

if TYPE_CHECKING:
    from dmsg.v2019.client import Client as Client
    from dmsg.v2019.core.policing import Limits as Limits
    from dmsg.v2019.server import Server as Server
    from dmsg.v2019.strings import (
        client_endpoint as client_endpoint,
        server_endpoint as server_endpoint,
        shared_client as shared_client,
    )
    from dmsg.v2019.transport_streams import Encryption as Encryption
