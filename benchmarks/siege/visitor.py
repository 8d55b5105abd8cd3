"""``python -m benchmarks.siege.visitor URL``: innocent clients that do what is asked on standard input, in JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from twisted.internet import reactor as _reactor, stdio
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.protocols.basic import LineOnlyReceiver
from twisted.web.client import Agent, HTTPConnectionPool, readBody

from dmsg.apps.codes.pake import Role
from dmsg.apps.codes.stream import PORT, CodeEnd, CodeFactory
from dmsg.apps.codes.words import Code
from dmsg.clients.http import DmsgEndpointFactory
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey
from dmsg.v2019.client import Client

CONNECT_TIMEOUT = 5.0
"""Seconds for a stream."""
SAID_AFTER = 2.0
"""Seconds after which a code is typed: a person has to say it to another one."""

reactor: Any = _reactor


class Visits:
    """Innocent clients.

    :param discovery: URL.
    """

    def __init__(self, discovery: str) -> None:
        self._discovery = discovery
        self._client = self._new_client()
        pool = HTTPConnectionPool(reactor)
        endpoints = DmsgEndpointFactory(self._client, timeout=CONNECT_TIMEOUT)
        self._agent = Agent.usingEndpointFactory(reactor, endpoints, pool)
        self._probe: Any = None

    def _new_client(self) -> Client:
        client = Client(reactor, SecKey.generate(), [self._discovery], min_servers=1)
        client.startService()
        return client

    async def read(self, key: str, path: str) -> None:
        """Fetch a file from a program that serves files, over a stream that is kept open."""
        answer = await self._agent.request(b"GET", f"http://{key}{path}".encode())
        await readBody(answer)
        if answer.code != 200:
            raise DmsgError(f"status {answer.code}")

    async def probe(self, key: str) -> None:
        """Make a round trip to a peer, over a stream that is kept open."""
        if self._probe is None:
            protocol: Any = await self._client.probe(PubKey.from_hex(key), timeout=CONNECT_TIMEOUT)
            self._probe = protocol.transport
        try:
            await self._probe.send(b"").addTimeout(CONNECT_TIMEOUT, reactor)
        except BaseException:
            self._probe = None
            raise

    async def code(self) -> None:
        """Make a code, and type it elsewhere as soon as it is said."""
        maker, taker = self._new_client(), self._new_client()
        try:
            await maker.when_online()
            nameplate = await maker.claim_nameplate()
            code = Code.make(nameplate.number)
            offer = CodeFactory(reactor, code)
            offer.agreed.addErrback(lambda _: None)  # The other end reports the error.
            maker.listen(offer, PORT)
            await deferLater(reactor, SAID_AFTER)
            await taker.when_online()
            end = CodeEnd(reactor, Role.RECEIVER, code)
            factory = Factory.forProtocol(lambda: end)
            await taker.connect(await taker.find_nameplate(code.nameplate), factory, PORT, timeout=CONNECT_TIMEOUT)
            await end.agreed
            with suppress(DmsgError):
                await nameplate.release()
        finally:
            for client in (maker, taker):
                client.stopService()


class Orders(LineOnlyReceiver):
    """Lines of JSON, each with ``number``, ``act`` and what the act has to know."""

    delimiter = b"\n"

    def __init__(self, visits: Visits) -> None:
        self._visits = visits

    def lineReceived(self, line: bytes) -> None:
        order = json.loads(line)
        number, act = order.pop("number"), order.pop("act")
        visit: Callable[..., Coroutine[Any, Any, None]] = getattr(self._visits, act)

        def over(result: Any) -> None:
            error = "" if result is None else str(result.value) or type(result.value).__name__
            self.sendLine(json.dumps({"number": number, "error": error}).encode())

        Deferred.fromCoroutine(visit(**order)).addBoth(over)

    def connectionLost(self, reason: object = None) -> None:
        if reactor.running:
            reactor.stop()


if __name__ == "__main__":
    stdio.StandardIO(Orders(Visits(sys.argv[1])))
    reactor.run()
