"""dmsg for scripts and notebooks: an API with blocking calls; Twisted's reactor runs in a thread of its own.

::

    with dmsg.blocking.connect(key, 7, timeout=10) as stream:
        stream.send(b"hello")
        print(stream.recv(100))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.blocking.client": "Client Listener connect listen",
        "dmsg.blocking.reactor": "NotPossibleHere",
        "dmsg.blocking.streams": "Stream",
    },
)

if TYPE_CHECKING:
    from dmsg.blocking.client import Client as Client, Listener as Listener, connect as connect, listen as listen
    from dmsg.blocking.reactor import NotPossibleHere as NotPossibleHere
    from dmsg.blocking.streams import Stream as Stream
