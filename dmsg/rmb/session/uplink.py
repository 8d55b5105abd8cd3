"""Uplink of a session: connections to its relays, which are reopened when lost, and an outbox of the messages that no
relay has confirmed.

A message leaves the outbox when a relay has answered a ping that was sent after it. When a connection is lost, its
unconfirmed messages are sent again over another connection; receivers recognise repeated messages. In the other
direction, a relay's ping is answered when all messages received before it are processed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.printable import without_userinfo
from dmsg.errors import DmsgError, DmsgTimeout
from dmsg.net.flush import TurnFlush
from dmsg.net.own_pauses import PausesBetweenChecks, add_fair_timeout
from dmsg.net.reactor import cancel_call
from dmsg.net.retry import retry_delay
from dmsg.net.turns import HoldReason
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.errors import CallTimeout, Drop, RmbError
from dmsg.rmb.socket.confirm import Ledger, Message
from dmsg.rmb.socket.connect import connect
from dmsg.rmb.socket.websocket import GOING_AWAY, NORMAL, Socket

CLOCK_ERRORS = ("jwt has expired", "jwt: was issued in the future")
"""Ends of the errors with which relays refuse a token because of its times."""
WINDOW = 1024
"""Maximum number of unconfirmed messages that are sent to one relay."""
MAX_OUTBOX = 20_000
"""Maximum number of messages in a session's outbox."""
MAX_OUTBOX_SIZE = 256 * 1024 * 1024
"""Maximum bytes of the messages in a session's outbox."""
ROUND_INTERVAL = 2.0
"""Seconds between two checks of the connections."""
PING_EVERY = 20.0
"""Seconds without sent data, or without received data, after which a ping is sent."""
SILENT_AFTER = 40.0
"""Seconds without received data after which a connection is closed."""
STEADY_AFTER = 10.0
"""Seconds after which a connection counts as steady. When a steady connection is lost, the backoff starts again with
its shortest delay."""
MAX_UNHANDLED, MAX_UNHANDLED_SIZE = 1000, 64 * 1024 * 1024
"""Number, and bytes, of received but unprocessed messages at which reading from the relay pauses."""
UNCONFIRMED_AFTER = 60.0
"""Seconds after which a connection is closed if a confirmation is expected and none arrives, even if other data
arrive."""

_log = Logger()


class OutboxFull(RmbError):
    """Error: the outbox is full, because no relay has confirmed its messages."""


class MessageTooLarge(RmbError):
    """Error: the message is larger than relays accept."""


class Outgoing:
    """Message that no relay has confirmed yet.

    :ivar confirmed: Deferred that fires when a relay has confirmed the message. It fails with CallTimeout if the
        message expired before.
    """

    __slots__ = ("confirmed", "data", "until")

    def __init__(self, data: bytes, until: float) -> None:
        self.data = data
        self.until = until
        self.confirmed: Deferred[None] = Deferred()


class RelayLink:
    """Connection to one relay, which is reopened when lost.

    Implements :class:`~dmsg.rmb.socket.websocket.Receiver`.
    """

    def __init__(self, uplink: Uplink, reactor: IReactorTime, url: str, turn: TurnFlush, random: Random) -> None:
        self.url = url
        self.shown_url = without_userinfo(self.url)
        self._uplink = uplink
        self._reactor = reactor
        self._turn = turn
        self._random = random
        self._socket: Socket | None = None
        self._window: deque[Outgoing] = deque()
        self._sent_count = 0
        self._confirmed_count = 0
        self._barrier = False
        self._ledger = Ledger(lambda payload: None)
        self._call: IDelayedCall | None = None
        self._connecting: Deferred[Socket] | None = None
        self._failures = 0
        self._since = 0.0
        self._heard_at = 0.0
        self._spoke_at = 0.0
        self._asked_at = 0.0
        self._stopped = True
        self._half: Socket | None = None
        self.error: str | None = None
        """Reason why the relay is not connected, or None."""

    @property
    def connected(self) -> bool:
        """Whether the relay is connected."""
        return self._socket is not None

    @property
    def has_room(self) -> bool:
        """Whether another message may be sent now."""
        return self._socket is not None and len(self._window) < WINDOW

    @property
    def is_settled(self) -> bool:
        """Whether neither the relay nor this side still has messages to confirm."""
        return self._socket is None or not (self._window or len(self._ledger))

    def start(self) -> None:
        """Connect to the relay, and reconnect whenever the connection is lost."""
        self._stopped = False
        self._connect()

    def stop(self) -> None:
        """Disconnect, and do not reconnect."""
        self._stopped = True
        cancel_call(self._call)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._socket is not None:
            self._socket.close(NORMAL, "")
        elif self._half is not None:
            self._half.abort()

    def _connect(self) -> None:
        if self._stopped:
            return
        try:
            query = self._uplink.make_token()
            self._connecting = connect(self._reactor, self.url, query, self, self._turn)
        except Exception as error:  # An exception is raised, for example, if autobahn refuses the URL.
            self._reconnect(str(error))
            return

        def done(result: Socket | Failure) -> None:
            self._connecting = None
            if isinstance(result, Failure):
                if not result.check(CancelledError):
                    self._reconnect(str(result.value) or type(result.value).__name__)
                return
            # TCP is connected, but the handshake of the websocket is not finished.
            self._half = result
            if self._stopped:
                result.abort()

        self._connecting.addBoth(done)

    def _reconnect(self, reason: str) -> None:
        if self._stopped:
            return
        self._failures += 1
        if self._failures == 1 or reason != self.error:
            _log.warn("cannot connect to the relay {url}; retrying: {why}", url=self.shown_url, why=reason)
        self.error = reason
        self._call = self._reactor.callLater(retry_delay(self._failures, self._random), self._connect)

    # --- the socket ---

    def opened(self, socket: Socket) -> None:
        if self._stopped:
            socket.close(GOING_AWAY, "")
            return
        now = self._reactor.seconds()
        self._socket = socket
        self._sent_count = self._confirmed_count = 0
        self._barrier = False
        # A ping may be answered only on its own connection. So each connection has its own list of unanswered pings.
        self._ledger = Ledger(partial(self._answer, socket), partial(self._message_failed, socket))
        self._since = self._heard_at = self._spoke_at = now
        self.error = None
        _log.info("connected to the relay {url}", url=self.shown_url)
        self._uplink.link_up(self)

    def lost(self, reason: str) -> None:
        self._half = None
        if self._socket is not None:
            self._socket = None
            if self._reactor.seconds() - self._since >= STEADY_AFTER:
                self._failures = 0
            left, self._window = self._window, deque()
            self._uplink.link_down(self, left)
        self._reconnect(reason)

    def received(self, data: bytes) -> None:
        message = Message(data, 0.0, self._ledger)
        self._ledger.add(message)
        ledger, socket = self._ledger, self._socket
        full = len(ledger) >= MAX_UNHANDLED or ledger.size >= MAX_UNHANDLED_SIZE
        if full and ledger.on_few_left is None and socket is not None:
            socket.hold(HoldReason.UNHANDLED)
            ledger.on_few_left = lambda: socket.release(HoldReason.UNHANDLED)

        def done(is_accepted: bool) -> None:
            if is_accepted:
                message.settle()
            else:
                message.lose()

        self._uplink.received(data, done)

    def _message_failed(self, socket: Socket) -> None:
        """Close the connection, because a message of the relay could not be processed. The relay will send it again
        over another connection."""
        if self._socket is socket:
            self.error = f"a message of {self.shown_url} could not be processed"
            socket.abort()

    def ping_received(self, payload: bytes) -> None:
        self._ledger.ping(payload)

    def _answer(self, socket: Socket, payload: bytes) -> None:
        if self._socket is socket:
            self._spoke_at = self._reactor.seconds()
            socket.pong(payload)

    def pong_received(self, payload: bytes) -> None:
        if len(payload) != 8:
            return
        # A relay could answer with any number, so the number is limited to that of the sent messages.
        number = min(int.from_bytes(payload, "big"), self._sent_count)
        self._barrier = False
        confirmed = []
        while self._confirmed_count < number:
            confirmed.append(self._window.popleft())
            self._confirmed_count += 1
        if self._window:
            self._ask()
        self._uplink.confirmed(confirmed)

    # --- outbound ---

    def send(self, message: Outgoing) -> None:
        """Send a message. Then send a ping, if the relay has answered all earlier pings."""
        assert self._socket is not None
        self._window.append(message)
        self._sent_count += 1
        self._spoke_at = self._reactor.seconds()
        self._socket.send(message.data)
        if not self._barrier:
            self._ask()

    def _ask(self) -> None:
        assert self._socket is not None
        self._barrier = True
        self._asked_at = self._reactor.seconds()
        self._socket.ping(self._sent_count.to_bytes(8, "big"))

    def round(self, paused: float) -> None:
        """Check whether the relay is still alive. Called every few seconds.

        :param paused: seconds since the last call for which this process was paused.
        """
        socket = self._socket
        if socket is None:
            return
        now = self._reactor.seconds()
        self._heard_at += paused
        self._asked_at += paused
        if socket.has_received:
            socket.has_received = False
            self._heard_at = now
        if now - self._heard_at >= SILENT_AFTER:
            self.error = f"{self.shown_url} was silent for {SILENT_AFTER:g} s"
            socket.abort()
        elif self._barrier and now - self._asked_at >= UNCONFIRMED_AFTER:
            self.error = f"{self.shown_url} confirmed nothing for {UNCONFIRMED_AFTER:g} s"
            socket.abort()
        elif now - self._spoke_at >= PING_EVERY or now - self._heard_at >= PING_EVERY:
            self._spoke_at = now
            socket.ping(b"")


async def report_outcome(
    taking: Coroutine[Deferred[object], object, None], done: Callable[[bool], None], drops: Counter[Drop]
) -> None:
    """Await ``taking``, and call ``done`` with True if the message was processed, or False if the relay must send it
    again.

    After an error of this package, the relay must send the message again. After an unexpected exception, the message
    counts as processed, because the exception would recur.
    """
    taken = False
    try:
        await taking
        taken = True
    except CancelledError:
        raise  # This program is stopping, so the relay must send the message to its next process.
    except DmsgError as error:
        _log.warn("a message could not be processed; the relay will send it again: {error}", error=str(error))
    except Exception:
        _log.failure("unhandled error: a message could not be processed and is dropped")
        drops[Drop.NOT_HANDLED] += 1
        taken = True
    finally:
        done(taken)


class Uplink:
    """Connections of a session to all its relays, with a common outbox.

    :param urls: URLs of relays, ``ws://`` or ``wss://``. A relay that connects while no other is connected is preferred
        from then on.
    :param make_token: function that returns a new token for each connection attempt.
    :param on_received: callback for each received message. Its second argument is a function to call when the message
        is processed, with True, or with False if the relay must send it again.
    :param wall_clock: function that returns seconds since 1970.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        urls: Sequence[str],
        make_token: Callable[[], str],
        on_received: Callable[[bytes, Callable[[bool], None]], None],
        wall_clock: Callable[[], float],
        random: Random | None = None,
    ) -> None:
        self._reactor = reactor
        self.make_token = make_token
        self.received = on_received
        self._now = wall_clock
        turn = TurnFlush(reactor)
        random = random or Random()
        self.links = [RelayLink(self, reactor, url, turn, random) for url in urls]
        self._waiting: deque[Outgoing] = deque()
        self._held = 0
        self._size = 0
        self._round = LoopingCall(self._check_links)
        self._round.clock = reactor
        self._pauses = PausesBetweenChecks(reactor, ROUND_INTERVAL)
        self._online: list[Deferred[None]] = []

    def __len__(self) -> int:
        return self._held

    @property
    def connected(self) -> bool:
        """Whether at least one relay is connected."""
        return any(link.connected for link in self.links)

    @property
    def last_error(self) -> str | None:
        """Reasons why relays are not connected, as one text, or None."""
        errors = [f"{link.shown_url}: {link.error}" for link in self.links if link.error]
        if any(error.endswith(CLOCK_ERRORS) for error in errors):
            # A token is made for each attempt, so one of the two clocks is wrong.
            errors.append("is the clock of this machine or of the relay wrong?")
        return "; ".join(errors) or None

    def start(self) -> None:
        """Connect to all relays."""
        for link in self.links:
            link.start()
        self._pauses.begin()
        self._round.start(ROUND_INTERVAL, now=False)

    def stop(self) -> None:
        """Close all connections, and fail the Deferreds of :meth:`when_online`. Unconfirmed messages stay
        unconfirmed."""
        if self._round.running:
            self._round.stop()
        for link in self.links:
            link.stop()
        self._fire_online(Failure(RmbError("the client is stopped")))

    @property
    def is_settled(self) -> bool:
        """Whether relays have confirmed all sent messages, and all received messages are processed and confirmed."""
        return all(link.is_settled for link in self.links)

    def when_online(self, timeout: float) -> Deferred[None]:
        """Return a Deferred that fires when a relay is connected.

        The Deferred fails with DmsgTimeout if that takes too long, or with RmbError if the client is stopped.
        """
        online: Deferred[None] = Deferred()

        def too_late(_: object, seconds: float) -> None:
            raise DmsgTimeout(f"no relay within {seconds:g} s" + (f" ({why})" if (why := self.last_error) else ""))

        add_fair_timeout(online, timeout, self._reactor, too_late)
        if self.connected:
            online.callback(None)
        else:
            self._online.append(online)
        return online

    # --- outbound ---

    def send(self, data: bytes, until: float) -> Deferred[None]:
        """Send a message. The Deferred fires when a relay has confirmed it.

        The Deferred fails with CallTimeout if the message expires before, with OutboxFull, or with MessageTooLarge.
        """
        message = Outgoing(data, until)
        if len(data) > MAX_MESSAGE:
            # The message is refused here. Otherwise every relay would close the connection because of the message, and
            # the message would be sent again for ever.
            message.confirmed.errback(MessageTooLarge(f"a message of {len(data)} bytes; {MAX_MESSAGE} are allowed"))
            return message.confirmed
        if self._held >= MAX_OUTBOX or self._size + len(data) > MAX_OUTBOX_SIZE:
            message.confirmed.errback(OutboxFull("too many messages wait for a relay"))
            return message.confirmed
        self._held += 1
        self._size += len(data)
        if self._waiting or not self._send(message):
            self._waiting.append(message)
        return message.confirmed

    def _send(self, message: Outgoing) -> bool:
        for link in self.links:
            if link.has_room:
                link.send(message)
                return True
        return False

    def _send_waiting(self) -> None:
        while self._waiting:
            if not self._send(self._waiting[0]):
                return
            self._waiting.popleft()

    def confirmed(self, messages: list[Outgoing]) -> None:
        """Fire the Deferreds of messages that a relay has confirmed."""
        for message in messages:
            self._done(message)
            message.confirmed.callback(None)
        self._send_waiting()

    def _done(self, message: Outgoing) -> None:
        self._held -= 1
        self._size -= len(message.data)

    # --- relays that connect or are lost ---

    def link_up(self, link: RelayLink) -> None:
        """Use a relay that has connected: send the waiting messages. If no other relay is connected, prefer this one
        from now on."""
        if not any(other.connected for other in self.links if other is not link):
            self.links.remove(link)
            self.links.insert(0, link)
        self._fire_online()
        self._send_waiting()

    def _fire_online(self, result: Failure | None = None) -> None:
        waiting, self._online = self._online, []
        for one in waiting:
            if not one.called:
                one.callback(result)

    def link_down(self, link: RelayLink, left: deque[Outgoing]) -> None:
        """Put the unconfirmed messages of a lost connection at the front of the outbox, and send them over another
        connection."""
        self._waiting.extendleft(reversed(left))
        self._send_waiting()

    def _check_links(self) -> None:
        try:
            self._check_all()
        except Exception:
            _log.failure("unhandled error in a periodic task of the connection to a relay")

    def _check_all(self) -> None:
        paused = self._pauses.measure()
        for link in self.links:
            link.round(paused)
        now = self._now()
        if self._waiting and any(message.until <= now for message in self._waiting):
            waiting, self._waiting = self._waiting, deque()
            for message in waiting:
                if message.until > now:
                    self._waiting.append(message)
                else:
                    self._done(message)
                    message.confirmed.errback(CallTimeout("message has expired before it could be sent"))
