"""A collector's side of the streams: one file at a time, kept before it is said to be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import IO, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.protocols.basic import LineReceiver
from twisted.protocols.policies import TimeoutMixin
from twisted.python.failure import Failure

from dmsg.base.seldom import Seldom
from dmsg.collector.store import Full, Store, Unfit
from dmsg.collector.wire import LINE_LIMIT, Answer, Kind, Offer, WireError, parse_offer
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import transport_of
from dmsg.net.threads import in_thread

QUIET_LIMIT = 60.0
"""Seconds without a byte of who has something to say; then the stream is ended."""
TOLD_EVERY = 600.0
"""Seconds between lines of the log of one kind about one sender: one who waits asks again and again."""
STREAMS_LIMIT = 1024
"""Streams at a time."""
STREAMS_OF_ONE = 2
"""Streams of one sender: one that has lost its way, and the one that it opens instead; a third ends the first."""

_log = Logger()
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class Gone(Exception):
    """The stream was over before its turn came."""


class Receiving(LineReceiver, TimeoutMixin):
    """A stream of one sender."""

    delimiter = b"\n"
    MAX_LENGTH = LINE_LIMIT

    def __init__(self, factory: ReceivingFactory, origin: PubKey) -> None:
        self._factory = factory
        self.origin = origin
        self._offer: Offer | None = None
        self._part: IO[bytes] | None = None
        self._left = 0
        self._over = False

    @property
    def coming(self) -> int:
        """Bytes of the file that is on its way."""
        return 0 if self._offer is None or self._over else self._offer.size

    def callLater(self, seconds: float, call: Callable[[], None]) -> IDelayedCall:  # Twisted's name
        return self._factory.reactor.callLater(seconds, call)

    # --- what comes ---

    def connectionMade(self) -> None:
        self._factory.opened(self)
        self.setTimeout(QUIET_LIMIT)  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        self.resetTimeout()  # type: ignore[no-untyped-call]
        super().dataReceived(data)  # type: ignore[no-untyped-call]

    def lineReceived(self, line: bytes) -> None:
        if self._over:
            return
        try:
            offer = parse_offer(line)
        except WireError as error:
            self._end("malformed", str(error))
            return
        self._offer = offer
        self._in_thread(self._begin, offer).addCallbacks(self._begun, self._failed)

    def lineLengthExceeded(self, line: bytes) -> None:
        if not self._over:
            self._end("malformed", f"a line is longer than {LINE_LIMIT} bytes")

    def rawDataReceived(self, data: bytes) -> None:
        if self._over or self._part is None:
            return
        body, rest = data[: self._left], data[self._left :]
        try:
            self._part.write(body)
        except OSError as error:
            self._discard()
            self._answer(Answer(Kind.LATER, f"the collector cannot write: {error.strerror}"), "disk")
            self.close()
            return
        self._left -= len(body)
        if not self._left:
            part, self._part = self._part, None
            assert self._offer is not None
            self._in_thread(self._factory.store.keep, self.origin, self._offer, part, self._factory.wall()).addBoth(
                self._looked_at, part
            )
            self.setLineMode(rest)  # type: ignore[no-untyped-call]  # paused: it is looked at when this is done

    # --- what is done with it ---

    def _in_thread(
        self, act: Callable[_Arguments, _Result], *args: _Arguments.args, **options: _Arguments.kwargs
    ) -> Deferred[_Result]:
        """Meanwhile nothing more is read, and the sender is not waited for.

        One thing at a time is done for a sender, however many streams it opens: others have their turn.
        """
        self.pauseProducing()  # type: ignore[no-untyped-call]
        self.setTimeout(None)  # type: ignore[no-untyped-call]

        def done(result: _Result | Failure) -> _Result | Failure:
            if not self._over:
                self.setTimeout(QUIET_LIMIT)  # type: ignore[no-untyped-call]
            return result

        def turn() -> Deferred[_Result]:
            if self._over:
                raise Gone
            return in_thread(self._factory.reactor, act, *args, **options)

        return self._factory.turn(self.origin).run(turn).addBoth(done)

    def _go_on(self) -> None:
        if not self._over:
            self.resumeProducing()  # type: ignore[no-untyped-call]

    def _begin(self, offer: Offer) -> IO[bytes] | None:
        store = self._factory.store
        if store.has(self.origin, offer):
            return None
        store.check_room(self.origin, offer.size, *self._factory.coming(self))
        return store.part(self.origin)

    def _begun(self, part: IO[bytes] | None) -> None:
        if self._over:
            if part is not None:
                self._factory.store.discard(part)
            return
        assert self._offer is not None
        if part is None:
            self._offer = None
            self._answer(Answer(Kind.KEPT))
        else:
            self._part, self._left = part, self._offer.size
            self._answer(Answer(Kind.SEND))
            self.setRawMode()  # type: ignore[no-untyped-call]
        self._go_on()

    def _looked_at(self, result: object, part: IO[bytes]) -> None:
        if isinstance(result, Failure):
            self._factory.store.discard(part)
            self._failed(result)
            return
        assert self._offer is not None
        offer, self._offer = self._offer, None
        self._factory.kept(self.origin, offer)
        self._answer(Answer(Kind.KEPT))
        self._go_on()

    def _failed(self, failure: Failure) -> None:
        self._offer = None
        error = failure.value
        if isinstance(error, Gone):
            return
        if isinstance(error, Unfit):
            self._answer(Answer(Kind.REFUSED, str(error)), "unfit")
        elif isinstance(error, Full):
            self._answer(Answer(Kind.LATER, str(error)), "full")
        elif isinstance(error, OSError):
            self._answer(Answer(Kind.LATER, f"the collector cannot write: {error.strerror}"), "disk")
        else:
            _log.failure("keeping a file failed", failure)
            self._answer(Answer(Kind.LATER, "the collector failed"), "failed")
        self._go_on()

    # --- answers, and the end ---

    def _answer(self, answer: Answer, counted: str = "") -> None:
        if counted:
            self._factory.told(self.origin, counted, answer.why)
        if not self._over and self.transport is not None:
            self.sendLine(answer.line())  # type: ignore[no-untyped-call]

    def _end(self, counted: str, why: str) -> None:
        self._factory.told(self.origin, counted, why)
        self.close()

    def close(self) -> None:
        """End the stream; what has come of a file is not kept."""
        self._over = True
        self.setTimeout(None)  # type: ignore[no-untyped-call]
        if self.transport is not None:
            self.transport.loseConnection()

    def timeoutConnection(self) -> None:
        """It has said nothing for :data:`QUIET_LIMIT`."""
        if self._offer is None:
            self.close()  # all was said
        else:
            self._end("silent", "nothing came of a file for too long")

    def replace(self) -> None:
        """The same sender has opened another one: this one takes no place any more."""
        self._end("replaced", "the sender has opened another stream")
        self._discard()
        self._factory.closed(self)
        if self.transport is not None:
            transport_of(self).abortConnection()

    def _discard(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            self._factory.store.discard(part)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._over = True
        self.setTimeout(None)  # type: ignore[no-untyped-call]
        self._discard()
        self._factory.closed(self)


class ReceivingFactory(Factory[Receiving]):
    """All streams of a collector.

    :param allowed: says of a key whether it may bring files.
    :ivar file_count: what was kept since the start; ``byte_count`` of it.
    :ivar refusals: how often something was not kept, by reason.
    :ivar newest: by sender, when its last file came, in seconds since 1970.
    """

    noisy = False

    def __init__(
        self, reactor: IReactorTime, store: Store, allowed: Callable[[PubKey], bool], wall: Callable[[], float]
    ) -> None:
        self.reactor = reactor
        self.store = store
        self.wall = wall
        self._allowed = allowed
        self._streams: list[Receiving] = []
        self._turns: defaultdict[PubKey, DeferredLock] = defaultdict(DeferredLock)
        self._seldom = Seldom(reactor.seconds, TOLD_EVERY)
        self.file_count = self.byte_count = 0
        self.refusals: Counter[str] = Counter()
        self.newest: dict[str, float] = {}

    def admits(self, address: IAddress) -> bool:
        """Whether a key may come at all: asked before its handshake is looked at."""
        return isinstance(address, DmsgAddress) and self._allowed(address.public_key)

    def buildProtocol(self, address: IAddress | None) -> Receiving | None:
        if not isinstance(address, DmsgAddress) or not self._allowed(address.public_key):
            self.refusals["not allowed"] += 1
            return None
        if len(self._streams) >= STREAMS_LIMIT:
            self.refusals["too many streams"] += 1
            return None
        return Receiving(self, address.public_key)

    # --- what its streams say ---

    def opened(self, stream: Receiving) -> None:
        """A stream is there; the oldest of too many of one sender goes."""
        own = [one for one in self._streams if one.origin == stream.origin]
        for one in own[: max(0, len(own) + 1 - STREAMS_OF_ONE)]:
            one.replace()
        self._streams.append(stream)

    def closed(self, stream: Receiving) -> None:
        """A stream is gone."""
        if stream in self._streams:
            self._streams.remove(stream)

    def turn(self, origin: PubKey) -> DeferredLock:
        """Held by the stream of a sender for which something is done."""
        return self._turns[origin]

    def coming(self, besides: Receiving) -> tuple[int, int]:
        """Bytes that other streams are about to bring: those of the same sender, and all."""
        others = [one for one in list(self._streams) if one is not besides]
        return (
            sum(one.coming for one in others if one.origin == besides.origin),
            sum(one.coming for one in others),
        )

    def kept(self, origin: PubKey, offer: Offer) -> None:
        """A file is there."""
        self.file_count += 1
        self.byte_count += offer.size
        self.newest[origin.hex()] = self.wall()

    def told(self, origin: PubKey, reason: str, why: str) -> None:
        """Something was not kept."""
        self.refusals[reason] += 1
        if (more := self._seldom.more((origin, reason))) is not None:
            _log.warn(
                "not kept of {origin}: {reason}: {why}{more}", origin=origin.short, reason=reason, why=why, more=more
            )

    def stop(self) -> None:
        """End all streams."""
        for stream in list(self._streams):
            stream.close()
