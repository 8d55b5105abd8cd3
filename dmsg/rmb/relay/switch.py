"""The relay at work: sessions, their queues, and the way of each message.

``admit -> (ping | connected: deliver | look the twin up -> queue, forward,
refuse)``.  The rules are in :mod:`dmsg.rmb.relay.rules`, what happens between a
message and its confirmation in :mod:`dmsg.rmb.relay.delivery`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.tables import uncount
from dmsg.errors import DmsgError
from dmsg.net.isolate import isolated
from dmsg.rmb.envelope import texts
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import (
    decode,
    destination_of,
    error_envelope,
    life,
    life_ends,
    source_of,
    to_pong,
    wants_answer,
)
from dmsg.rmb.errors import Drop, EnvelopeError, QueueUnavailable
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.relay import rules
from dmsg.rmb.relay.delivery import LINE_MESSAGES, SPILL_AFTER, Delivery
from dmsg.rmb.relay.federation.forward import FULL, Federation, Outcome
from dmsg.rmb.relay.limited import Limited
from dmsg.rmb.relay.lookups import LookupLines, Waiting
from dmsg.rmb.relay.queue.interface import FEDERATION, Queued
from dmsg.rmb.relay.rules import Action, Refused, Relay
from dmsg.rmb.relay.sessions import SMALL, RelaySession
from dmsg.rmb.socket.confirm import Ledger, Message
from dmsg.rmb.socket.websocket import BAD_DATA, FAILED, GOING_AWAY, TRY_LATER
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.twin import Twin

PING_BEHIND = 0.05
"""Seconds between pings behind messages, to sessions that log each."""
PING_BEHIND_FEW = 1.0
"""The same, while few messages are unconfirmed."""
START_GRACE = 10.0
"""Seconds after the start in which a session that is not there is given time to come back."""
COME_BACK = 2.0
"""Seconds of that."""
ROUND = 1.0
"""Seconds between looks at what waits."""
IDLE_PING = 30.0
"""Seconds of silence after which a session is pinged."""
SILENT_AFTER = 75.0
"""Seconds of silence after which a session is ended."""
STALLED_AFTER = 60.0
"""Seconds without a confirmation after which a session is ended."""
PRESENT_EVERY = 30.0
"""Seconds between notes of who is connected, for other processes on the same queue."""
POLLED = 1000
"""Sessions whose queues are looked at in one round."""
MAX_COMING_BACK = 10_000
"""Sessions that are waited for after a start."""
UNFINISHED_FOR = 60.0
"""Seconds for a whole message, however large."""
MAX_UNFINISHED = 256 * 1024 * 1024
"""Bytes of all messages that are not whole; beyond, the sessions with most are ended."""

_log = Logger()


class Switch:
    """Sessions of a relay and the messages between them.

    :param wall_clock: seconds since 1970.
    :ivar sessions: by their names.
    :ivar counters: for metrics.
    """

    def __init__(
        self,
        clock: IReactorTime,
        relay: Relay,
        registry: CachedRegistry,
        queue: Any,
        federation: Federation,
        wall_clock: Callable[[], float],
        *,
        durable: bool = False,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        """:param durable: what sessions send that will not send it again is written down first.

        :param max_unfinished: bytes of all messages that are not whole.
        """
        self.durable = durable
        self._max_unfinished = max_unfinished
        self._started = clock.seconds()
        self._coming_back: dict[Session, list[Deferred[bool]]] = {}
        self._to_ping: dict[Delivery, float] = {}
        self.limited = Limited(clock)
        self._clock = clock
        self.relay = relay
        self.registry = registry
        self.queue = queue
        self.federation = federation
        self.now = wall_clock
        self.sessions: dict[Session, RelaySession] = {}
        self.sessions_of: Counter[int] = Counter()
        """How many sessions each twin has."""
        self.counters: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.dropped_oldest = 0
        self.waiting: dict[Delivery, None] = {}
        """Those that have something in their window or line, and some that had."""
        self.parked: dict[RelaySession, None] = {}
        """Sessions that have sent something while they were held; those that have not any more are taken out by who
        looks."""
        self.growing: dict[RelaySession, None] = {}
        """Those with a message that is not whole."""
        self.lookups = LookupLines(clock, registry, self._looked_up)
        self.unfinished = 0
        """Bytes of all messages that are not whole."""
        self._present_at = 0.0
        self._to_poll: list[Session] = []
        # what goes from a line into the queue must not make that drop its oldest
        self.line_messages = max(1, min(LINE_MESSAGES, queue.limits.messages // 2))
        federation.is_connected = self._is_connected
        federation.finished = self._forwarded
        queue.dropped = self._dropped
        queue.watch(self._appended_elsewhere, self._connected_elsewhere)

    def _is_connected(self, name: str) -> bool:
        try:
            return Session.parse(name) in self.sessions
        except ValueError:
            return False

    # --- sessions ---

    def connected(self, session: RelaySession) -> None:
        """Its socket is open; an older connection of the same session is ended."""
        before = self.sessions.get(session.session)
        self.sessions[session.session] = session
        if before is None:
            self.sessions_of[session.owner] += 1
        for waiting in self._coming_back.pop(session.session, ()):
            if not waiting.called:
                waiting.callback(True)
        if before is not None:
            # what it had not confirmed goes into the queue, which the new one reads to its end
            isolated(before.end, Drop.REPLACED, GOING_AWAY, "another connection of this session took its place")
        session.heard_at = self._clock.seconds()
        self.queue.connected_here(str(session.session))
        session.delivery.start()

    def lost(self, session: RelaySession) -> None:
        """Its connection is gone: what it had not confirmed goes to its queue."""
        if session.gone:
            return
        session.gone = True
        # not by its name: a newer connection may have it by now
        if self.sessions.get(session.session) is session:
            del self.sessions[session.session]
            uncount(self.sessions_of, session.owner)
            self.queue.absent(str(session.session))
        self.waiting.pop(session.delivery, None)
        self.lookups.lost(session)
        self.unfinished -= session.unfinished
        session.unfinished = 0
        self.growing.pop(session, None)
        session.parking.clear()
        self.parked.pop(session, None)
        for message in session.delivery.close():
            isolated(self._enqueue, session.session, message, None)

    def busy(self, delivery: Delivery) -> None:
        """For :class:`~dmsg.rmb.relay.delivery.Store`: it waits for a confirmation."""
        if delivery.since is None:
            delivery.since = self._clock.seconds()
        self.waiting[delivery] = None

    def ping_later(self, delivery: Delivery) -> None:
        """For :class:`~dmsg.rmb.relay.delivery.Store`."""
        if not self._to_ping:
            self._clock.callLater(PING_BEHIND, self._ping_behind)
        self._to_ping[delivery] = self._clock.seconds()

    def _ping_behind(self) -> None:
        waiting, self._to_ping = self._to_ping, {}
        now = self._clock.seconds()
        for delivery, since in waiting.items():
            if delivery.few and now - since < PING_BEHIND_FEW and not delivery.closed:
                self._to_ping[delivery] = since
            else:
                delivery.ping_behind()
        if self._to_ping:
            self._clock.callLater(PING_BEHIND, self._ping_behind)

    def comes_back(self, session: Session) -> Deferred[bool]:
        """Whether a session is there, or comes within :data:`COME_BACK` where this relay has just been started."""
        if session in self.sessions:
            return succeed(True)
        if self._clock.seconds() - self._started >= START_GRACE or len(self._coming_back) >= MAX_COMING_BACK:
            return succeed(False)
        waiting: Deferred[bool] = Deferred()
        self._coming_back.setdefault(session, []).append(waiting)

        def too_late(result: object, seconds: float) -> bool:
            others = self._coming_back.get(session, [])
            if waiting in others:
                others.remove(waiting)
            if not others:
                self._coming_back.pop(session, None)
            return False

        return waiting.addTimeout(COME_BACK, self._clock, too_late)

    def stop(self) -> None:
        """Nobody is waited for any more."""
        coming, self._coming_back = self._coming_back, {}
        for waiting in (one for some in coming.values() for one in some):
            if not waiting.called:
                waiting.callback(False)

    def waits(self, delivery: Delivery) -> None:
        """For :class:`~dmsg.rmb.relay.delivery.Store`: it has a line."""
        self.waiting[delivery] = None

    def later(self, call: Callable[[], None]) -> None:
        """In the next turn of the reactor."""
        self._clock.callLater(0, call)

    def round(self) -> None:
        """Every second; an error in one step ends neither the others nor the next round."""
        for step in (
            self._look_at_deliveries,
            self._look_at_sessions,
            self._poll,
            self._answer_all_expired,
            self._tell_who_is_here,
            self.limited.tell,
            self.federation.round,
        ):
            try:
                step()
            except Exception:
                _log.failure("a step of the round failed")

    def _look_at_deliveries(self) -> None:
        """Confirmations that take long."""
        now = self._clock.seconds()
        for delivery in list(self.waiting):
            if not len(delivery):
                del self.waiting[delivery]
                continue
            delivery.look()
            if delivery.since is not None and now - delivery.since >= SPILL_AFTER:
                delivery.stall()
                if now - delivery.since >= STALLED_AFTER:
                    self.evictions["back_pressure_timeout"] += 1
                    stalled = self.sessions.get(delivery.session)
                    if stalled is not None and stalled.delivery is delivery:
                        stalled.end(Drop.STALLED, FAILED, "nothing was confirmed for too long")

    def _look_at_sessions(self) -> None:
        """Sessions that are silent, or that hold what they never finish."""
        now = self._clock.seconds()
        for session in list(self.growing):
            since = session.unfinished_since
            if since is None:
                session.unfinished_since = now
            elif now - since >= UNFINISHED_FOR:
                session.end(Drop.UNFINISHED, TRY_LATER, "a message that does not end")
        for session in list(self.sessions.values()):
            socket = session.socket
            if session.unfinished <= SMALL:
                session.unfinished_since = None
            if socket is not None and socket.heard:
                socket.heard = False
                session.heard_at = now
            elif socket is not None and socket.held:
                # it is not read, so it cannot be heard; this lets it know that the relay is there
                session.heard_at = now
                socket.ping(b"")
            elif now - session.heard_at >= SILENT_AFTER:
                self.evictions["closed"] += 1
                session.end(Drop.SILENT, GOING_AWAY, "silent for too long")
            elif now - session.heard_at >= IDLE_PING and socket is not None:
                socket.ping(b"")
            session.delivery.retry()

    def look_at_unfinished(self) -> None:
        """When there is too much of such messages, the sessions with most are ended."""
        if self.unfinished <= self._max_unfinished:
            return
        for session in sorted(self.growing, key=lambda one: one.unfinished, reverse=True):
            if self.unfinished <= self._max_unfinished:
                break
            session.end(Drop.UNFINISHED, TRY_LATER, "too much is not whole, and most of it is here")

    def _answer_all_expired(self) -> None:
        def taken(expired: list[tuple[str, bytes]]) -> None:
            for _, data in expired:
                self._answer_expired(data)

        self.queue.expired(self.now()).addCallbacks(taken, lambda _: None)

    def _tell_who_is_here(self) -> None:
        now = self._clock.seconds()
        if now - self._present_at >= PRESENT_EVERY:
            self._present_at = now
            self.queue.present([str(session) for session in self.sessions])

    def _poll(self) -> None:
        """Relays that share the queue and are not of this package tell nobody what they append."""
        if not self._to_poll:
            self._to_poll = list(self.sessions)
        some, self._to_poll = self._to_poll[:POLLED], self._to_poll[POLLED:]
        quiet = [
            name
            for name in some
            if (one := self.sessions.get(name)) is not None and not len(one.delivery) and not one.delivery.catching_up
        ]
        if quiet:
            self.queue.poll([str(name) for name in quiet]).addCallback(self._found)

    def _found(self, names: list[str]) -> None:
        for name in names:
            self._appended_elsewhere(name)

    # --- from a session ---

    def received(self, session: RelaySession, data: bytes) -> None:
        """One message of a session."""
        now = self.now()
        try:
            envelope = decode(data)
        except EnvelopeError:
            session.end(Drop.BAD_FRAME, BAD_DATA, "not an envelope")
            return
        try:
            if self.relay.admit(session.session, envelope, len(data), now):
                to_pong(envelope)
                data = envelope.SerializeToString()
        except Refused as refused:
            if refused.drop is Drop.RATE_LIMITED:
                self.limited.count(session.session.twin)
            self._refuse(envelope, refused.drop, session)
            return
        destination = destination_of(envelope)
        message = Message(data, life_ends(envelope, self.now()), session.ledger, sender=session.owner)
        session.ledger.add(message)
        receiver = self.sessions.get(destination)
        if receiver is not None:
            self._count_in(len(data))
            if not receiver.delivery.offer(message):
                self._enqueue(destination, message, envelope)
            return
        twin = self.registry.fresh(destination.twin)
        if twin is not None and destination.twin not in self.lookups:
            self._route(session, envelope, message, destination, twin)
            return
        self.lookups.add(Waiting(session, envelope, message, destination))

    def _count_in(self, size: int) -> None:
        self.counters["message_rx"] += 1
        self.counters["message_rx_bytes"] += size

    def _looked_up(self, waiting: Waiting, result: Twin | Failure | None) -> None:
        session, envelope, message, destination = waiting
        if isinstance(result, Failure):
            self.relay.drops[Drop.REGISTRY_DOWN] += 1
            self._not_routed(envelope, message, session, f"failed to get twin: {result.value}")
            return
        self._route(session, envelope, message, destination, result)

    def _not_routed(self, envelope: Envelope, message: Message, session: RelaySession, why: str) -> None:
        """A request is answered; of anything else nobody would know, so it has to be sent again."""
        if wants_answer(envelope):
            self._say(envelope, texts.NOT_ROUTED.format(peer=destination_of(envelope), why=why), session)
            message.settle()
        else:
            message.lose()

    def _route(
        self, session: RelaySession, envelope: Envelope, message: Message, destination: Session, twin: Twin | None
    ) -> None:
        # it may have connected while the registry was asked
        receiver = self.sessions.get(destination)
        if receiver is not None:
            self._count_in(len(message.data))
            if not receiver.delivery.offer(message):
                self._enqueue(destination, message, envelope)
            return
        decision = self.relay.route(envelope, twin)
        if decision.action is Action.REFUSE and decision.drop is Drop.OFFLINE:
            self._unless_elsewhere(envelope, message, destination, lambda: self._offline(envelope, message))
        elif decision.action is Action.REFUSE:
            assert decision.drop is not None
            self._refuse(envelope, decision.drop, session)
            message.settle()
        elif decision.action is Action.QUEUE:
            self._count_in(len(message.data))
            self._enqueue(destination, message, envelope, decision.relays)
        elif decision.action is Action.PROBE:
            self._unless_elsewhere(
                envelope, message, destination, lambda: self._probe(envelope, message, decision.relays)
            )
        else:
            self.federation.forward(message, envelope, decision.relays, self._forwarded)

    def _unless_elsewhere(
        self, envelope: Envelope, message: Message, destination: Session, otherwise: Callable[[], None]
    ) -> None:
        """Another process on the same queue may have the session: then the queue is the way."""

        def known(elsewhere: bool) -> None:
            if elsewhere:
                self._count_in(len(message.data))
                self._enqueue(destination, message, envelope)
            else:
                otherwise()

        self.queue.elsewhere(str(destination)).addErrback(lambda _: False).addCallback(known)

    def _offline(self, envelope: Envelope, message: Message) -> None:
        destination = destination_of(envelope)

        def known(is_back: bool) -> None:
            receiver = self.sessions.get(destination)
            if is_back and receiver is not None:
                self._count_in(len(message.data))
                if not receiver.delivery.offer(message):
                    self._enqueue(destination, message, envelope)
            else:
                self._is_offline(envelope, message)

        self.comes_back(destination).addCallback(known)

    def _is_offline(self, envelope: Envelope, message: Message) -> None:
        self.relay.drops[Drop.OFFLINE] += 1
        self._say(envelope, texts.OFFLINE, None)
        message.settle()

    def _probe(self, envelope: Envelope, message: Message, relays: frozenset[str]) -> None:
        def probed(outcome: Outcome) -> None:
            if outcome is Outcome.TAKEN:
                message.settle()
            else:
                self._offline(envelope, message)

        offering = self.federation.offer(message.data, relays, source_of(envelope).twin)
        offering.addErrback(lambda _: Outcome.FAILED).addCallback(probed)

    def _forwarded(self, message: Message, envelope: Envelope, error: str | None) -> None:
        """A message for another relay was taken there, or will never be."""
        if error is not None:
            full = Drop.FEDERATION_FULL if error == FULL else Drop.FEDERATION_REFUSED
            self.relay.drops[Drop.EXPIRED if error == texts.EXPIRED else full] += 1
            # the reference leaves the destination out of this one
            self._say(envelope, error, None, addressed=False)
        message.settle()

    # --- errors ---

    def _refuse(self, envelope: Envelope, drop: Drop, session: RelaySession) -> None:
        self.relay.drops[drop] += 1
        self._say(envelope, texts.TEXTS[drop], session)

    def _say(self, envelope: Envelope, text: str, session: RelaySession | None, *, addressed: bool = True) -> None:
        """Tell the sender of a request what became of it.

        :param session: who sent it; None for the one that the envelope names.
        """
        if not wants_answer(envelope):
            return
        to = source_of(envelope) if session is None else session.session
        if not to.twin:
            return
        answer = error_envelope(envelope.uid, text, to if addressed else None, int(self.now()))
        message = Message(answer.SerializeToString(), self.now() + answer.expiration, None)
        self._count_in(len(message.data))
        receiver = self.sessions.get(to)
        if receiver is None or not receiver.delivery.offer(message):
            self._enqueue(to, message, None)

    def _answer_expired(self, data: bytes) -> None:
        """A kept message's life is over: its sender, if it is one of this relay's, is told."""
        self.relay.drops[Drop.EXPIRED] += 1
        try:
            envelope = decode(data)
        except EnvelopeError:
            return
        source = source_of(envelope)
        twin = self.registry.fresh(source.twin)
        # who is away finds the notice in its queue; a session of another relay would not get it
        if source in self.sessions or (twin is not None and twin.relays & self.relay.domains):
            self._say(envelope, texts.EXPIRED, None)

    # --- queues ---

    def _enqueue(
        self, session: Session, message: Message, envelope: Envelope | None, others: frozenset[str] = frozenset()
    ) -> None:
        """Keep a message; its sender is told when that cannot be.

        :param others: relays where its receiver may be connected.
        """

        # nothing goes before it while it is on its way into the queue
        connected = self.sessions.get(session)
        if connected is not None:
            connected.delivery.appending += 1

        def ended(result: Any) -> Any:
            if connected is not None:
                connected.delivery.appending -= 1
            return result

        def kept(number: Any) -> None:
            message.settle()
            receiver = self.sessions.get(session)
            if receiver is not None:
                # it connected meanwhile, or is slow
                receiver.delivery.poke()
            elif others:
                self.federation.hand_over(str(session), Queued(number, message.data), others, message.until)

        def failed(failure: Failure) -> None:
            self.relay.drops[Drop.QUEUE_FAILED] += 1
            why = str(failure.value) if failure.check(DmsgError) else type(failure.value).__name__
            if not failure.check(QueueUnavailable):
                _log.failure("queue failed", failure)
            if envelope is not None and wants_answer(envelope):
                self._say_now(envelope, texts.NOT_ROUTED.format(peer=session, why=why))
                message.settle()
            else:
                message.lose()
            if connected is not None:
                connected.delivery.retry()

        kept_for = self.queue.append(str(session), message.data, message.until, message.sender)
        kept_for.addBoth(ended).addCallbacks(kept, failed)

    def _say_now(self, envelope: Envelope, text: str) -> None:
        """Without a queue, which just failed."""
        to = source_of(envelope)
        receiver = self.sessions.get(to)
        if receiver is not None:
            answer = error_envelope(envelope.uid, text, to, int(self.now()))
            receiver.delivery.offer(Message(answer.SerializeToString(), self.now() + answer.expiration, None))

    def keep(self, session: Session, message: Message) -> Deferred[Any]:
        """For :class:`~dmsg.rmb.relay.delivery.Store`."""
        result: Deferred[Any] = self.queue.append(str(session), message.data, message.until, message.sender)
        return result

    def read(self, session: Session, after: Any) -> Deferred[list[Queued]]:
        """For :class:`~dmsg.rmb.relay.delivery.Store`."""
        result: Deferred[list[Queued]] = self.queue.read(str(session), after)
        return result

    def remove(self, session: Session, ids: list[Any]) -> None:
        """For :class:`~dmsg.rmb.relay.delivery.Store`."""
        self.queue.remove(str(session), ids)

    def until(self, queued: Queued) -> float | None:
        """For :class:`~dmsg.rmb.relay.delivery.Store`: None when its life is over, and then its sender is told."""
        try:
            envelope = decode(queued.data)
        except EnvelopeError:
            return None
        now = self.now()
        if life(envelope, int(now)) is None and envelope.WhichOneof("message") != "pong":
            self._answer_expired(queued.data)
            return None
        return life_ends(envelope, now)

    def _dropped(self, session: str, number: int) -> None:
        self.relay.drops[Drop.QUEUE_FULL] += number
        self.dropped_oldest += number

    def _appended_elsewhere(self, name: str) -> None:
        if name == FEDERATION:
            return
        try:
            session = self.sessions.get(Session.parse(name))
        except ValueError:
            return
        if session is not None:
            session.delivery.poke()

    def _connected_elsewhere(self, name: str) -> None:
        try:
            session = self.sessions.get(Session.parse(name))
        except ValueError:
            return
        if session is not None:
            session.end(Drop.REPLACED, GOING_AWAY, "this session connected to another process")

    # --- from another relay ---

    def take_in(self, envelope: Envelope, data: bytes, twin: Twin | None, *, only_connected: bool) -> Deferred[None]:
        """A verified message that another relay brings; fires when it is confirmed or kept.

        Fails with :class:`~dmsg.rmb.relay.rules.Refused`, or QueueUnavailable.

        :param only_connected: refuse it when the session is not connected.
        """
        taken: Deferred[None] = Deferred()
        destination = destination_of(envelope)
        ledger = Ledger(lambda payload: taken.callback(None))
        sender = source_of(envelope).twin
        message = Message(data, life_ends(envelope, self.now()), ledger, sender=sender)
        ledger.add(message)
        ledger.ping(b"")
        receiver = self.sessions.get(destination)
        if receiver is not None and receiver.delivery.offer(message):
            self._count_in(len(data))
            return taken
        decision = self.relay.for_intake(envelope, twin)
        if receiver is None and only_connected and decision.action is Action.QUEUE:
            decision = rules.Decision(Action.REFUSE, drop=Drop.OFFLINE)

        def kept(number: Any) -> None:
            message.settle()
            now_there = self.sessions.get(destination)
            if now_there is not None:
                now_there.delivery.poke()
            elif decision.relays:
                self.federation.hand_over(str(destination), Queued(number, data), decision.relays, message.until)

        def failed(failure: Failure) -> None:
            self.relay.drops[Drop.QUEUE_FAILED] += 1
            taken.errback(failure)

        def back(is_back: bool) -> None:
            there = self.sessions.get(destination)
            if not is_back or there is None:
                taken.errback(Refused(Drop.OFFLINE))
                return
            self._count_in(len(data))
            if not there.delivery.offer(message):
                self.queue.append(str(destination), data, message.until, sender).addCallbacks(kept, failed)

        def keep(elsewhere: bool) -> None:
            """Where another process on the same queue has the session, the queue is the way."""
            if receiver is None and decision.drop is not None and not elsewhere:
                if decision.drop is Drop.OFFLINE:
                    self.comes_back(destination).addCallback(back)
                else:
                    taken.errback(Refused(decision.drop))
                return
            self._count_in(len(data))
            self.queue.append(str(destination), data, message.until, sender).addCallbacks(kept, failed)

        if receiver is None and decision.drop is Drop.OFFLINE:
            self.queue.elsewhere(str(destination)).addErrback(lambda _: False).addCallback(keep)
        else:
            keep(False)
        return taken
