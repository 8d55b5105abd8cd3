"""Receiving side of a collector. It receives one file at a time over each stream, and confirms a file once the file is
on the disk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import IO, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.protocols.basic import LineReceiver
from twisted.python.failure import Failure

from dmsg.base.log_throttle import LogThrottle
from dmsg.collector.store import FileRejected, Store, StoreFull
from dmsg.collector.wire import LINE_LIMIT, Answer, Kind, Offer, WireError, parse_offer
from dmsg.keys import PubKey
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import transport_of
from dmsg.net.threads import in_thread

QUIET_LIMIT = 60.0
"""Seconds without a received byte after which a stream is closed."""
LOG_INTERVAL = 600.0
"""Minimum seconds between log lines about one sender and reason, because a sender repeats an offer that is refused for
now."""
STREAMS_LIMIT = 1024
"""Maximum number of streams at a time."""
STREAMS_OF_ONE = 2
"""Maximum number of streams of one sender: one that was lost, but has not timed out, and its replacement. A third
stream closes the oldest.
"""

_log = Logger()
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class StreamGone(Exception):
    """Error: the stream was closed while an operation for it waited for other operations of the same sender."""


class ReceiverProtocol(LineReceiver):
    """Protocol of a stream from one sender."""

    delimiter = b"\n"
    MAX_LENGTH = LINE_LIMIT

    def __init__(self, factory: ReceiverFactory, origin: PubKey) -> None:
        self._factory = factory
        self.origin = origin
        self._offer: Offer | None = None
        self._part: IO[bytes] | None = None
        self._left = 0
        self._is_over = False
        self._quiet: FairTimeout | None = None

    @property
    def incoming_size(self) -> int:
        """Size in bytes of the file that is being received; 0 if there is none."""
        return 0 if self._offer is None or self._is_over else self._offer.size

    def _expect_data(self) -> None:
        """End the stream if no byte arrives within :data:`QUIET_LIMIT` seconds, from now on."""
        stop_timeout(self._quiet)
        self._quiet = FairTimeout(self._factory.reactor, QUIET_LIMIT, self._on_quiet)

    # --- received data ---

    def connectionMade(self) -> None:
        self._factory.opened(self)
        self._expect_data()

    def dataReceived(self, data: bytes) -> None:
        if self._quiet is not None:
            self._quiet.restart()
        super().dataReceived(data)  # type: ignore[no-untyped-call]

    def lineReceived(self, line: bytes) -> None:
        if self._is_over:
            return
        try:
            offer = parse_offer(line)
        except WireError as error:
            self._end("malformed", str(error))
            return
        self._offer = offer
        self._in_thread(self._begin, offer).addCallbacks(self._begun, self._failed)

    def lineLengthExceeded(self, line: bytes) -> None:
        if not self._is_over:
            self._end("malformed", f"a line is longer than {LINE_LIMIT} bytes")

    def rawDataReceived(self, data: bytes) -> None:
        if self._is_over or self._part is None:
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
                self._on_offer_checked, part
            )
            self.setLineMode(rest)  # type: ignore[no-untyped-call]  # paused; the rest is read when the file is kept

    # --- work on a file ---

    def _in_thread(
        self, act: Callable[_Arguments, _Result], *args: _Arguments.args, **options: _Arguments.kwargs
    ) -> Deferred[_Result]:
        """Run blocking work of the store in a thread. Meanwhile the stream is paused, and its timeout is off.

        The calls for one sender run one after the other, even if the sender has several streams. So one sender cannot
        occupy all threads.
        """
        self.pauseProducing()  # type: ignore[no-untyped-call]
        stop_timeout(self._quiet)

        def done(result: _Result | Failure) -> _Result | Failure:
            if not self._is_over:
                self._expect_data()
            return result

        def turn() -> Deferred[_Result]:
            if self._is_over:
                raise StreamGone
            return in_thread(self._factory.reactor, act, *args, **options)

        return self._factory.turn(self.origin).run(turn).addBoth(done)

    def _proceed(self) -> None:
        if not self._is_over:
            self.resumeProducing()  # type: ignore[no-untyped-call]

    def _begin(self, offer: Offer) -> IO[bytes] | None:
        store = self._factory.store
        if store.has(self.origin, offer):
            return None
        store.check_room(self.origin, offer.size, *self._factory.incoming_size(self))
        return store.open_part(self.origin)

    def _begun(self, part: IO[bytes] | None) -> None:
        if self._is_over:
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
        self._proceed()

    def _on_offer_checked(self, result: object, part: IO[bytes]) -> None:
        if isinstance(result, Failure):
            self._factory.store.discard(part)
            self._failed(result)
            return
        assert self._offer is not None
        offer, self._offer = self._offer, None
        self._factory.count_stored(self.origin, offer)
        self._answer(Answer(Kind.KEPT))
        self._proceed()

    def _failed(self, failure: Failure) -> None:
        self._offer = None
        error = failure.value
        if isinstance(error, StreamGone):
            return
        if isinstance(error, FileRejected):
            self._answer(Answer(Kind.REFUSED, str(error)), "unfit")
        elif isinstance(error, StoreFull):
            self._answer(Answer(Kind.LATER, str(error)), "full")
        elif isinstance(error, OSError):
            self._answer(Answer(Kind.LATER, f"the collector cannot write: {error.strerror}"), "disk")
        else:
            _log.failure("unhandled error while a received file was stored", failure)
            self._answer(Answer(Kind.LATER, "the collector failed"), "failed")
        self._proceed()

    # --- answers and closing ---

    def _answer(self, answer: Answer, counted: str = "") -> None:
        if counted:
            self._factory.count_refusal(self.origin, counted, answer.why)
        if not self._is_over and self.transport is not None:
            self.sendLine(answer.line())  # type: ignore[no-untyped-call]

    def _end(self, drop_reason: str, text: str) -> None:
        self._factory.count_refusal(self.origin, drop_reason, text)
        self.close()

    def close(self) -> None:
        """Close the stream. A file that has not arrived completely is discarded."""
        self._is_over = True
        stop_timeout(self._quiet)
        if self.transport is not None:
            self.transport.loseConnection()

    def _on_quiet(self) -> None:
        """Close the stream after :data:`QUIET_LIMIT` seconds without a byte."""
        if self._offer is None:
            self.close()  # If no file is pending, this is a normal end.
        else:
            self._end("silent", "no data of the file arrived for too long")

    def replace(self) -> None:
        """Abort this stream at once, because its sender has opened another one and has too many."""
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
        self._is_over = True
        stop_timeout(self._quiet)
        self._discard()
        self._factory.closed(self)


class ReceiverFactory(Factory[ReceiverProtocol]):
    """Factory of a collector's streams.

    :param is_allowed: function that returns whether a key may send files.
    :ivar file_count: number of files stored since the start.
    :ivar byte_count: total size of these files in bytes.
    :ivar refusals: number of refusals by reason.
    :ivar newest: time of the last file of each sender, in seconds since 1970.
    """

    noisy = False

    def __init__(
        self, reactor: IReactorTime, store: Store, is_allowed: Callable[[PubKey], bool], wall: Callable[[], float]
    ) -> None:
        self.reactor = reactor
        self.store = store
        self.wall = wall
        self._allowed = is_allowed
        self._streams: list[ReceiverProtocol] = []
        self._turns: defaultdict[PubKey, DeferredLock] = defaultdict(DeferredLock)
        self._log_throttle = LogThrottle(reactor.seconds, LOG_INTERVAL)
        self.file_count = self.byte_count = 0
        self.refusals: Counter[str] = Counter()
        self.newest: dict[str, float] = {}

    def admits(self, address: IAddress) -> bool:
        """Whether a key may connect. The caller checks this before the handshake, so that strangers cannot cause
        cryptographic work."""
        return isinstance(address, DmsgAddress) and self._allowed(address.public_key)

    def buildProtocol(self, address: IAddress | None) -> ReceiverProtocol | None:
        # The key is checked again, because the list of senders may have changed since the handshake began.
        if not isinstance(address, DmsgAddress) or not self._allowed(address.public_key):
            self.refusals["not allowed"] += 1
            return None
        if len(self._streams) >= STREAMS_LIMIT:
            self.refusals["too many streams"] += 1
            return None
        return ReceiverProtocol(self, address.public_key)

    # --- called by the streams ---

    def opened(self, stream: ReceiverProtocol) -> None:
        """Register a new stream. If its sender has too many streams, abort the sender's oldest one."""
        own = [one for one in self._streams if one.origin == stream.origin]
        for one in own[: max(0, len(own) + 1 - STREAMS_OF_ONE)]:
            one.replace()
        self._streams.append(stream)

    def closed(self, stream: ReceiverProtocol) -> None:
        """Remove a stream that has ended."""
        if stream in self._streams:
            self._streams.remove(stream)

    def turn(self, origin: PubKey) -> DeferredLock:
        """Return the lock under which the work for one sender is done."""
        return self._turns[origin]

    def incoming_size(self, besides: ReceiverProtocol) -> tuple[int, int]:
        """Return the total size in bytes of the files that are being received over other streams: from the same sender,
        and from all senders.

        :param besides: stream whose file is left out.
        """
        # The list is copied, because this method runs in a thread while the reactor may change the list.
        others = [one for one in list(self._streams) if one is not besides]
        return (
            sum(one.incoming_size for one in others if one.origin == besides.origin),
            sum(one.incoming_size for one in others),
        )

    def count_stored(self, origin: PubKey, offer: Offer) -> None:
        """Count a file that was stored."""
        self.file_count += 1
        self.byte_count += offer.size
        self.newest[origin.hex()] = self.wall()

    def count_refusal(self, origin: PubKey, reason: str, text: str) -> None:
        """Count a refusal, and log it. For each sender and reason, at most one refusal in :data:`LOG_INTERVAL` seconds
        is logged."""
        self.refusals[reason] += 1
        if (more := self._log_throttle.suffix((origin, reason))) is not None:
            _log.warn(
                "a file of {origin} was refused ({reason}): {why}{more}",
                origin=origin.short,
                reason=reason,
                why=text,
                more=more,
            )

    def stop(self) -> None:
        """Close all streams."""
        for stream in list(self._streams):
            stream.close()
