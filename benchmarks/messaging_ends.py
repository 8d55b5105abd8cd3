"""The two programs of :mod:`benchmarks.messaging`: one sends through a client, the other receives."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.client import cpu_seconds
from dmsg.keys import PubKey, SecKey

SIZES = (64, 1024, 16 * 1024, 60 * 1024)
OPEN_SECONDS = 2.0
SECONDS = 1.5
END = b"the end!"


async def _session(reactor: Any, turn: Any, where: dict[str, Any], factory: Any) -> Any:
    from dmsg.messaging.core.dialect import Dialect
    from dmsg.messaging.core.wire import Profile
    from dmsg.messaging.dial import SessionEndpoint

    key = SecKey.generate()
    address = f"{where['host']}:{where['port']}"
    server = PubKey.from_hex(where["server"])
    endpoint = SessionEndpoint(reactor, turn, key, server, address, Dialect(Profile.SEED), lambda: factory)
    return key, await endpoint.open()


async def _receive(reactor: Any, where: dict[str, Any]) -> None:
    from twisted.internet.defer import Deferred
    from twisted.internet.protocol import Factory, Protocol

    from dmsg.net.flush import TurnFlush

    class Sink(Protocol):
        """Discards; says when the end is there; a message that starts with E comes back."""

        def dataReceived(self, data: bytes) -> None:
            if data[:1] == b"E" or data.endswith(END):
                assert self.transport is not None
                self.transport.write(data if data[:1] == b"E" else b"K")

    turn = TurnFlush(reactor)
    keys = [
        (await _session(reactor, turn, where, Factory.forProtocol(Sink)))[0].public.hex() for _ in range(where["pairs"])
    ]
    print(json.dumps(keys), flush=True)
    await Deferred()


async def _send(reactor: Any, where: dict[str, Any]) -> None:
    from twisted.internet.defer import Deferred, gatherResults
    from twisted.internet.protocol import Factory, Protocol

    from dmsg.net.flush import TurnFlush

    class Waits(Protocol):
        answered: Any = None
        expected = 0

        def dataReceived(self, data: bytes) -> None:
            self.expected -= len(data)
            if self.expected <= 0 and self.answered is not None:
                answered, self.answered = self.answered, None
                answered.callback(None)

        def answer(self, size: int = 1) -> Any:
            self.expected = size
            self.answered = Deferred()
            return self.answered

    factory = Factory.forProtocol(Waits)
    turn = TurnFlush(reactor)
    ends = []
    for key in where["keys"]:
        _, session = await _session(reactor, turn, where, None)
        ends.append((session, PubKey.from_hex(key)))

    async def opens(session: Any, remote: PubKey, until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            protocol: Any = await session.open(remote, factory)
            ended: Any = Deferred()
            protocol.connectionLost = lambda reason, ended=ended: ended.callback(None)
            protocol.transport.loseConnection()
            await ended
            count += 1
        return count

    before, begin = cpu_seconds(), time.perf_counter()
    until = begin + OPEN_SECONDS
    counts = await gatherResults([Deferred.fromCoroutine(opens(*end, until)) for end in ends])
    _report("channels opened and closed, both clients", sum(counts), time.perf_counter() - begin, before)

    protocols: list[Any] = [await session.open(remote, factory) for session, remote in ends]
    for size in SIZES:
        for joined in (False, True) if size < 16 * 1024 else (False,):
            before, begin = cpu_seconds(), time.perf_counter()
            pushes = [_Push(one, size, begin + SECONDS, joined) for one in protocols]
            await gatherResults([push.done for push in pushes])
            await gatherResults([one.answer() for one in protocols])
            what = f"Send of {size} B" + (", written as they come" if joined else "")
            _report(what, sum(push.count for push in pushes), time.perf_counter() - begin, before, size)
    for size in SIZES:
        protocol, times = protocols[0], []
        for _ in range(1000):
            answer = protocol.answer(size)
            begin = time.perf_counter()
            protocol.transport.write(b"E" * size)
            await answer
            times.append(time.perf_counter() - begin)
        times.sort()
        row = {"what": f"echo of {size} B", "echo": size, "p50_ms": times[500] * 1e3, "p99_ms": times[990] * 1e3}
        print(json.dumps(row), flush=True)


class _Push:
    """Sends messages as long as the transport takes them, until it is time."""

    def __init__(self, protocol: Any, size: int, until: float, joined: bool) -> None:
        from twisted.internet.defer import Deferred

        self.count = 0
        self.done: Any = Deferred()
        self._transport = protocol.transport
        self._data = bytes(size)
        self._until = until
        self._joined = joined
        self._paused = False
        self._at_once = max(1, 65536 // size)
        self._transport.registerProducer(self, True)
        self._go()

    def _go(self) -> None:
        from twisted.internet import reactor

        if self._paused or self.done.called:
            return
        transport, data = self._transport, self._data
        for _ in range(self._at_once):
            if self._joined:
                transport.write(data)
            else:
                transport.send(data)
        self.count += self._at_once
        if time.perf_counter() >= self._until:
            transport.unregisterProducer()
            transport.write(END)
            self.done.callback(None)
        else:
            reactor.callLater(0, self._go)

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        self._go()

    def stopProducing(self) -> None:
        self.done.errback(RuntimeError("the channel ended"))


def _report(what: str, count: int, seconds: float, before: float, size: int | None = None) -> None:
    row: dict[str, Any] = {
        "what": what,
        "per_second": count / seconds,
        "per_sender_cpu_second": count / (cpu_seconds() - before),
    }
    if size is not None:
        row |= {"size": size, "mb_s": count * size / seconds / 1e6}
    print(json.dumps(row), flush=True)


def _main() -> None:
    from twisted.internet.defer import Deferred
    from twisted.internet.task import react

    role, where = sys.argv[1], json.loads(sys.argv[2])
    main = _receive if role == "receive" else _send
    react(lambda reactor: Deferred.fromCoroutine(main(reactor, where)))


if __name__ == "__main__":
    _main()
