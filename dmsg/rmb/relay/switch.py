"""Switch of a relay: routes each message from the session that sends it to its destination.

A message is received and admitted. It is then delivered, or its receiver is looked up and the message is queued,
forwarded, offered to other relays (probed), or refused.  The rules are in :mod:`dmsg.rmb.relay.rules`, the delivery and
confirmation of messages is in :mod:`dmsg.rmb.relay.delivery`, and the acceptance of messages from other relays is in
:mod:`dmsg.rmb.relay.inbound.accept`.

Every accepted message ends in exactly one way: its receiver confirms it, a queue stores it, another relay accepts it,
or it is refused with a reason to its sender. Only then does the relay answer the pings that the sender sent after it.
So a sender that repeats unconfirmed messages loses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.errors import DmsgError
from dmsg.net.isolate import call_isolated
from dmsg.rmb.envelope import texts
from dmsg.rmb.envelope.wire import decode, to_pong
from dmsg.rmb.errors import Drop, EnvelopeError, QueueUnavailable
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.relay.backlog import BACKLOG_MESSAGES
from dmsg.rmb.relay.deliveries import Deliveries
from dmsg.rmb.relay.federation.attempts import AttemptOutcome
from dmsg.rmb.relay.federation.forward import FULL, Federation
from dmsg.rmb.relay.limit_log import LimitLog
from dmsg.rmb.relay.lookups import LookupLines, WaitingMail
from dmsg.rmb.relay.mail import Header, Mail, error_answer
from dmsg.rmb.relay.presence import Presence
from dmsg.rmb.relay.queue.interface import FEDERATION, QueuedMessage, QueueId, RelayQueue
from dmsg.rmb.relay.rules import Action, MessageRefused, Rules
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.socket.websocket import BAD_DATA, GOING_AWAY, TOO_MUCH, TRY_LATER
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.twin import Twin

MAX_UNFINISHED = 256 * 1024 * 1024
"""Maximum bytes of all incomplete messages. Above it, the sessions with the largest ones are ended."""
FRAGMENT_RATE, FRAGMENT_BURST = 1000.0, 10_000.0
"""Number of small fragments that one twin may send per second, and in a burst. Above it, the session is ended."""

_T = TypeVar("_T")

_log = Logger()


class Switch:
    """Sessions of a relay, and the messages between them.

    :param make_federation: function that creates the federation. Its arguments are a function that returns whether the
        session with a given name is connected here, and the callback for finished messages that came from the queue.
    :param wall_clock: function that returns seconds since 1970.
    :ivar sessions: connected sessions by address.
    :ivar counters: numbers and bytes of messages, for the metrics.
    """

    def __init__(
        self,
        clock: IReactorTime,
        rules: Rules,
        registry: CachedRegistry,
        queue: RelayQueue,
        make_federation: Callable[[Callable[[str], bool], Callable[[Mail, str | None], None]], Federation],
        wall_clock: Callable[[], float],
        *,
        durable: bool = False,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        """Create a switch without sessions.

        :param durable: whether messages are stored before delivery if they come from a session that never repeats an
            unconfirmed message.
        :param max_unfinished: maximum bytes of all incomplete messages.
        """
        self.durable = durable
        self._max_unfinished = max_unfinished
        self.limited = LimitLog(clock)
        self._fragments = RateLimit(FRAGMENT_RATE, FRAGMENT_BURST)
        self._clock = clock
        self.rules = rules
        self.registry = registry
        self.queue = queue
        self.now = wall_clock
        self.deliveries = Deliveries(clock, queue, wall_clock, self.answer_expired)
        self.presence = Presence(clock)
        self.sessions = self.presence.sessions
        self.counters: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.dropped_oldest = 0
        self.parked: dict[RelaySession, None] = {}
        """Sessions whose messages were buffered while they were paused. ``SessionHoldings`` removes those that have
        none left."""
        self.growing: dict[RelaySession, None] = {}
        """Sessions with a large incomplete message."""
        self.lookups = LookupLines(clock, registry, self._on_lookup)
        self.unfinished = 0
        """Number of bytes of all incomplete messages."""
        # The limits of the backlog are at most half of those of the stored queue. Otherwise storing a whole backlog
        # could evict the oldest messages of the queue.
        self.backlog_messages = max(1, min(BACKLOG_MESSAGES, queue.limits.messages // 2))
        self.backlog_size = queue.limits.size // 2
        self.federation = make_federation(self.presence.is_here, self._forwarded)
        queue.watch(self)

    # --- sessions ---

    def connected(self, session: RelaySession) -> None:
        """Register a session whose socket is open, and end an older connection of the same session."""
        before = self.presence.add(session)
        if before is not None:
            # When the old connection is ended, its unconfirmed messages are stored in the queue, and the new connection
            # reads them from there.
            call_isolated(before.end, Drop.REPLACED, GOING_AWAY, "another connection of this session replaced this one")
        session.heard_at = self._clock.seconds()
        self.queue.note_connected(str(session.session))
        session.delivery.start()

    def lost(self, session: RelaySession) -> None:
        """Remove a session whose connection was lost. Unconfirmed messages to the session go to its queue."""
        if session.is_lost:
            return
        session.is_lost = True
        if self.presence.remove(session):
            self.queue.note_absent(str(session.session))
        self.deliveries.waiting.pop(session.delivery, None)
        self.lookups.forget_lost(session)
        self.unfinished -= session.unfinished
        session.unfinished = 0
        self.growing.pop(session, None)
        session.buffer.clear()
        self.parked.pop(session, None)
        for message in session.delivery.close():
            call_isolated(partial(self._enqueue, session.session, message, answers=False))

    def call_next_turn(self, call: Callable[[], None]) -> None:
        """Call a function in the next reactor turn."""
        self._clock.callLater(0, call)

    def count_fragments(self, session: RelaySession, small: int) -> None:
        """Charge each small fragment of a session as a message, because it costs as much work as a message."""
        self.rules.charge(session.owner, small, self.now())
        if self._fragments.charge(str(session.owner), small, self._clock.seconds()) > 0.0:
            session.end(Drop.FRAGMENTS, TOO_MUCH, "too many small fragments")

    def check_unfinished(self) -> None:
        """End the sessions with the largest incomplete messages until all incomplete messages are within their
        limit."""
        if self.unfinished <= self._max_unfinished:
            return
        for session in sorted(self.growing, key=lambda one: one.unfinished, reverse=True):
            if self.unfinished <= self._max_unfinished:
                break
            session.end(
                Drop.UNFINISHED, TRY_LATER, "too many bytes of incomplete messages, most of them from this session"
            )

    # --- path of a message ---

    def received(self, session: RelaySession, data: bytes) -> None:
        """Process one message of a session: check it, then deliver or route it."""
        mail = self._admit(session, data)
        if mail is None:
            return
        # The message is added to the sender's ledger before anything can fail, so that later pings of the sender wait
        # for it.
        session.ledger.add(mail)
        if self._deliver(mail):
            return
        number = mail.destination.twin
        twin = self.registry.get_cached(number)
        # While earlier messages to the same twin wait for the registry, this message must wait, too. It must not
        # overtake them.
        if twin is not None and number not in self.lookups:
            self._route(session, mail, twin)
        else:
            self.lookups.add(WaitingMail(session, mail))

    def _admit(self, session: RelaySession, data: bytes) -> Mail | None:
        """Check a message. Return the message, or for a ping its answer; None if the message is refused or is not an
        envelope."""
        now = self.now()
        try:
            envelope = decode(data)
        except EnvelopeError:
            session.end(Drop.BAD_FRAME, BAD_DATA, "not an envelope")
            return None
        header = Header(envelope)
        try:
            is_ping = self.rules.admit(session.session, header, len(data), now)
        except MessageRefused as refused:
            if refused.drop is Drop.RATE_LIMITED:
                self.limited.count(session.session.twin)
            self._refuse(header, refused.drop, session.session)
            return None
        if is_ping:
            to_pong(envelope)
            data, header = envelope.SerializeToString(), Header(envelope)
        return Mail(data, header.until(now), session.ledger, header, sender=session.owner)

    def _deliver(self, mail: Mail) -> bool:
        """Deliver a message, directly or through the queue, to a receiver that is connected here. Return False if it is
        not connected."""
        receiver = self.sessions.get(mail.destination)
        if receiver is None:
            return False
        self.count_in(mail)
        self.rules.grant_answer(mail.header, self.now())
        if not receiver.delivery.offer(mail):
            self._enqueue(mail.destination, mail)
        return True

    def count_in(self, mail: Message) -> None:
        """Count an accepted message for the metrics."""
        self.counters["message_rx"] += 1
        self.counters["message_rx_bytes"] += len(mail.data)

    def _on_lookup(self, waiting: WaitingMail, result: Twin | Failure | None) -> None:
        """Route a message after the registry has answered or failed.

        If the registry has failed, the sender of a request gets an error. Any other message counts as lost, and its
        sender sends it again.
        """
        session, mail = waiting
        if not isinstance(result, Failure):
            # The receiver may have connected while the registry was queried.
            if not self._deliver(mail):
                self._route(session, mail, result)
            return
        self.rules.drops[Drop.REGISTRY_DOWN] += 1
        if mail.header.wants_answer:
            why = f"failed to get twin: {result.value}"
            self._send_error(mail.header, texts.NOT_ROUTED.format(peer=mail.destination, why=why))
            mail.settle()
        else:
            mail.lose()

    def _route(self, session: RelaySession, mail: Mail, twin: Twin | None) -> None:
        """Queue, forward, offer (probe) or refuse a message whose receiver is not connected here, as the rules
        decide."""
        decision = self.rules.route(mail.header, twin)
        if decision.action is not Action.REFUSE:
            self.rules.grant_answer(mail.header, self.now())
        if decision.action is Action.QUEUE:
            self.count_in(mail)
            self._enqueue(mail.destination, mail, other_relays=decision.relays)
        elif decision.action is Action.FORWARD:
            self.federation.forward(mail, decision.relays, self._forwarded)
        elif decision.action is Action.PROBE:
            self._unless_elsewhere(mail, lambda: self._probe(mail, decision.relays))
        elif decision.drop is Drop.OFFLINE:
            self._unless_elsewhere(mail, lambda: self._offline(mail))
        else:
            assert decision.drop is not None
            self._refuse(mail.header, decision.drop, session.session)
            mail.settle()

    def _unless_elsewhere(self, mail: Mail, on_here: Callable[[], None]) -> None:
        """Store a message in the queue if the session is connected to another process that uses the same queue.
        Otherwise call ``on_here``."""

        def known(elsewhere: bool) -> None:
            if elsewhere:
                self.count_in(mail)
                self._enqueue(mail.destination, mail)
            else:
                on_here()

        self.queue.is_elsewhere(str(mail.destination)).addErrback(lambda _: False).addCallback(known)

    def _offline(self, mail: Mail) -> None:
        """Refuse a message whose receiver is offline, unless the receiver reconnects in a moment."""

        def known(is_back: bool) -> None:
            if not (is_back and self._deliver(mail)):
                self.rules.drops[Drop.OFFLINE] += 1
                self._send_error(mail.header, texts.OFFLINE)
                mail.settle()

        self.presence.wait_for_session(mail.destination).addCallback(known)

    def _probe(self, mail: Mail, relays: frozenset[str]) -> None:
        """Offer a message to the receiver's other relays, because the session may be connected to one of them."""

        def probed(outcome: AttemptOutcome) -> None:
            if outcome is AttemptOutcome.TAKEN:
                mail.settle()
            else:
                self._offline(mail)

        offering = self.federation.asking.offer(mail.data, relays, mail.sender)
        offering.addErrback(lambda _: AttemptOutcome.FAILED).addCallback(probed)

    def _forwarded(self, mail: Mail, error: str | None) -> None:
        """Settle a message that another relay has accepted, or that could not be forwarded."""
        if error is not None:
            full = Drop.FEDERATION_FULL if error == FULL else Drop.FEDERATION_REFUSED
            self.rules.drops[Drop.EXPIRED if error == texts.EXPIRED else full] += 1
            # As in the reference implementation, this error names no destination.
            self._send_error(mail.header, error, addressed=False)
        mail.settle()

    # --- errors ---

    def _refuse(self, header: Header, drop: Drop, to: Session) -> None:
        self.rules.drops[drop] += 1
        self._send_error(header, texts.TEXTS[drop], to)

    def _send_error(self, header: Header, text: str, to: Session | None = None, *, addressed: bool = True) -> None:
        """If a message is a request, send an error about it to its sender.

        :param to: session that sent the message; None uses the source in the header.
        """
        if not header.wants_answer:
            return
        to = header.source if to is None else to
        # The source has no twin, for example because a relay made the message. It cannot receive an answer.
        if not to.twin:
            return
        said = error_answer(header, text, to if addressed else None, self.now())
        self.count_in(said)
        receiver = self.sessions.get(to)
        if receiver is None or not receiver.delivery.offer(said):
            self._enqueue(to, said)

    def answer_expired(self, data: bytes) -> None:
        """Notify the sender of a stored message that the message has expired, if the sender uses this relay."""
        self.rules.drops[Drop.EXPIRED] += 1
        try:
            header = Header.read(data)
        except EnvelopeError:
            return
        twin = self.registry.get_cached(header.source.twin)
        # A sender that is not connected gets the notification from its queue.  A sender that uses another relay would
        # never get it, so nothing is stored for such a sender.
        if header.source in self.sessions or (twin is not None and twin.relays & self.rules.domains):
            self._send_error(header, texts.EXPIRED)

    # --- queues ---

    def _enqueue(
        self, session: Session, mail: Message, *, other_relays: frozenset[str] = frozenset(), answers: bool = True
    ) -> None:
        """Store a message in the queue of a session.

        :param other_relays: relays to which the receiver may be connected.
        :param answers: whether the sender gets an error if this fails. Otherwise the sender must send the message
            again.
        """
        # No later message may overtake this one while it is being written to the queue.
        connected = self.sessions.get(session)
        if connected is not None:
            connected.delivery.appending += 1

        def ended(result: _T) -> _T:
            if connected is not None:
                connected.delivery.appending -= 1
            return result

        def failed(failure: Failure) -> None:
            self._store_failed(session, mail, failure, answers=answers)
            if connected is not None:
                connected.delivery.retry()

        keeping = self.queue.append(str(session), mail.data, mail.until, mail.sender)
        keeping.addBoth(ended).addCallbacks(
            lambda number: self.settle_stored(session, mail, number, other_relays), failed
        )

    def settle_stored(self, session: Session, mail: Message, number: QueueId, other_relays: frozenset[str]) -> None:
        """Settle a message that was stored in the queue of its receiver ``session``.

        If the receiver is connected, its delivery reads the message. Otherwise the message is offered to other relays.

        :param number: id of the message in the queue.
        :param other_relays: relays to which the receiver may be connected.
        """
        mail.settle()
        receiver = self.sessions.get(session)
        if receiver is not None:
            # The receiver has connected meanwhile, or is slow. Its delivery reads the message from the queue.
            receiver.delivery.wake()
        elif other_relays:
            self.federation.offers.add(str(session), QueuedMessage(number, mail.data), other_relays, mail.until)

    def _store_failed(self, session: Session, mail: Message, failure: Failure, *, answers: bool) -> None:
        self.rules.drops[Drop.QUEUE_FAILED] += 1
        why = str(failure.value) if failure.check(DmsgError) else type(failure.value).__name__
        if not failure.check(QueueUnavailable):
            _log.failure("unhandled error in the relay's queue", failure)
        if answers and isinstance(mail, Mail) and mail.header.wants_answer:
            # The error is delivered without the queue, because the queue has just failed.
            sender = self.sessions.get(mail.header.source)
            if sender is not None:
                text = texts.NOT_ROUTED.format(peer=session, why=why)
                sender.delivery.offer(error_answer(mail.header, text, mail.header.source, self.now()))
            mail.settle()
        else:
            mail.lose()

    def dropped(self, session: str, number: int) -> None:
        """Count messages that were evicted from a full queue. Part of the interface
        :class:`~dmsg.rmb.relay.queue.interface.QueueWatcher`."""
        self.rules.drops[Drop.QUEUE_FULL] += number
        self.dropped_oldest += number

    def appended_elsewhere(self, name: str) -> None:
        """Let a session read its queue, to which another process has appended. Called after the periodic poll of the
        queues, and by the queue as part of :class:`~dmsg.rmb.relay.queue.interface.QueueWatcher`."""
        session = None if name == FEDERATION else self.presence.named(name)
        if session is not None:
            session.delivery.wake()

    def connected_elsewhere(self, name: str) -> None:
        """End a session that has connected to another process. Part of the interface
        :class:`~dmsg.rmb.relay.queue.interface.QueueWatcher`."""
        session = self.presence.named(name)
        if session is not None:
            session.end(Drop.REPLACED, GOING_AWAY, "this session connected to another process")
