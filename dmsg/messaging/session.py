"""Session of a client with one messaging server, whose channels carry streams.

The rules are in :mod:`dmsg.messaging.core.table`; this module adds Deferreds, timers and producers.

The protocol has no acknowledgements, except with some programs of 2019 (:mod:`dmsg.messaging.core.acks`).  So a message
counts as sent once TCP has accepted it, and the sender cannot know whether it arrived.

The protocol has no windows either.  When an application leaves too many data unread, the session pauses reading of the
whole link, so the link's other channels wait, too.  If an application keeps the link paused for ``STALL_TIMEOUT``
seconds, its channel is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.clients.handshake_limits import HandshakeLimits
from dmsg.clients.session import Session, build_accepted, start_opened, wait_for_answer
from dmsg.errors import (
    CloseReason,
    HandshakeError,
    LocalProtocolError,
    TransportClosed,
    TransportRefused,
)
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.carrier import ChannelCarrier
from dmsg.messaging.core.dialect import SEED, Acks, Dialect
from dmsg.messaging.core.events import Closed, DataReceived, Event, Opened, Rejected, Requested
from dmsg.messaging.core.state import ClientChannel, State
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.streams import ChannelStream
from dmsg.net.flush import TurnFlush
from dmsg.net.isolate import call_isolated
from dmsg.net.links.link import Link
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.pending import Pending
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.turns import HoldReason

OPEN_TIMEOUT = 10.0
"""Default seconds to wait for the answer to an OpenChannel. After that the request is withdrawn."""
CLOSE_LIMIT = 600.0
"""Maximum seconds to wait for ChannelClosed, however many data were sent before the CloseChannel."""
MIN_RATE = 64 * 1024
"""Number of bytes per second that every receiver is assumed to read at least. The time to wait for ChannelClosed
follows from it."""
CLOSE_TIMEOUT = 1.0
"""Minimum seconds to wait for ChannelClosed (the "given timeout" of the seed document; the Go code of 2019 uses 1 s).
After many data the wait is longer, up to ``CLOSE_LIMIT``."""
UNREAD_PAUSE = 1024 * 1024
"""Number of unread bytes of one application above which reading of its link pauses."""
UNREAD_RESUME = UNREAD_PAUSE - 64 * 1024
"""Number of unread bytes at which reading of the link resumes after an application has caused a pause."""
STALL_TIMEOUT = 15.0
"""Maximum seconds for which one application may keep its link paused. This is less than the 30 seconds without progress
after which the server's kernel would end the link with all its channels."""
MAX_UNREAD_OF_CLOSED = 16 * 1024 * 1024
"""Maximum unread bytes of closed channels that are kept for their applications. Above it, the bytes of the oldest
channels are dropped."""

_log = Logger()


class ClientSession(Session):
    """Session of a client with one messaging server.

    :param accept: function that is called for each channel that another client requests. It returns the factory for the
        channel's protocol, or None to refuse the channel.
    :param dialect: dialect of the server and the remotes.  Its ``acks`` says whether clients that open a channel to
        this client use acknowledgements.
    :param handshake_limits: rate limits that refuse OpenChannels before a key agreement is computed.
    """

    core: ClientConnection
    round_trip: float | None = None
    """Round-trip time to the server in seconds, estimated from the duration of the handshake."""

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        key: SecKey,
        server: PubKey,
        dialect: Dialect = SEED,
        *,
        accept: Callable[[], IProtocolFactory | None] = lambda: None,
        handshake_limits: HandshakeLimits | None = None,
        ephemeral: Callable[[], SecKey | None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._local = key.public
        self._dialect = dialect
        core = ClientConnection(
            key,
            dialect.profile,
            two_ids=dialect.two_ids,
            ephemeral=ephemeral,
            refusal=handshake_limits.at(server) if handshake_limits is not None else lambda initiator, ephemeral: None,
        )
        super().__init__(turn, server, core, accept)
        self._handshake_limits = handshake_limits
        self._opening: Pending[ClientChannel, ClientChannel] = Pending()
        self._closing: dict[ClientChannel, FairTimeout] = {}
        self._holding: dict[ClientChannel, FairTimeout] = {}
        self._ended: list[ChannelStream] = []

    # --- called by the application ---

    def open(
        self,
        remote: PubKey,
        factory: IProtocolFactory,
        timeout: float = OPEN_TIMEOUT,
        *,
        ping: bool = False,
        acks: Acks = False,
        greet: bool = False,
    ) -> Deferred[IProtocol]:
        """Open a channel to ``remote`` through this server.

        :param ping: whether the remote's client answers itself and does not notify its program.  A client of 2019 does
            not know pings, so its program sees a channel that is opened and closed.
        :param acks: whether the remote uses acknowledgements; None if its first message decides.
        :param greet: whether to send an empty message first. It tells a client of this package that this side uses no
            acknowledgements.
        :returns: Deferred that fires with the factory's connected protocol.  It fails with
            :class:`~dmsg.errors.TransportRefused`, :class:`~dmsg.errors.DmsgTimeout`,
            :class:`~dmsg.errors.TransportClosed`, or, if all 256 ids are in use,
            :class:`~dmsg.errors.LocalProtocolError`.  Cancelling it closes the channel.
        """
        if not self.connected:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server"))
        try:
            channel = self.core.open(remote, ping=ping, report_messages=True)
        except LocalProtocolError:
            return fail()

        def opened(channel: ClientChannel) -> IProtocol:
            if greet and not ping:
                self._send_message(channel, b"")
            stream = self._make_stream(channel, False if ping else acks)
            return start_opened(stream, factory, partial(self.closed, stream))

        give_up = partial(self._close, channel)
        waiting = wait_for_answer(self, self._reactor, self._opening.add(channel), timeout, give_up)
        return waiting.addCallback(opened)

    def _close_streams(self) -> None:
        for channel in list(self.core.channels.values()):
            if channel.user is None:
                # The remote has not accepted the channel yet, so there is no stream to notify.
                self.core.close(channel)
            elif channel.state is State.OPEN:
                stream: ChannelStream = channel.user
                reason = stream.reason_of_end(stream.reason_of_stop)
                if stream.acks is not None:
                    stream.acks.flush()
                if reason == CloseReason.ABORTED:
                    self._end_now(channel)
                else:
                    self.core.close(channel)
                stream.client_stopped(reason)

    @property
    def transports(self) -> int:
        """Number of channels that are open or are being opened."""
        return len(self.core.channels)

    @property
    def streams(self) -> list[ChannelStream]:
        """Streams of the open channels."""
        return [one.user for one in self.core.channels.values() if one.state is State.OPEN]

    # --- called by the link ---

    def link_up(self, link: Link) -> None:
        super().link_up(link)
        self.connected = True

    def _event_lost(self, event: Event) -> None:
        self._end_now(event.channel)
        stream: ChannelStream | None = event.channel.user
        if stream is not None:
            self._end_stream(stream, CloseReason.ABORTED)

    def _forget_streams(self, reason: Failure) -> Callable[[], None]:
        channels = list(self.core.channels.values())
        self.core.channels.clear()
        for timer in (*self._closing.values(), *self._holding.values()):
            timer.stop()
        self._closing.clear()
        self._holding.clear()

        def tell() -> None:
            self._opening.fail_all(reason)
            for channel in channels:
                stream: ChannelStream | None = channel.user
                if stream is not None:
                    call_isolated(stream.carrier_closed, CloseReason.PEER_DISCONNECTED)

        return tell

    def _send_all(self) -> None:
        if self._link is None:
            return
        for data in self.core.data_to_send():
            self._link.send(data)

    # --- events of the core ---

    def _on_requested(self, event: Requested) -> None:
        channel = event.channel
        if channel.state is not State.OFFERED:
            return  # A ChannelClosed in the same read has already ended the requested channel.
        stream = self._make_stream(channel, self._dialect.acks)
        protocol = build_accepted(self._accept(), stream)
        if protocol is None:
            self.core.close(channel)
            return
        # ChannelOpened must be sent before data that the application may write in ``connectionMade``.
        self.core.accept(channel)
        stream.start(protocol)

    def _on_opened(self, event: Opened) -> None:
        if event.channel.state is not State.OPEN:
            # A callback of an earlier event of the same read may have closed the session.
            gone = TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server")
            self._opening.fail(event.channel, Failure(gone))
            return
        if self._handshake_limits is not None:
            self._handshake_limits.remember_contacted(event.channel.remote)
        self._opening.succeed(event.channel, event.channel)

    def _record_proof(self, channel: ClientChannel) -> None:
        """Record in the handshake limits that the remote has proved its key. Its next requests then count as those of a
        known client."""
        if self._handshake_limits is not None:
            self._handshake_limits.remember(channel.remote)

    def _on_rejected(self, event: Rejected) -> None:
        refused = TransportRefused(CloseReason.UNSPECIFIED, f"refused: {event.why}")
        self._opening.fail(event.channel, Failure(refused))

    def _on_data(self, event: DataReceived) -> None:
        stream: ChannelStream | None = event.channel.user
        if stream is None or stream.has_ended:
            return
        try:
            data = stream.understand(event.data)
        except (HandshakeError, TransportClosed) as error:
            _log.info(
                "the stream with {peer} ends, because a message of its channel is wrong: {error}",
                peer=str(stream.getPeer())[:13],
                error=error,
            )
            self._end_now(event.channel)
            self._end_stream(stream, error.reason if isinstance(error, TransportClosed) else CloseReason.ACKS_DIFFER)
            return
        if data is None:
            return
        if not stream.has_received:
            stream.has_received = True
            self._record_proof(event.channel)
        size = len(data)
        stream.unread += size
        stream.data_received(data)
        # The application gets the data before the link is paused, because it may read them at once.
        if stream.unread > UNREAD_PAUSE and not stream.has_ended and event.channel not in self._holding:
            self._hold(event.channel)

    def _on_closed(self, event: Closed) -> None:
        channel = event.channel
        timer = self._closing.pop(channel, None)
        if channel.state is State.ENDED:
            self._expect_closed(channel)
        stop_timeout(timer)
        stream: ChannelStream | None = channel.user
        if stream is not None:
            self._end_stream(stream, stream.reason_of_end(event.reason))
        if channel in self._holding:
            self._end_pause(channel)

    _handle: dict[type[Event], Callable[..., None]] = {
        Requested: _on_requested,
        Opened: _on_opened,
        Rejected: _on_rejected,
        DataReceived: _on_data,
        Closed: _on_closed,
    }

    # --- applications that do not read ---

    def _hold(self, channel: ClientChannel) -> None:
        """Pause reading of the link, because the application of ``channel`` has too many unread data."""

        def stalled() -> None:
            del self._holding[channel]
            self._end_now(channel)
            self._end_stream(channel.user, CloseReason.STALLED)
            self._end_pause(channel)

        if self._link is not None:
            self._link.hold(HoldReason.UNREAD)
            # A pause of this process also pauses the application.
            self._holding[channel] = FairTimeout(self._reactor, STALL_TIMEOUT, stalled)

    def _end_pause(self, channel: ClientChannel) -> None:
        """End the pause that ``channel`` caused. Reading resumes unless another channel still causes a pause."""
        stop_timeout(self._holding.pop(channel, None))
        if not self._holding and self._link is not None:
            self._link.release(HoldReason.UNREAD)

    def _end_stream(self, stream: ChannelStream, reason: int) -> None:
        """End a stream whose channel has ended, and limit the unread data of all ended streams. Above the limit, the
        oldest streams lose their data."""
        stream.carrier_closed(reason)
        if not stream.waiting:
            return
        self._ended = [one for one in self._ended if one.waiting] + [stream]
        total = sum(one.waiting for one in self._ended)
        while total > MAX_UNREAD_OF_CLOSED:
            oldest = self._ended.pop(0)
            total -= oldest.waiting
            _log.info(
                "unread data of an ended channel with {peer} is dropped: more was left unread than may be buffered",
                peer=str(oldest.getPeer())[:13],
            )
            oldest.abortConnection()

    # --- closing ---

    def _close(self, channel: ClientChannel) -> None:
        if self.core.close(channel):
            self._expect_closed(channel)

    def _expect_closed(self, channel: ClientChannel) -> None:
        """Wait for ChannelClosed. After a timeout, end the channel without it."""

        stream: ChannelStream | None = channel.user
        # The timeout grows with the number of bytes sent, because CloseChannel is queued after them at the server and
        # the receiver.
        sent = stream.sent_bytes if stream is not None else 0
        timeout = max(CLOSE_TIMEOUT, min(CLOSE_LIMIT, sent / MIN_RATE))

        def late() -> None:
            if self._link is not None and (self._link.unsent() or self._holding):
                # The timeout is extended in two cases: CloseChannel is still unsent; or an application on this side
                # does not read, so that the answer to CloseChannel waits behind the unread data.
                self._closing[channel] = FairTimeout(self._reactor, CLOSE_TIMEOUT, late)
                return
            del self._closing[channel]
            self._end_now(channel)
            if stream is not None:
                # Without ChannelClosed, this side cannot know whether the remote has received all data.
                stream.carrier_closed(CloseReason.UNCONFIRMED)

        self._closing[channel] = FairTimeout(self._reactor, timeout, late)

    def _end_now(self, channel: ClientChannel) -> None:
        stop_timeout(self._closing.pop(channel, None))
        if self.core.give_up(channel):
            self.flush()
        if channel in self._holding:
            self._end_pause(channel)

    # --- streams ---

    def _make_stream(self, channel: ClientChannel, acks: Acks) -> ChannelStream:
        carrier = ChannelCarrier(self, channel)
        stream = carrier.stream = ChannelStream(
            self._reactor,
            carrier,
            DmsgAddress(self._local),
            DmsgAddress(channel.remote),
            self._dialect.profile.max_plaintext,
        )
        stream.channel = channel
        stream.secure = True
        channel.user = stream
        channel.reports_messages = acks is not False
        if acks is not False:
            stream.expect_acks(acks is True, partial(self._send_message, channel), partial(self._end_undecided, stream))
        return stream

    def _send_message(self, channel: ClientChannel, message: bytes) -> None:
        """Send a message of the acknowledgement layer."""
        if channel.state is State.OPEN:
            self.core.send(channel, message)
            self.flush()

    def _end_undecided(self, stream: ChannelStream) -> None:
        """End a stream that has queued data, because the remote has not shown whether it uses acknowledgements."""
        self._end_now(stream.channel)
        self._end_stream(stream, CloseReason.ACKS_UNKNOWN)

    # --- CarryingSession, for the carriers of the session's streams ---

    def data_taken(self, stream: ChannelStream) -> None:
        if stream.unread <= UNREAD_RESUME and stream.channel in self._holding:
            self._end_pause(stream.channel)

    def closed(self, stream: ChannelStream, reason: int) -> None:
        if reason == CloseReason.UNSPECIFIED:
            if stream.acks is not None:
                # Acknowledgements are sent before the close. A program of 2019 blocks in its write until its payload is
                # acknowledged.
                stream.acks.flush()
            self._close(stream.channel)
        else:
            self._end_now(stream.channel)  # After an abort, further data from the remote are dropped.
        self.flush()
