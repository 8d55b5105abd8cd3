"""A relay's switch, its rounds and its intake by plain calls and a clock: no sockets, nothing but memory."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.texts import EXPIRED, REMOTE, TEXTS
from dmsg.rmb.envelope.wire import decode
from dmsg.rmb.errors import Drop, QueueUnavailable, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.relay import presence
from dmsg.rmb.relay.backlog import BACKLOG_MESSAGES
from dmsg.rmb.relay.deliveries import MAX_PING_DELAY, PING_DELAY, WRITE_CHECK_DELAY
from dmsg.rmb.relay.federation.forward import FULL, Federation
from dmsg.rmb.relay.inbound.accept import InboundAcceptor
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.lookups import LOOKUP_RETRY, LOOKUP_TIMEOUT
from dmsg.rmb.relay.mail import Header, Mail
from dmsg.rmb.relay.periodic import IDLE_PING, SILENT_AFTER, STALLED_AFTER, UNFINISHED_FOR, PeriodicChecks
from dmsg.rmb.relay.queue.interface import FEDERATION, SENDER_DIVISOR, QueuedMessage, QueueLimits
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.relay.ranker import Ranker
from dmsg.rmb.relay.rules import MessageRefused, Rules
from dmsg.rmb.relay.sessions import MAX_UNWATCHED_SIZE, RelaySession
from dmsg.rmb.relay.switch import FRAGMENT_BURST, Switch
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.twin import Twin
from tests.net.test_own_pauses import let_pause, pass_time
from tests.rmb.support import StrictClock

A, B, C, NOBODY = 1, 2, 3, 9
HERE, THERE = "here", "there"


class Wire:
    """Replacement of a websocket, which records sent data and the end."""

    has_received = is_reading_paused = False
    share = None
    unsent = 0

    def __init__(self) -> None:
        self.got: list[Envelope] = []
        self.pings: list[bytes] = []
        self.pongs: list[bytes] = []
        self.ended: str | None = None
        self.holds: set[str] = set()

    def send(self, data: bytes) -> None:
        self.got.append(decode(data))

    def flush(self) -> None:
        """Count all data as sent."""

    def ping(self, payload: bytes) -> None:
        self.pings.append(payload)

    def pong(self, payload: bytes) -> None:
        self.pongs.append(payload)

    def hold(self, why: str) -> None:
        self.holds.add(why)

    def release(self, why: str) -> None:
        self.holds.discard(why)

    def close(self, code: int, why: str) -> None:
        self.ended = why

    def forget(self) -> None:
        pass


class Twins:
    """A registry that a test can take away."""

    def __init__(self) -> None:
        self.relays = {A: HERE, B: HERE, C: THERE}
        self.away = False
        self.asked = 0

    def get(self, twin: int) -> Deferred[Twin]:
        self.asked += 1
        if self.away:
            return fail(RegistryUnavailable("no answer"))
        if twin not in self.relays:
            return fail(TwinNotFound("twin not found"))
        return succeed(Twin(twin, bytes(32), self.relays[twin]))

    def watch(self, changed: Any) -> None:
        pass

    def close(self) -> Deferred[None]:
        return succeed(None)


class Elsewhere:
    """Replacement of HTTP requests to other relays."""

    code = 202

    def __init__(self) -> None:
        self.posts: list[tuple[str, bool]] = []

    def takes_many(self, relay: str) -> bool:
        return False

    async def post(self, relay: str, data: bytes, *, only_connected: bool) -> int:
        self.posts.append((relay, only_connected))
        return self.code

    def close(self) -> Deferred[None]:
        return succeed(None)


class SwitchCase(SynchronousTestCase):
    """A relay with the name HERE, long after its start."""

    def setUp(self) -> None:
        self.clock = StrictClock()
        self.clock.advance(1_800_000_000)
        self.twins, self.elsewhere = Twins(), Elsewhere()
        self.queue = SQLiteQueue(":memory:", self.clock)
        self.addCleanup(self.queue.close)
        self.switch = self.make_switch(self.queue)
        self.rounds = PeriodicChecks(self.clock, self.switch)
        self.intake = InboundAcceptor(self.switch)
        self.clock.advance(presence.START_GRACE)

    def make_switch(self, queue: SQLiteQueue, **options: Any) -> Switch:
        registry = CachedRegistry(cast(Any, self.twins), self.clock)
        domains = frozenset({HERE})
        now = self.clock.seconds
        federation = partial(Federation, self.clock, self.elsewhere, Ranker(), registry, queue, now, domains)
        return Switch(self.clock, Rules(domains), registry, queue, federation, now, **options)

    def connect(self, twin: int, sid: str | None = None) -> tuple[RelaySession, Wire]:
        session, wire = RelaySession(self.switch, Session(twin, sid)), Wire()
        session.opened(cast(Any, wire))
        return session, wire

    def envelope(self, source: int, destination: int, uid: str = "u", **options: Any) -> Envelope:
        envelope = Envelope(uid=uid, timestamp=int(self.clock.seconds()), expiration=60, **options)
        envelope.source.twin, envelope.destination.twin = source, destination
        envelope.request.command = "c"
        return envelope

    def send(self, session: RelaySession, destination: int, uid: str = "u", **options: Any) -> None:
        session.received(self.envelope(session.owner, destination, uid, **options).SerializeToString())

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, with a round of checks in each second."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.rounds.round()

    def drops(self) -> dict[Drop, int]:
        return dict(self.switch.rules.drops)


class WayTests(SwitchCase):
    """The way of a message from the sender's session to its delivery or its error."""

    def test_a_message_reaches_a_connected_session(self) -> None:
        """The sender's ping is answered when the receiver has confirmed."""
        a, wire_a = self.connect(A)
        _, wire_b = self.connect(B)
        self.send(a, B)
        a.ping_received(b"question")
        self.assertEqual(([one.uid for one in wire_b.got], wire_a.pongs), (["u"], []))
        self.clock.advance(PING_DELAY)
        b = self.switch.sessions[Session(B)]
        b.pong_received(wire_b.pings[-1])
        self.assertEqual((wire_a.pongs, self.drops(), self.twins.asked), ([b"question"], {}, 0))

    def test_a_message_to_an_absent_session_is_stored(self) -> None:
        """Storing the message settles it; it is delivered when the session connects."""
        a, wire_a = self.connect(A)
        self.send(a, B)
        a.ping_received(b"question")
        self.assertEqual(wire_a.pongs, [])
        self.clock.advance(0)  # The queue writes at the end of a turn.
        self.assertEqual((len(self.queue), wire_a.pongs), (1, [b"question"]))
        _, wire_b = self.connect(B)
        self.assertEqual([one.uid for one in wire_b.got], ["u"])

    def test_to_oneself_by_a_ping(self) -> None:
        a, wire = self.connect(A)
        envelope = self.envelope(A, B)
        envelope.ping.SetInParent()
        a.received(envelope.SerializeToString())
        self.assertEqual([one.WhichOneof("message") for one in wire.got], ["pong"])

    def test_refusals_are_answered_with_their_reason(self) -> None:
        a, wire = self.connect(A)
        for destination, options, drop in (
            (NOBODY, {}, Drop.UNKNOWN_DESTINATION),
            (B, {"tags": "fail-fast"}, Drop.OFFLINE),
            (0, {}, Drop.NO_DESTINATION),
        ):
            self.send(a, destination, **options)
            self.assertEqual((wire.got[-1].error.message, self.drops()[drop]), (TEXTS[drop], 1), drop)
        envelope = self.envelope(B, A)
        a.received(envelope.SerializeToString())
        self.assertEqual(wire.got[-1].error.message, TEXTS[Drop.WRONG_SOURCE])
        # An answer needs a request. Otherwise the relay would answer an answer.
        response = self.envelope(A, NOBODY)
        response.response.SetInParent()
        a.received(response.SerializeToString())
        self.assertEqual((len(wire.got), self.drops()[Drop.UNKNOWN_DESTINATION], len(a.ledger)), (4, 2, 0))

    def test_malformed_envelopes_end_the_session(self) -> None:
        a, wire = self.connect(A)
        a.received(b"\xff")
        self.assertEqual((wire.ended, self.switch.sessions), ("not an envelope", {}))

    def test_a_message_for_another_relay_is_federated(self) -> None:
        a, wire = self.connect(A)
        self.send(a, C)
        self.assertEqual((self.elsewhere.posts, len(a.ledger)), ([(THERE, False)], 0))
        self.elsewhere.code = 404
        self.send(a, C)
        self.assertEqual(wire.got[-1].error.message, "remote relay rejected permanently: destination offline")
        self.assertFalse(wire.got[-1].HasField("destination"))

    def test_fail_fast_asks_the_other_relays(self) -> None:
        self.twins.relays[B] = f"{HERE}_{THERE}"
        a, wire = self.connect(A)
        self.send(a, B, tags="fail-fast")
        self.assertEqual((self.elsewhere.posts, wire.got), ([(THERE, True)], []))
        self.elsewhere.code = 404
        self.send(a, B, tags="fail-fast")
        self.assertEqual(wire.got[-1].error.message, TEXTS[Drop.OFFLINE])

    def test_a_registry_that_is_away(self) -> None:
        """The registry is asked again for a while; then a request is answered with an error, and other messages have
        to be sent again.
        """
        a, wire = self.connect(A)
        self.twins.away = True
        self.send(a, B)
        self.assertEqual((wire.got, len(self.switch.lookups.looking)), ([], 1))
        for _ in range(int(LOOKUP_TIMEOUT / LOOKUP_RETRY) + 1):
            self.clock.advance(LOOKUP_RETRY)
        self.assertIn("failed to get twin", wire.got[-1].error.message)
        self.assertEqual((wire.ended, len(a.ledger), self.switch.lookups.size), (None, 0, 0))
        response = self.envelope(A, B)
        response.response.SetInParent()
        a.received(response.SerializeToString())
        for _ in range(int(LOOKUP_TIMEOUT / LOOKUP_RETRY) + 1):
            self.clock.advance(LOOKUP_RETRY)
        self.assertIn("the queue of this relay cannot store", str(wire.ended))

    def test_a_queue_that_fails(self) -> None:
        a, wire = self.connect(A)
        self.patch(self.queue, "append", lambda *_: fail(QueueUnavailable("no room")))
        self.send(a, B)
        self.assertIn("no room", wire.got[-1].error.message)
        self.assertEqual((wire.ended, len(a.ledger), self.drops()), (None, 0, {Drop.QUEUE_FAILED: 1}))

    def test_the_newest_connection_of_a_session(self) -> None:
        """Messages that the older connection has not confirmed are delivered on the newer one."""
        a, _ = self.connect(A)
        _, old = self.connect(B)
        self.send(a, B)
        _, new = self.connect(B)
        self.assertEqual(
            (str(old.ended), [one.uid for one in new.got]),
            ("another connection of this session replaced this one", ["u"]),
        )
        self.assertEqual((self.switch.presence.of_twin, self.drops()), ({A: 1, B: 1}, {Drop.REPLACED: 1}))

    def test_half_of_a_queue_may_wait_in_lines(self) -> None:
        """A backlog that is stored as a whole must not make the queue drop its oldest messages."""
        for messages, backlog in ((1, 1), (2, 1), (3, 1), (100, 50)):
            small = self.make_switch(SQLiteQueue(":memory:", self.clock, QueueLimits(messages)))
            self.assertEqual(small.backlog_messages, backlog)
        limits = self.queue.limits
        self.assertEqual(self.switch.backlog_size, limits.size // 2)
        self.assertEqual(self.switch.backlog_messages, min(BACKLOG_MESSAGES, limits.messages // 2))
        self.assertEqual(replace(limits, total=64, size=1).sender_size, max(64 // SENDER_DIVISOR, 2))
        self.assertEqual(replace(limits, total=64, size=64).sender_size, 128)

    def test_a_session_that_is_elsewhere_now(self) -> None:
        session, wire = self.connect(A, "one")
        self.switch.connected_elsewhere(str(Session(B)))
        self.assertIsNone(wire.ended)
        self.switch.connected_elsewhere(str(session.session))
        self.assertEqual((wire.ended, self.drops()), ("this session connected to another process", {Drop.REPLACED: 1}))

    def test_sessions_are_found_by_their_queue_name(self) -> None:
        here = self.switch.presence
        session, _ = self.connect(A, "one")
        self.assertIs(here.named(str(session.session)), session)
        self.assertTrue(here.is_here(str(session.session)))
        for name in (str(Session(A, "two")), str(Session(B)), "no name", ""):
            self.assertIsNone(here.named(name))
            self.assertFalse(here.is_here(name))

    def test_the_oldest_session_of_the_largest_twin_is_evicted(self) -> None:
        here = self.switch.presence
        self.assertFalse(here.can_make_place() or here.can_make_place(A))
        for number in range(presence.FEW_SESSIONS + 1):
            self.assertFalse(here.can_make_place(B))
            self.connect(A, str(number))
        self.assertTrue(here.can_make_place() and here.can_make_place(B))
        self.assertFalse(here.can_make_place(A))

    def test_stored_receivers_are_awaited_after_a_start(self) -> None:
        here = self.switch.presence
        here._started = self.clock.seconds()
        away, other = Session(B), Session(C)
        waiting = [here.wait_for_session(away), here.wait_for_session(away), here.wait_for_session(other)]
        self.connect(B)
        self.assertEqual([self.successResultOf(one) for one in waiting[:2]], [True, True])
        self.assertNoResult(waiting[2])
        self.assertEqual(list(here._coming_back), [other])
        self.clock.advance(presence.COME_BACK)
        self.assertIs(self.successResultOf(waiting[2]), False)
        self.assertEqual(here._coming_back, {})
        self.assertIs(self.successResultOf(here.wait_for_session(away)), True)
        here._started = self.clock.seconds() - presence.START_GRACE
        self.assertIs(self.successResultOf(here.wait_for_session(other)), False)

    def test_pauses_of_this_process_do_not_count_while_a_receiver_is_awaited(self) -> None:
        let_pause(self.clock)
        here = self.switch.presence
        here._started = self.clock.seconds()
        waiting = here.wait_for_session(Session(B))
        pass_time(self.clock, 0.5)
        self.clock.advance(100 * presence.COME_BACK)
        self.assertNoResult(waiting)
        self.connect(B)
        self.assertIs(self.successResultOf(waiting), True)

    def test_messages_are_not_written_down_before_delivery_by_default(self) -> None:
        session, wire = RelaySession(self.switch, Session(A), resends=False), Wire()
        session.opened(cast(Any, wire))
        self.connect(B)
        self.send(session, B)
        self.clock.advance(0)
        self.assertEqual(len(self.queue), 0)

    def test_each_message_and_each_failure_is_counted_once(self) -> None:
        a, _ = self.connect(A)
        self.connect(B)
        for _ in range(2):
            self.send(a, B)
        counters = self.switch.counters
        self.assertEqual((counters["message_rx"], counters["message_tx"]), (2, 2))
        self.twins.away = True
        self.send(a, C)
        self.clock.pump([LOOKUP_RETRY] * (int(LOOKUP_TIMEOUT / LOOKUP_RETRY) + 1))
        self.assertEqual(self.drops(), {Drop.REGISTRY_DOWN: 1})
        self.switch.dropped(str(Session(B)), 3)
        self.assertEqual((self.drops()[Drop.QUEUE_FULL], self.switch.dropped_oldest), (3, 3))

    def test_a_twin_over_its_rate_is_counted_and_named(self) -> None:
        """Other refusals are not counted as exceeding the rate."""
        self.limit(FixedWindow(1, 10_000))
        a, wire = self.connect(A)
        self.send(a, 0)
        self.assertEqual(self.switch.limited.of_twin, {})
        for _ in range(2):
            self.send(a, B)
        self.assertEqual((self.switch.limited.of_twin, self.drops()[Drop.RATE_LIMITED]), ({A: 2}, 2))
        self.assertEqual(wire.got[-1].error.message, TEXTS[Drop.RATE_LIMITED])

    def limit(self, window: FixedWindow) -> None:
        self.switch.rules.limiter = window
        self.switch.rules.windows.append(window)

    def test_only_a_request_that_is_carried_makes_an_answer_free(self) -> None:
        """A request to an unknown twin would fill the table of the limit."""
        window = FixedWindow(2, 10_000)
        self.limit(window)
        a, _ = self.connect(A)
        self.send(a, NOBODY)
        self.assertEqual(len(window), 1)
        self.send(a, B)
        now = self.clock.seconds()
        answers = [window.measure(B, 1, now, is_answer=True) for _ in range(4)]
        self.assertEqual(answers, [True, True, True, False])

    def test_errors_name_their_receiver(self) -> None:
        a, wire = self.connect(A, "s")
        envelope = self.envelope(A, B, tags="fail-fast")
        envelope.source.connection = "s"
        a.received(envelope.SerializeToString())
        error = wire.got[-1]
        self.assertEqual((error.destination.twin, error.destination.connection), (A, "s"))

    def test_a_receiver_is_offline_when_the_queue_does_not_know_better(self) -> None:
        self.patch(self.queue, "is_elsewhere", lambda session: fail(QueueUnavailable("away")))
        a, wire = self.connect(A)
        self.send(a, B, tags="fail-fast")
        self.assertEqual((wire.got[-1].error.message, len(self.queue)), (TEXTS[Drop.OFFLINE], 0))

    def test_a_receiver_that_another_process_has_gets_the_message_through_the_queue(self) -> None:
        self.patch(self.queue, "is_elsewhere", lambda session: succeed(True))
        a, wire = self.connect(A)
        self.send(a, B, tags="fail-fast")
        self.clock.advance(0)
        self.assertEqual((wire.got, len(self.queue), len(a.ledger)), ([], 1, 0))

    def test_a_receiver_that_comes_back_gets_the_message(self) -> None:
        """The message is not stored: the relay has just started, and the receiver connects a moment later."""
        self.switch.presence._started = self.clock.seconds()
        a, wire_a = self.connect(A)
        self.send(a, B, tags="fail-fast")
        _, wire_b = self.connect(B)
        self.assertEqual(([one.uid for one in wire_b.got], wire_a.got, self.drops()), (["u"], [], {}))
        self.assertEqual(len(a.ledger), 1)

    def test_failures_of_other_relays_are_counted_by_their_reason(self) -> None:
        for error, drop in (
            (FULL, Drop.FEDERATION_FULL),
            (EXPIRED, Drop.EXPIRED),
            (REMOTE + "destination offline", Drop.FEDERATION_REFUSED),
            ("", Drop.FEDERATION_REFUSED),
            ("zzz", Drop.FEDERATION_REFUSED),
        ):
            self.switch.rules.drops.clear()
            envelope = self.envelope(A, C)
            mail = Mail(envelope.SerializeToString(), 0.0, None, Header(envelope))
            self.switch._forwarded(mail, error)
            self.assertEqual((self.drops(), mail.settled), ({drop: 1}, True), error)

    def test_answers_of_a_sender_are_not_held_for_a_receiver_that_confirms_nothing(self) -> None:
        """The receiver asked for them; a sender of requests is held."""
        a, wire_a = self.connect(A)
        b, _ = self.connect(B)
        b.delivery._backlog._most_messages = 1
        self.send(a, B)
        b.delivery.stall()
        b.delivery.catching_up = True
        for kind, held in (("response", False), ("error", False), ("request", True)):
            envelope = self.envelope(A, B)
            if kind == "response":
                envelope.response.SetInParent()
            elif kind == "error":
                envelope.error.SetInParent()
            a.received(envelope.SerializeToString())
            self.assertIs(a.is_paused, held, kind)


class EnqueueTests(SwitchCase):
    """Messages on their way into the queue."""

    def setUp(self) -> None:
        super().setUp()
        self.a, self.wire_a = self.connect(A)
        self.b, self.wire_b = self.connect(B)

    def answer_appends(self) -> list[Deferred[Any]]:
        """Record the queue's appends, so that the test can answer them."""
        waiting: list[Deferred[Any]] = []

        def append(*arguments: Any) -> Deferred[Any]:
            waiting.append(Deferred())
            return waiting[-1]

        self.patch(self.queue, "append", append)
        return waiting

    def test_later_messages_wait_for_an_append_under_way(self) -> None:
        """Whether the queue takes it or not, the receiver reads its queue before it gets what came later."""
        waiting = self.answer_appends()
        for taken in (True, False):
            envelope = self.envelope(A, B)
            mail = Mail(envelope.SerializeToString(), self.clock.seconds() + 60, None, Header(envelope))
            self.b.delivery.catching_up = True
            self.switch._enqueue(Session(B), mail)
            self.b.delivery.retry()
            self.assertEqual((self.b.delivery.appending, self.b.delivery.catching_up), (1, True))
            if taken:
                waiting.pop().callback(1)
            else:
                waiting.pop().errback(QueueUnavailable("no room"))
            self.assertEqual((self.b.delivery.appending, self.b.delivery.catching_up), (0, False), taken)

    def test_a_message_that_was_not_stored_is_sent_again_by_its_sender(self) -> None:
        """The receiver is gone and the queue accepts nothing. An error would look final to the sender."""
        self.send(self.a, B)
        self.patch(self.queue, "append", lambda *_: fail(QueueUnavailable("no room")))
        self.b.lost("cut")
        self.assertEqual(self.wire_a.got, [])
        self.assertIn("the queue of this relay cannot store", str(self.wire_a.ended))

    def test_a_response_that_the_queue_does_not_take_has_to_be_sent_again(self) -> None:
        self.b.lost("gone")
        self.patch(self.queue, "append", lambda *_: fail(QueueUnavailable("no room")))
        response = self.envelope(A, B)
        response.response.SetInParent()
        self.a.received(response.SerializeToString())
        self.assertEqual(self.wire_a.got, [])
        self.assertIn("the queue of this relay cannot store", str(self.wire_a.ended))

    def test_a_notice_of_the_relay_that_the_queue_does_not_take_is_dropped(self) -> None:
        self.switch.registry.get(A)
        self.a.lost("gone")
        self.patch(self.queue, "append", lambda *_: fail(QueueUnavailable("no room")))
        self.switch.answer_expired(self.envelope(A, B).SerializeToString())
        self.assertEqual(self.drops(), {Drop.EXPIRED: 1, Drop.QUEUE_FAILED: 1})


class ExpiredTests(SwitchCase):
    """Stored messages that have expired."""

    def test_senders_at_this_relay_are_notified_of_expiry(self) -> None:
        """Connected or not; a notice for a session of another relay would stay in the queue for ever."""
        for twin in (A, C):
            self.switch.registry.get(twin)
        for source, kept in ((A, 1), (C, 0), (NOBODY, 0)):
            self.switch.rules.drops.clear()
            before = len(self.queue)
            self.switch.answer_expired(self.envelope(source, B).SerializeToString())
            self.clock.advance(0)
            self.assertEqual((len(self.queue) - before, self.drops()), (kept, {Drop.EXPIRED: 1}), source)
        for source in (B, C):
            _, wire = self.connect(source)
            self.switch.answer_expired(self.envelope(source, A).SerializeToString())
            self.assertEqual([one.error.message for one in wire.got], [EXPIRED], source)

    def test_bytes_that_are_no_envelope_are_dropped(self) -> None:
        self.switch.answer_expired(b"\xff")
        self.assertEqual(self.drops(), {Drop.EXPIRED: 1})
        self.assertIsNone(self.switch.deliveries.life_end(QueuedMessage(1, b"\xff")))

    def test_only_pongs_are_delivered_after_their_life(self) -> None:
        """A peer that was away learns by them that its ping arrived."""
        for kind, delivered in (("request", False), ("response", False), ("error", False), ("pong", True)):
            envelope = self.envelope(A, B)
            envelope.timestamp -= 100
            getattr(envelope, kind).SetInParent()
            until = self.switch.deliveries.life_end(QueuedMessage(1, envelope.SerializeToString()))
            self.assertIs(until is not None, delivered, kind)


class ElsewhereTests(SwitchCase):
    """Notices about queues, from other processes and from polls."""

    def test_a_session_reads_its_queue_on_notification(self) -> None:
        _, wire = self.connect(A)
        self.queue.append(str(Session(A)), self.envelope(B, A).SerializeToString(), self.clock.seconds() + 60)
        self.clock.advance(0)
        self.assertEqual(wire.got, [])
        for name in (FEDERATION, str(Session(B)), "a name"):
            self.switch.appended_elsewhere(name)
        self.assertEqual(wire.got, [])
        self.switch.appended_elsewhere(str(Session(A)))
        self.assertEqual([one.uid for one in wire.got], ["u"])


class _Lazy:
    """Delivery to a session that logs each ping."""

    def __init__(self, clock: StrictClock, *, few: bool = True, closed: bool = False) -> None:
        self._clock = clock
        self.has_few_unconfirmed, self.closed = few, closed
        self.pinged: list[float] = []

    def request_confirmation(self) -> None:
        self.pinged.append(self._clock.seconds())


class PingLaterTests(SwitchCase):
    def test_a_session_that_logs_pings_is_pinged_rarely(self) -> None:
        """While few messages are unconfirmed, the ping waits for a second; otherwise for a moment."""
        few, many = _Lazy(self.clock), _Lazy(self.clock, few=False)
        closed, becomes_many = _Lazy(self.clock, closed=True), _Lazy(self.clock)
        began = self.clock.seconds()
        for delivery in (few, many, closed, becomes_many):
            self.switch.deliveries.ping_later(cast(Any, delivery))
        for _ in range(4 * int(MAX_PING_DELAY / PING_DELAY)):
            if self.clock.seconds() - began > MAX_PING_DELAY / 2:
                becomes_many.has_few_unconfirmed = False
            self.clock.advance(PING_DELAY / 2)
        waited = [[round(at - began, 2) for at in one.pinged] for one in (few, many, closed, becomes_many)]
        self.assertEqual(waited[1:3], [[PING_DELAY], [PING_DELAY]])
        self.assertEqual(len(waited[0]), 1)
        self.assertTrue(MAX_PING_DELAY <= waited[0][0] <= MAX_PING_DELAY + PING_DELAY, waited)
        self.assertTrue(MAX_PING_DELAY / 2 <= waited[3][0] <= MAX_PING_DELAY / 2 + 2 * PING_DELAY, waited)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_call_for_the_next_turn_is_made_in_the_next_turn(self) -> None:
        calls: list[str] = []
        self.switch.call_next_turn(lambda: calls.append("called"))
        self.assertEqual(calls, [])
        self.clock.advance(0)
        self.assertEqual(calls, ["called"])


class CostTests(SwitchCase):
    """Sessions that cost too much are ended."""

    def test_small_fragments_above_the_limit_end_the_session(self) -> None:
        session, wire = self.connect(A)
        self.switch.count_fragments(session, int(FRAGMENT_BURST))
        self.assertIsNone(wire.ended)
        self.switch.count_fragments(session, 1)
        self.assertEqual((wire.ended, self.drops()), ("too many small fragments", {Drop.FRAGMENTS: 1}))

    def test_sessions_with_the_largest_incomplete_messages_are_ended(self) -> None:
        """No more sessions are ended than needed."""
        self.switch = self.make_switch(self.queue, max_unfinished=10 * MAX_UNWATCHED_SIZE)
        wires = {}
        for sid, size in (("small", 2), ("large", 5), ("medium", 3)):
            _, wires[sid] = self.connect(A, sid)
            cast(Any, wires[sid]).grew(size * MAX_UNWATCHED_SIZE)
        self.assertEqual(
            (self.switch.unfinished, [one.ended for one in wires.values()]), (10 * MAX_UNWATCHED_SIZE, [None] * 3)
        )
        cast(Any, wires["small"]).grew(2 * MAX_UNWATCHED_SIZE + 1)
        self.assertEqual([sid for sid, wire in wires.items() if wire.ended], ["large"])
        self.assertEqual((self.switch.unfinished, self.drops()), (5 * MAX_UNWATCHED_SIZE + 1, {Drop.UNFINISHED: 1}))


class CountDeliveredLaterTests(SwitchCase):
    def test_a_session_that_does_not_read_is_checked_with_backoff(self) -> None:
        """Fifty times a second, with a window of small messages, 140 of them took a whole core."""

        class Unread:
            looks = 0
            unread = True

            def count_delivered(self) -> bool:
                self.looks += 1
                return not self.unread

        delivery = Unread()
        self.switch.deliveries.count_delivered_later(cast(Any, delivery))
        self.clock.advance(0)
        self.assertEqual(delivery.looks, 1)
        self.clock.pump([WRITE_CHECK_DELAY] * 8)
        self.assertEqual(delivery.looks, 4)  # The pauses are 1, 2 and 4 times WRITE_CHECK_DELAY.
        self.clock.pump([WRITE_CHECK_DELAY] * 492)
        self.assertTrue(30 <= delivery.looks <= 40, delivery.looks)
        delivery.unread = False
        self.clock.pump([WRITE_CHECK_DELAY] * 20)
        looks = delivery.looks
        self.clock.pump([WRITE_CHECK_DELAY] * 100)
        self.assertEqual(delivery.looks, looks)
        # Messages that are sent after the pause are checked soon again.
        delivery.unread = True
        self.switch.deliveries.count_delivered_later(cast(Any, delivery))
        self.clock.pump([WRITE_CHECK_DELAY] * 2)
        self.assertGreaterEqual(delivery.looks, looks + 2)


class PeriodicChecksTests(SwitchCase):
    """Checks that run every second."""

    def test_an_unconfirmed_window_is_stored_and_the_session_ended(self) -> None:
        """First the queue keeps what it has not confirmed, then it is ended."""
        a, wire_a = self.connect(A)
        b, wire_b = self.connect(B)
        self.send(a, B)
        a.ping_received(b"question")
        self.pass_time(3)
        self.assertEqual((wire_a.pongs, len(self.queue), wire_b.ended), ([b"question"], 1, None))
        b.heard_at = self.clock.seconds() + 1000  # The session is not silent.
        self.pass_time(STALLED_AFTER)
        self.assertEqual((wire_b.ended, len(self.queue)), ("nothing was confirmed for too long", 1))

    def test_a_silent_session_is_pinged_and_ended(self) -> None:
        _, wire = self.connect(A)
        self.pass_time(IDLE_PING - 1)
        self.assertEqual(wire.pings, [])
        self.pass_time(1)
        self.assertEqual(wire.pings, [b""])
        wire.has_received = True
        self.pass_time(SILENT_AFTER)
        self.assertIsNone(wire.ended)
        self.pass_time(1)
        self.assertEqual((wire.ended, self.switch.evictions), ("silent for too long", {"closed": 1}))

    def pause(self, seconds: float) -> None:
        """Pause the relay, which then makes its checks before it reads."""
        self.clock.advance(seconds)
        self.rounds.round()

    def test_a_pause_of_the_relay_ends_no_session(self) -> None:
        let_pause(self.clock)
        _, wire = self.connect(A)
        self.pass_time(SILENT_AFTER - 1)
        self.pause(10 * SILENT_AFTER)
        self.assertIsNone(wire.ended)
        wire.has_received = True
        self.pass_time(SILENT_AFTER)
        self.assertIsNone(wire.ended)
        self.pause(10 * SILENT_AFTER)
        self.pass_time(1)
        self.assertEqual(wire.ended, "silent for too long")

    def test_a_pause_of_the_relay_does_not_count_towards_confirmations_and_long_messages(self) -> None:
        let_pause(self.clock)
        a, _ = self.connect(A)
        b, wire_b = self.connect(B)
        c, wire_c = self.connect(C)
        envelope = self.envelope(A, B)
        envelope.expiration = 20 * int(STALLED_AFTER)
        a.received(envelope.SerializeToString())
        cast(Any, wire_c).grew(MAX_UNWATCHED_SIZE + 1)
        b.heard_at = c.heard_at = self.clock.seconds() + 1000  # The sessions are not silent.
        self.pass_time(2)
        self.pause(10 * STALLED_AFTER)
        self.pass_time(STALLED_AFTER - 3)
        self.assertEqual((wire_b.ended, wire_c.ended), (None, None))
        self.pass_time(5)
        self.assertEqual(wire_b.ended, "nothing was confirmed for too long")
        self.assertEqual(wire_c.ended, "a message was not completed in time")

    def test_a_message_that_does_not_end(self) -> None:
        session, wire = self.connect(A)
        cast(Any, wire).grew(MAX_UNWATCHED_SIZE + 1)
        self.assertEqual(self.switch.unfinished, MAX_UNWATCHED_SIZE + 1)
        wire.has_received = True
        self.pass_time(UNFINISHED_FOR)
        self.assertIsNone(wire.ended)
        self.pass_time(1)
        self.assertEqual(
            (wire.ended, self.switch.unfinished, session.is_lost), ("a message was not completed in time", 0, True)
        )

    def test_large_messages_one_after_the_other(self) -> None:
        """Each message is completed in time, so a message that is incomplete at each check is no reason to end the
        session.
        """
        _, wire = self.connect(A)
        for _ in range(2 * int(UNFINISHED_FOR)):
            cast(Any, wire).grew(10 * MAX_UNWATCHED_SIZE)
            wire.has_received = True
            self.pass_time(1)
            cast(Any, wire).grew(MAX_UNWATCHED_SIZE + 1)  # One message is complete, and a part of the next has arrived.
        self.assertIsNone(wire.ended)

    def test_the_sender_of_an_expired_message_is_notified(self) -> None:
        a, wire = self.connect(A)
        self.send(a, B)
        cast(Any, wire).has_received = True
        self.pass_time(61)
        self.assertEqual((wire.got[-1].error.message, len(self.queue)), (TEXTS[Drop.EXPIRED], 0))

    def test_a_step_that_fails(self) -> None:
        self.patch(self.queue, "expired", lambda now: 1 / 0)
        _, wire = self.connect(A)
        self.pass_time(IDLE_PING)
        self.assertEqual(wire.pings, [b""])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), int(IDLE_PING))


class IntakeTests(SwitchCase):
    """Messages that another relay brings."""

    def bring(self, destination: int, *, only_connected: bool = False, **options: Any) -> Deferred[None]:
        envelope = self.envelope(C, destination, **options)
        twin = Twin(destination, bytes(32), self.twins.relays.get(destination, ""))
        known = twin if destination in self.twins.relays else None
        return self.intake.take(Header(envelope), envelope.SerializeToString(), known, only_connected=only_connected)

    def test_accept_fires_when_the_receiver_has_confirmed(self) -> None:
        b, wire = self.connect(B)
        taken = self.bring(B)
        self.assertNoResult(taken)
        self.clock.advance(PING_DELAY)
        b.pong_received(wire.pings[-1])
        self.successResultOf(taken)

    def test_accept_fires_when_the_message_is_stored(self) -> None:
        taken = self.bring(B)
        self.clock.advance(0)
        self.successResultOf(taken)
        self.assertEqual(len(self.queue), 1)

    def test_accept_fails_for_refused_messages(self) -> None:
        for destination, options, drop in (
            (NOBODY, {}, Drop.UNKNOWN_DESTINATION),
            (C, {}, Drop.NO_RELAY),
            (B, {"only_connected": True}, Drop.OFFLINE),
            (B, {"tags": "fail-fast"}, Drop.OFFLINE),
        ):
            failure = self.failureResultOf(self.bring(destination, **cast(Any, options)), MessageRefused)
            self.assertIs(failure.value.drop, drop)
        self.assertEqual(len(self.queue), 0)

    def test_accept_fails_for_a_message_that_is_lost(self) -> None:
        """Its receiver ends without a confirmation, and the queue cannot store the message."""
        for ends in (True, False):
            b, wire = self.connect(B)
            taken = self.bring(B)
            with contextlib.ExitStack() as patched:
                patched.callback(setattr, self.queue, "append", self.queue.append)
                cast(Any, self.queue).append = lambda *_: fail(QueueUnavailable("no room"))
                if ends:
                    b.lost("gone")
                    self.failureResultOf(taken, QueueUnavailable)
                else:
                    self.assertNoResult(taken)
                    taken.cancel()  # The other relay has disconnected meanwhile.
                    b.lost("gone")
                    self.failureResultOf(taken, CancelledError)

    def test_returning_receivers_get_messages_after_a_start(self) -> None:
        self.patch(presence, "START_GRACE", 60.0)
        taken = self.bring(B, only_connected=True)
        self.assertNoResult(taken)
        b, wire = self.connect(B)
        self.clock.advance(PING_DELAY)
        b.pong_received(wire.pings[-1])
        self.successResultOf(taken)


class TextTests(SynchronousTestCase):
    """Texts that senders receive."""

    def test_every_drop_reason_has_a_text(self) -> None:
        """A drop without a text could not be raised."""
        import ast
        from pathlib import Path

        import dmsg.rmb.relay

        raised = set()
        for path in Path(dmsg.rmb.relay.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                named = isinstance(node, ast.Call) and ast.unparse(node.func) in ("MessageRefused", "Decision")
                for argument in [*node.args, *(one.value for one in node.keywords)] if named else ():  # type: ignore[attr-defined]
                    text = ast.unparse(argument)
                    if text.startswith("Drop."):
                        raised.add(Drop[text.removeprefix("Drop.")])
        self.assertGreater(len(raised), 6)
        self.assertEqual(raised - set(TEXTS), set())
        for drop in raised:
            self.assertEqual(MessageRefused(drop).drop, drop)
