"""dmsg for programs that run on asyncio; they need no knowledge of Twisted.

Streams are pairs of :class:`asyncio.StreamReader` and :class:`asyncio.StreamWriter`::

    async def main():
        async with dmsg.aio.connect(key, 7) as (reader, writer):
            writer.write(b"hello")
            print(await reader.read(100))

    asyncio.run(main())

Internally this is the client of :mod:`dmsg`. It runs on Twisted's reactor for asyncio, in the program's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.aio.client": "Client Listener connect listen",
        "dmsg.aio.reactor": "WrongEventLoop",
        "dmsg.aio.streams": "Stream",
    },
)

if TYPE_CHECKING:
    from dmsg.aio.client import Client as Client, Listener as Listener, connect as connect, listen as listen
    from dmsg.aio.reactor import WrongEventLoop as WrongEventLoop
    from dmsg.aio.streams import Stream as Stream
