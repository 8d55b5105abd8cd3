"""Enemies that are clients themselves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred

from benchmarks.siege.scene import ready
from dmsg.keys import SecKey
from dmsg.v2019.client import Client

reactor: Any = _reactor


def run_clients(
    seconds: float, discovery: str, number: int, act: Callable[[list[Client]], Coroutine[Any, Any, None]]
) -> None:
    """Run ``act`` with ``number`` clients for ``seconds``.

    :param discovery: URL.
    """

    async def main() -> None:
        clients = [Client(reactor, SecKey.generate(), [discovery], min_servers=1) for _ in range(number)]
        for client in clients:
            client.startService()
        for client in clients:
            await client.when_online()
        ready()
        reactor.callLater(seconds, reactor.stop)
        await act(clients)

    reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()).addErrback(lambda failure: failure.printTraceback()))
    reactor.run()
