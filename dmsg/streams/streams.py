"""Manager of one client's secure streams, which outlive their transports.

A secure stream whose transport is lost is *suspended*. The application can still write, but nothing is sent. The
initiator tries to resume the stream over another transport (``reconnect``), and the responder waits to be resumed.
After :data:`~dmsg.base.timeouts.RESUME_TIMEOUT`, either end closes the stream, and the application receives the
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import compact, decrement
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.timeouts import RESUME_TIMEOUT
from dmsg.errors import CloseReason, DmsgError, close_reason_text
from dmsg.keys import PubKey, SecKey
from dmsg.net.isolate import call_isolated
from dmsg.net.own_pauses import PausesBetweenChecks
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import StreamTransport
from dmsg.streams.carrier import ClientStream, NoCarrier
from dmsg.streams.core.agreement import Resume
from dmsg.streams.core.budget import BUDGET, Budget

MAX_ENDED = 4096
"""Maximum number of closed streams whose close reason is remembered, in case the other end has missed the CLOSE. A
reason is remembered for as long as the resume timeout."""
STALL_CHECK = 5.0
"""Seconds between checks for stalled streams."""
PROBE_AFTER = 30.0
"""Seconds without data in either direction after which the initiator of a stream checks its path with a probe."""
STALL_TIME = 15.0
"""Seconds without an ACK after which a stream with data in flight is moved to another transport."""

MAX_SUSPENDED, MAX_SUSPENDED_OF_PEER = 4096, 1024
"""Maximum numbers of suspended streams: in all, and of one peer. Above a maximum, the stream (of all, or of this peer)
that has been suspended for longest is closed, because honest peers return soon. To close a stream of the peer with most
streams would be wrong: keys cost nothing, so an attacker uses many keys with few streams each, and that peer is
probably honest."""
CROWD, CROWD_TIME = 1024, 30.0
"""Number of incoming streams that may be suspended for the whole resume timeout, and seconds after which further ones
are closed. Honest peers return within seconds, while attackers fill the table and disconnect. Streams that are
suspended for a shorter time do not count. Otherwise an attacker could always have new suspended streams, and each other
stream would be closed after ``CROWD_TIME``."""
CROWD_BYTES = 8 * 1024 * 1024
"""Number of bytes that incoming streams that have been suspended for ``CROWD_TIME`` together may buffer. Above it,
those that buffer more than their share are closed, the oldest suspension first, until only one of them is left.
Otherwise an attacker could open large windows, read nothing and disconnect, and the data would stay in memory for two
minutes. A stream with less than its share is not closed, because this would free little memory."""

FINAL_REASONS = frozenset(
    {
        CloseReason.HASH_MISMATCH,
        CloseReason.BUFFER_FULL,
        CloseReason.NO_SUCH_STREAM,
        CloseReason.ABORTED,
        CloseReason.TIMEOUT,
        CloseReason.UNSPECIFIED,
        CloseReason.REFUSED,
        CloseReason.BAD_FRAME,
    }
)
"""Close reasons that end a stream together with its transport, if one of the two ends gave the reason."""

_log = Logger()


IDLE_MOVES = 5
"""Number of consecutive moves without data in between, above which further moves are delayed."""
IDLE_PAUSE = 2.0
"""Maximum seconds by which a move of a stream is delayed because its last moves were followed by no data."""


class Streams:
    """Table of one client's secure streams, which the client's sessions share.

    :param key: secret key of the client.
    :param schedule: schedules a call of a stream's ``flush`` for the end of the reactor turn.
    :param reconnect: resumes a stream over another transport. Its Deferred is cancelled when the attempt is not needed
        any more.
    :param resume_timeout: seconds for which a stream may be without a transport; 0 disables resuming.
    :ivar resumed: number of times that a stream was resumed over another transport.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        schedule: Callable[[StreamTransport], None],
        *,
        resume_timeout: float = RESUME_TIMEOUT,
        budget: Budget | None = None,
        reconnect: Callable[[ClientStream], Deferred[None]] | None = None,
    ) -> None:
        self._reactor = reactor
        self.key = key
        self._log_throttle = LogThrottle(reactor.seconds)
        self.schedule = schedule
        self.resume_timeout = resume_timeout
        self.budget = BUDGET if budget is None else budget
        self.reconnect = reconnect
        self.resumed = 0
        self._live: dict[bytes, ClientStream] = {}
        self._ended: dict[bytes, tuple[float, int, PubKey]] = {}
        self._waiting: dict[ClientStream, tuple[float, int]] = {}
        """Suspended streams, the oldest suspension first. Each has the time at which this end closes it, and the reason
        of the suspension."""
        self._oldest: IDelayedCall | None = None
        self._awaited: dict[ClientStream, None] = {}
        """Suspended streams that other clients opened, the oldest suspension first."""
        self._waiting_of: Counter[IAddress] = Counter()
        self._searching: dict[ClientStream, Deferred[None]] = {}
        self._watch: IDelayedCall | None = None
        self._pauses = PausesBetweenChecks(reactor, STALL_CHECK)
        self._paused = 0.0
        """Seconds for which this process was paused between checks for stalled streams."""
        self._progress: dict[ClientStream, tuple[int, float]] = {}
        self._quiet: dict[ClientStream, tuple[tuple[int, int], float]] = {}
        self._stopped = False

    @property
    def suspended(self) -> int:
        """Number of suspended streams."""
        return len(self._waiting)

    # --- methods that sessions call ---

    def add(self, stream: ClientStream) -> None:
        """Add a stream that has just opened."""
        token = stream.secure_end.token
        if token is not None and (token in self._live or token in self._ended):
            # The initiator has chosen a token that is in use. The new stream must not displace the other one, so it
            # gets no token and cannot be resumed.
            stream.secure_end.token = token = None
        if token is not None:
            self._live[token] = stream
            self._watch_soon()

    def closed(self, stream: ClientStream, reason: int) -> None:
        """Remove a stream that this end has closed. Remember the reason, in case the other end tries to resume the
        stream."""
        end = stream.secure_end
        if end.token is not None and self._live.get(end.token) is stream:
            del self._live[end.token]
            peer = stream.getPeer()
            assert isinstance(peer, DmsgAddress)
            self._ended[end.token] = (self._reactor.seconds() + self.resume_timeout, reason, peer.public_key)
            while len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        self._progress.pop(stream, None)
        self._quiet.pop(stream, None)
        self._stop_waiting(stream)
        searching = self._searching.pop(stream, None)
        if searching is not None:
            searching.cancel()
        if end.transport is not None:
            # The stream was suspended, and this transport was about to carry it.
            end.transport.carrier.leave(reason)
        for transport in list(end.answers):
            transport.carrier.leave(reason)
        end.release()

    def lost(self, stream: ClientStream, reason: int, *, final: bool) -> None:
        """Suspend a stream whose transport is lost, or close the stream if it cannot be resumed.

        :param final: whether one of the two ends gave the reason, so that another transport may be of no use.
        """
        end = stream.secure_end
        if stream.has_ended:
            return
        resumable = end.token is not None and self.resume_timeout > 0 and not self._stopped
        if reason == CloseReason.QUEUE_FULL:
            end.queue_was_full()
        if reason:
            self._tell("stream with {peer} lost its transport: {text}{more}", stream, close_reason_text(reason))
        if not resumable or (final and reason in FINAL_REASONS):
            self.closed(stream, reason)
            stream.carrier_closed(reason if final or reason else CloseReason.PEER_DISCONNECTED)
            return
        self.suspend(stream, reason)
        if end.initiator:
            self._search(stream)

    def suspend(self, stream: ClientStream, reason: int) -> None:
        """Suspend ``stream``, because it has lost its transport for ``reason``."""
        stream.secure_end.detach()
        stream.suspend(NoCarrier(self, stream))
        if stream not in self._waiting:
            self._waiting[stream] = (self._reactor.seconds() + self.resume_timeout, reason)
            self._wait_for_oldest()
            self._waiting_of[stream.getPeer()] += 1
            if not stream.secure_end.initiator:
                self._awaited[stream] = None
            self._make_room(stream)

    def _make_room(self, stream: ClientStream) -> None:
        peer: IAddress = stream.getPeer()
        oldest: ClientStream | None = None
        if self._waiting_of[peer] > MAX_SUSPENDED_OF_PEER:
            oldest = next(one for one in self._waiting if one.getPeer() == peer)
        elif len(self._waiting) > MAX_SUSPENDED:
            oldest = next(iter(self._waiting))
        if oldest is not None:
            self._give_up(oldest, CloseReason.TOO_MANY_TRANSPORTS)

    @property
    def all(self) -> list[ClientStream]:
        """Streams that can be resumed, whether suspended or not."""
        return list(self._live.values())

    def is_live(self, stream: ClientStream) -> bool:
        """Return whether a stream can be resumed: it has a token, it is not closed, and the client is not stopped."""
        return (
            not self._stopped
            and stream.secure_end.token is not None
            and self._live.get(stream.secure_end.token) is stream
        )

    def find_offered(self, resume: Resume, remote: PubKey) -> ClientStream | int | None:
        """Find the stream that ``remote`` wants to resume. Return the close reason if the stream is closed, or None if
        there is no such stream."""
        stream = self._live.get(resume.token)
        if stream is not None:
            peer = stream.getPeer()
            known = isinstance(peer, DmsgAddress) and peer.public_key == remote
            return (
                stream
                if known and resume.generation > stream.secure_end.generation and not stream.secure_end.initiator
                else None
            )
        ended = self._ended.get(resume.token)
        return ended[1] if ended is not None and ended[2] == remote else None

    def note_resumed(self, stream: ClientStream) -> None:
        """Record that a stream was resumed over another transport."""
        self._stop_waiting(stream)
        self._progress.pop(stream, None)
        self.resumed += 1
        self._tell("stream with {peer} goes on{more}", stream)

    def _tell(self, line: str, stream: ClientStream, text: str = "") -> None:
        """Log a line. The lines are throttled for each peer, because a peer can suspend and resume streams as often as
        it likes."""
        peer = str(stream.getPeer())[:13]
        more = self._log_throttle.suffix((line, peer))
        if more is not None:
            _log.info(line, peer=peer, text=text, more=more)

    def migrate(self, stream: ClientStream) -> None:
        """Move a stream to another transport, because its transport is about to end. Do nothing unless this end is the
        initiator."""
        if stream.end is not None and stream.end.token is not None and stream.end.initiator and not stream.has_ended:
            self._search(stream)

    # --- resuming ---

    def before_moving(self, stream: ClientStream) -> float:
        """Return the seconds to wait before the stream is moved to another transport.

        A move after which no data arrived does not count as a success. Otherwise a relay that ends every transport at
        once would make this client reconnect in a tight loop.
        """
        end = stream.secure_end
        progress = end.received, end.acknowledged
        end.idle_moves = end.idle_moves + 1 if progress == end.moved_at else 0
        end.moved_at = progress
        idle = end.idle_moves - IDLE_MOVES
        return 0.0 if idle <= 0 else min(IDLE_PAUSE, 0.1 * 1.5 ** min(idle, 20))

    def _search(self, stream: ClientStream) -> None:
        if stream in self._searching or self.reconnect is None or not self.is_live(stream):
            return
        searching = self.reconnect(stream)
        self._searching[stream] = searching

        def found(result: Failure | None) -> None:
            self._searching.pop(stream, None)
            if isinstance(result, Failure) and not result.check(CancelledError):
                if result.check(DmsgError) is None:
                    _log.failure("unhandled error while a stream was resumed", result)
                if not stream.has_ended and stream in self._waiting:
                    reason = getattr(result.value, "reason", CloseReason.NO_SUCH_STREAM)
                    self._give_up(stream, reason, clean=getattr(result.value, "final", False))
            elif not stream.has_ended and stream in self._waiting and not isinstance(result, Failure):
                # The search began while the stream still had a transport, but this transport was lost before the search
                # ended. So a new search begins.
                self._search(stream)

        searching.addBoth(found)

    def _wait_for_oldest(self) -> None:
        """Start the timer of the stream that was suspended first. One timer is enough, because all streams have the
        same timeout."""
        if self._oldest is None and self._waiting:
            until = next(iter(self._waiting.values()))[0]
            self._oldest = self._reactor.callLater(max(0.0, until - self._reactor.seconds()), self._on_timeout)

    def _on_timeout(self) -> None:
        self._oldest = None
        try:
            now = self._reactor.seconds()
            for stream, (until, reason) in list(self._waiting.items()):
                if until > now:
                    break
                if stream in self._waiting:
                    call_isolated(self._give_up, stream, reason or CloseReason.PEER_DISCONNECTED)
        finally:
            self._wait_for_oldest()

    def _give_up(self, stream: ClientStream, reason: int, *, clean: bool = False) -> None:
        """Close a suspended stream, and report the reason to the application.

        :param clean: whether the remote has closed the stream, so that a reason of 0 means a clean end.
        """
        self._tell("stream with {peer} is given up: {text}{more}", stream, close_reason_text(reason))
        self.closed(stream, reason)
        stream.carrier_closed(reason if clean else reason or CloseReason.PEER_DISCONNECTED)

    def _stop_waiting(self, stream: ClientStream) -> None:
        waiting = self._waiting.pop(stream, None)
        if waiting is None:
            return
        self._awaited.pop(stream, None)
        if not self._waiting and self._oldest is not None:
            self._oldest.cancel()
            self._oldest = None
        peer = stream.getPeer()
        decrement(self._waiting_of, peer)

    # --- stalled streams ---

    def _watch_soon(self) -> None:
        if self._watch is None and not self._stopped:
            self._pauses.begin()
            self._watch = self._reactor.callLater(STALL_CHECK, self._check_streams)

    def _check_streams(self) -> None:
        self._watch = None
        now = self._reactor.seconds()
        self._paused += self._pauses.measure()
        awake = now - self._paused
        self._ended = {token: ended for token, ended in self._ended.items() if ended[0] > now}
        for stream in list(self._live.values()):
            end = stream.secure_end
            before = self._progress.get(stream)
            if not end.in_flight or end.transport is None:
                self._progress.pop(stream, None)
                self._check_quiet(stream, awake)
            elif before is None or before[0] != end.acknowledged:
                self._progress[stream] = (end.acknowledged, awake)
            elif awake - before[1] >= STALL_TIME:
                del self._progress[stream]
                if end.initiator and stream not in self._searching:
                    self._search(stream)
                else:
                    # This end is the responder, which cannot resume the stream, or the initiator, whose search has
                    # found no other server yet. In both cases the transport is closed, and the initiator then resumes
                    # the stream. It can also do so over the present server, which may have lost only a single frame.
                    end.transport.carrier.leave(CloseReason.STALLED)
                    self.suspend(stream, CloseReason.STALLED)
        self._thin_out(now)
        self._live, self._waiting = compact(self._live), compact(self._waiting)
        self._awaited = compact(self._awaited)
        if self._live or self._ended:
            self._watch_soon()

    def _thin_out(self, now: float) -> None:
        """Close the surplus of incoming streams that have been suspended for long."""
        for stream in self._surplus(now):
            # An application may close further streams when one of its streams is closed.
            if stream in self._awaited:
                self._give_up(stream, CloseReason.TOO_MANY_TRANSPORTS)

    def _surplus(self, now: float) -> list[ClientStream]:
        """Return the incoming streams to close, because more than ``CROWD`` have been suspended for ``CROWD_TIME``, or
        because several of these together buffer more than ``CROWD_BYTES``."""
        away = [one for one in self._awaited if one.away_since is not None and now - one.away_since >= CROWD_TIME]
        surplus = away[: max(0, len(away) - CROWD)]
        large = [(stream, _held_by(stream)) for stream in away[len(surplus) :]]
        count, held = len(large), sum(size for _, size in large)
        while held > CROWD_BYTES:
            # The share grows with each stream that is to be closed, so that fewer streams buffer more than their share.
            large = [(stream, size) for stream, size in large if size > CROWD_BYTES / count]
            if len(large) < 2:
                break
            oldest, size = large.pop(0)
            surplus.append(oldest)
            count, held = count - 1, held - size
        return surplus

    def _check_quiet(self, stream: ClientStream, awake: float) -> None:
        """Probe an idle stream, because a server may be dropping the data that the other end sends.

        Only the initiator sends probes, because only the initiator can resume the stream. The probe is a frame without
        data. If its ACK does not arrive, the stream counts as stalled.

        :param awake: time of the reactor's clock, less the pauses of this process.
        """
        end = stream.secure_end
        before = self._quiet.get(stream)
        if end.transport is None or not end.initiator:
            self._quiet.pop(stream, None)
        elif before is None or before[0] != (end.received, end.acknowledged):
            self._quiet[stream] = (end.received, end.acknowledged), awake
        elif awake - before[1] >= PROBE_AFTER:
            self._quiet[stream] = before[0], awake
            stream.probe()

    def stop(self) -> None:
        """Close all suspended streams, because the client stops."""
        self._stopped = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for stream in list(self._waiting):
            self._give_up(stream, CloseReason.ABORTED)
        for searching in list(self._searching.values()):
            searching.cancel()


def _held_by(stream: ClientStream) -> int:
    """Return the number of bytes that a stream buffers: unread, unsent and unacknowledged ones."""
    return stream.held + stream.secure_end.in_flight_bytes
