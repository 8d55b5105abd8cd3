"""Protocol family of the Messaging System, the predecessor of dmsg. Clients open channels to each other through
servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.messaging.client": "Client",
        "dmsg.messaging.server": "Server",
        "dmsg.messaging.core.policing": "Limits",
        "dmsg.messaging.core.wire": "Profile",
        "dmsg.messaging.strings": "client_endpoint server_endpoint shared_client",
    },
)

if TYPE_CHECKING:
    from dmsg.messaging.client import Client as Client
    from dmsg.messaging.core.policing import Limits as Limits
    from dmsg.messaging.core.wire import Profile as Profile
    from dmsg.messaging.server import Server as Server
    from dmsg.messaging.strings import (
        client_endpoint as client_endpoint,
        server_endpoint as server_endpoint,
        shared_client as shared_client,
    )
