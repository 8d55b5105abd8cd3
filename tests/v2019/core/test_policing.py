"""Limits of a client at a server: rates, bounds, lists, slower reading, leaving."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.buckets import Bucket
from dmsg.base.policing import ANSWER_FACTOR, BURST_SECONDS, FLOOD_FACTOR
from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.net.links.acceptor import FLOOD_BURST, FLOOD_RATE, NOTIFIED_PER_BLOCK
from dmsg.servers.admission import CHECK_INTERVAL, HOOK_CACHE_TIME, HOOK_TIMEOUT, Admission, Hook, KeyList, ListError
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.policing import PING_RATE, Kind, Limits, Policer
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, DRAIN, FWD, PING, PONG, REQUEST, Frame, parse_drain
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.support import KEYS, SERVER_KEY, MemoryNetwork


class PoliceTests(SynchronousTestCase):
    """Buckets."""

    def test_a_bucket_refills_at_its_rate(self) -> None:
        bucket = Bucket(10, 0)
        self.assertTrue(bucket.take(10, 5, 10, 0))
        self.assertFalse(bucket.take(1, 5, 10, 0.1))
        self.assertTrue(bucket.take(1, 5, 10, 0.2))
        self.assertFalse(bucket.take(11, 5, 10, 1000))

    def test_excess_is_refused_and_gross_excess_ends_the_connection(self) -> None:
        limits = Limits(request_rate=10)
        for kind in (Kind.REQUEST, Kind.ACCEPT, Kind.CLOSE, Kind.PING):
            police = Policer()
            allowed = int(limits.rate(kind) * BURST_SECONDS)
            answers = [police.allows(kind, limits, 0) for _ in range(allowed + 5)]
            self.assertEqual(answers, [True] * allowed + [False] * 5)
            with self.assertRaises(RemoteProtocolError) as caught:
                for _ in range(int(10 * FLOOD_FACTOR * BURST_SECONDS)):
                    police.allows(kind, limits, 0)
            self.assertEqual(caught.exception.reason, DropReason.FLOOD)
            self.assertTrue(Policer().allows(kind, limits, 0))

    def test_pings_alone_have_a_rate_of_their_own(self) -> None:
        rates = {kind: Limits(request_rate=10).rate(kind) for kind in Kind}
        self.assertEqual(rates.pop(Kind.PING), PING_RATE)
        self.assertEqual(rates.pop(Kind.REQUEST), 10)
        self.assertEqual(set(rates.values()), {10 * ANSWER_FACTOR})

    def test_each_kind_has_a_bucket_of_its_own(self) -> None:
        limits = Limits(request_rate=10)
        for used in Kind:
            police = Policer()
            while police.within(used, limits.rate(used), 0):
                pass
            left = [kind for kind in Kind if police.within(kind, limits.rate(kind), 0)]
            self.assertEqual(left, [kind for kind in Kind if kind is not used])
        self.assertEqual(len(Kind), 6)

    def test_frames_in_flight_to_a_lost_remote_are_no_flood(self) -> None:
        police, limits = Policer(), Limits(request_rate=10)
        answers = [police.allows(Kind.STRAY, limits, 0) for _ in range(20_000)]
        self.assertLess(sum(answers), 100)

    def test_a_rate_of_0_is_no_limit(self) -> None:
        police = Policer()
        self.assertTrue(all(police.allows(Kind.REQUEST, Limits(request_rate=0), 0) for _ in range(10_000)))


class ServerCase(SynchronousTestCase):
    """A server in memory, with limits, and raw clients."""

    options: dict[str, Any] = {"limits": Limits(request_rate=10, max_per_pair=5, byte_rate=0, max_per_address=3)}

    def setUp(self) -> None:
        self.network = MemoryNetwork(**self.options)
        self.relay = self.network.factory.relay

    def client(self, name: str) -> RawClient:
        client = RawClient(KEYS[name], SERVER_KEY.public)
        self.network.join(client)
        self.network.settle()
        return client

    def send(self, client: RawClient, *frames: Frame) -> list[Frame]:
        """Frames of one client, and what it gets for them."""
        client.take()
        for start in range(0, len(frames), 200):
            client.send(b"".join(frame.encode() for frame in frames[start : start + 200]))
        self.network.settle()
        return client.take()


class RelayLimitTests(ServerCase):
    """Effect of the limits in the relay."""

    def request(self, number: int) -> Frame:
        return Frame(REQUEST, 2 * number, KEYS["A"].public + KEYS["B"].public)

    def test_requests_over_the_rate(self) -> None:
        a, _ = self.client("A"), self.client("B")
        answers = self.send(a, *[self.request(number) for number in range(30)])
        reasons = [answer.payload[0] for answer in answers]
        self.assertEqual(reasons, [CloseReason.TOO_MANY_TRANSPORTS] * 15 + [CloseReason.RATE_LIMITED] * 10)
        self.assertEqual(self.relay.drops[DropReason.RATE_LIMITED], 10)
        self.assertEqual(self.relay.drops[DropReason.TOO_MANY_PER_PAIR], 15)
        self.network.clock.advance(1)
        answers = self.send(a, self.request(99))
        self.assertEqual(answers[0].payload[0], CloseReason.TOO_MANY_TRANSPORTS)

    def test_requests_of_a_wrong_form_count_too(self) -> None:
        a, b = self.client("A"), self.client("B")
        self.send(a, *[Frame(REQUEST, 2, b"too short")] * 2000)
        self.assertEqual((a.closed, b.closed, self.relay.drops[DropReason.FLOOD]), (True, False, 1))

    def test_a_flood_ends_the_flooder_alone(self) -> None:
        for frame_type in (REQUEST, ACCEPT, CLOSE, PING):
            a, b, c = self.client("A"), self.client("B"), self.client("C")
            self.send(a, self.request(1))
            payload = self.request(1).payload if frame_type == REQUEST else b"\0"
            own_id = 2 if frame_type == ACCEPT else 0 if frame_type == PING else 40
            self.send(a, *[Frame(frame_type, own_id, payload)] * 2000)
            self.assertEqual((a.closed, b.closed, c.closed), (True, False, False), frame_type)
            self.assertEqual(self.relay.drops.pop(DropReason.FLOOD), 1)
            self.assertEqual(self.send(c, Frame(PING, 0, b"still there"))[0], Frame(PONG, 0, b"still there"))
            for client in (b, c):
                client.transport.loseConnection()  # type: ignore[union-attr]
            self.network.settle()
            self.network.clock.advance(1 / FLOOD_RATE)

    def test_earlier_flooders_are_notified(self) -> None:
        for _ in range(int(FLOOD_BURST)):
            self.send(self.client("A"), *[Frame(PING, 0, b"")] * 2000)
        again, other = self.client("A"), self.client("B")
        self.assertEqual(again.take(), [Frame(CLOSE, 0, bytes((CloseReason.RATE_LIMITED,)))])
        self.assertEqual((again.closed, other.closed, self.relay.drops[DropReason.FLOODED_BEFORE]), (True, False, 1))
        self.network.clock.advance(1 / FLOOD_RATE + 1)
        self.assertFalse(self.client("A").closed)

    def test_an_accept_over_the_rate_closes_its_transport(self) -> None:
        a, _ = self.client("A"), self.client("B")
        self.send(a, self.request(1))
        answers = self.send(a, *[Frame(ACCEPT, 2, b"")] * 81)
        self.assertEqual(answers, [Frame(CLOSE, 2, bytes((CloseReason.RATE_LIMITED,)))])

    def test_a_close_over_the_rate_takes_effect(self) -> None:
        a, _ = self.client("A"), self.client("B")
        self.send(a, self.request(1))
        self.send(a, *[Frame(CLOSE, 40, b"\0")] * 85, Frame(CLOSE, 2, b"\0"))
        self.assertEqual(self.relay.route_count, 0)

    def test_frames_for_a_lost_remote_end_no_connection(self) -> None:
        a = self.client("A")
        answers = self.send(a, *[Frame(FWD, 2, b"\0\0x"), Frame(ACK, 2, b"\0\0")] * 5000)
        self.assertFalse(a.closed)
        self.assertLess(len(answers), 200)

    def test_connections_of_one_address(self) -> None:
        factory = self.network.factory
        one, other = IPv4Address("TCP", "192.0.2.1", 1), IPv4Address("TCP", "192.0.2.2", 1)
        # A few connections above the limit of three finish the handshake, so that they can be told the reason.
        links: list[Any] = [factory.buildProtocol(one) for _ in range(4 + NOTIFIED_PER_BLOCK)]
        self.assertEqual([link is None for link in links], [False] * (3 + NOTIFIED_PER_BLOCK) + [True])
        for told in links[3:-1]:
            told.makeConnection(_Nothing())
            told.connectionLost()
        self.assertIsNotNone(factory.buildProtocol(other))
        self.assertEqual(self.relay.drops[DropReason.TOO_MANY_FROM_ADDRESS], 1 + NOTIFIED_PER_BLOCK)
        link: Any = links[0]
        link.makeConnection(_Nothing())
        link.connectionLost()
        self.assertIsNotNone(factory.buildProtocol(one))


class _Nothing:
    """A transport that takes everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class AdmissionTests(ServerCase):
    """Lists of allowed and denied keys, and the hook."""

    options: dict[str, Any] = {}

    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.admission = self.network.factory.admission

    def write(self, name: str, *keys: Any, text: str = "") -> str:
        path = self.directory / name
        path.write_text(text + "".join(f"{key.public}  # a friend\n" for key in keys))
        # Two writes within the resolution of the file's timestamp are both noticed.
        stamp = time.time_ns() + len(path.read_text())
        os.utime(path, ns=(stamp, stamp))
        return str(path)

    def test_allow_and_deny_lists_decide(self) -> None:
        a, b, c = (KEYS[name].public for name in "ABC")
        allow, deny = KeyList(self.write("allow", KEYS["A"], KEYS["B"])), KeyList(self.write("deny", KEYS["B"]))
        self.assertEqual([Admission(allow, deny).check(key) for key in (a, b, c)], [True, False, False])
        self.assertEqual([Admission(None, deny).check(key) for key in (a, b, c)], [True, False, True])
        self.assertEqual([Admission().check(key) for key in (a, b, c)], [True, True, True])

    def test_refused_clients_are_notified(self) -> None:
        self.admission.deny = KeyList(self.write("deny", KEYS["A"]))
        a = self.client("A")
        self.assertEqual(a.take(), [Frame(CLOSE, 0, bytes((CloseReason.NOT_ADMITTED,)))])
        self.assertTrue(a.closed)
        self.assertEqual(self.relay.drops[DropReason.NOT_ADMITTED], 1)
        self.assertFalse(self.client("B").closed)

    def test_a_change_takes_effect_on_live_connections(self) -> None:
        path = self.write("deny")
        self.admission.deny = KeyList(path)
        self.admission.watch(self.network.clock, self.network.factory.admission_changed)
        a, b = self.client("A"), self.client("B")
        self.write("deny", KEYS["A"])
        self.network.clock.advance(CHECK_INTERVAL)
        self.network.settle()
        self.assertEqual((a.closed, b.closed), (True, False))
        self.admission.stop()

    def test_a_broken_list_leaves_the_rules_unchanged(self) -> None:
        path = self.write("deny", KEYS["A"])
        self.admission.deny = KeyList(path)
        for text in ("nonsense\n", "02ab\n", "\x00", "zz" * 33):
            self.write("deny", text=text)
            self.assertFalse(self.admission.reload())
            self.assertIs(self.admission.check(KEYS["A"].public), False)
            self.assertRaises(ListError, KeyList, path)
        os.unlink(path)
        self.assertFalse(self.admission.reload())
        self.assertIs(self.admission.check(KEYS["A"].public), False)
        self.assertRaises(ListError, KeyList, path)

    def test_a_change_that_leaves_time_and_size_as_they_were(self) -> None:
        """For instance, an unreadable list becomes readable."""
        path = self.write("deny", KEYS["A"])
        status = os.stat(path)
        deny = KeyList(path)
        Path(path).write_text(f"{KEYS['B'].public}  # a friend\n")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.assertTrue(deny.reload())
        self.assertEqual(deny.keys, {KEYS["B"].public})

    def test_the_hook_decides_about_unlisted_keys(self) -> None:
        clock = Clock()
        for result, when_down, expected in (
            (200, False, True),
            (403, True, False),
            (500, False, False),
            (500, True, True),
            (OSError("refused"), False, False),
            (OSError("refused"), True, True),
        ):
            http: Any = _HTTP(result)
            hook = Hook(clock, "http://127.0.0.1:1/", when_down=when_down, http=http)
            asked: Any = hook.ask(KEYS["A"].public)
            self.assertIs(self.successResultOf(asked), expected)
            self.assertEqual(http.asked, [{"key": KEYS["A"].public.hex()}])
            known = hook.ask(KEYS["A"].public)
            if result in (200, 403):
                self.assertIs(known, expected)  # The result comes from memory.
                clock.advance(HOOK_CACHE_TIME)
                self.assertIsInstance(hook.ask(KEYS["A"].public), Deferred)
            else:
                self.assertIsInstance(known, Deferred)
                self.assertEqual(hook.unanswered, 2)

    def test_pauses_of_this_process_do_not_count_while_the_hook_is_awaited(self) -> None:
        """Neither for the head of the answer nor for its body."""
        answered: Deferred[Any] = Deferred()
        for waiting in (answered, succeed(_Endless())):
            clock = PausingClock()
            http: Any = SimpleNamespace(post=lambda *args, waiting=waiting, **options: waiting)
            hook = Hook(clock, "http://127.0.0.1:1/", http=http)
            asked: Any = hook.ask(KEYS["A"].public)
            pass_time(clock, 1.0)
            clock.advance(10 * HOOK_TIMEOUT)
            pass_time(clock, HOOK_TIMEOUT - 1.5)
            self.assertNoResult(asked)
            pass_time(clock, 1.0)
            self.assertIs(self.successResultOf(asked), False)
            self.assertEqual((hook.unanswered, clock.getDelayedCalls()), (1, []))

    def test_clients_wait_for_the_admission_hook(self) -> None:
        answer: Deferred[bool] = Deferred()
        self.admission.hook = _Slow(answer)
        a = self.client("A")
        self.assertEqual((a.take(), a.closed), ([], False))
        answer.callback(True)
        self.network.settle()
        self.assertEqual(len(a.take()), 1)
        refused: Deferred[bool] = Deferred()
        self.admission.hook = _Slow(refused)
        b = self.client("B")
        refused.errback(RuntimeError("bug in a hook"))
        self.network.settle()
        self.assertTrue(b.closed)


class _Slow:
    def __init__(self, answer: Deferred[bool]) -> None:
        self.ask = lambda key: answer


class _Endless:
    """Response with a body that never ends."""

    code = 200

    def deliverBody(self, body: Any) -> None:
        body.makeConnection(StringTransport())


class _Response:
    def __init__(self, code: int) -> None:
        self.code = code
        self.length = 0

    def deliverBody(self, protocol: Any) -> None:
        from twisted.python.failure import Failure
        from twisted.web.client import ResponseDone

        protocol.connectionLost(Failure(ResponseDone()))


class _HTTP:
    """Answers with one status, or an error."""

    def __init__(self, result: int | Exception) -> None:
        self._result = result
        self.asked: list[Any] = []

    def post(self, url: str, *, json: Any, reactor: Any) -> Any:
        self.asked.append(json)
        return fail(self._result) if isinstance(self._result, Exception) else succeed(_Response(self._result))


class DrainTests(ServerCase):
    """Leaving."""

    options: dict[str, Any] = {}

    def test_only_clients_that_know_notices_get_them(self) -> None:
        a, b = self.client("A"), self.client("B")
        self.send(a, Frame(PING, 0, b"x"))
        self.assertEqual(self.relay.announce_drain(8, [KEYS["C"].public]), 1)
        self.network.settle()
        (drain,) = a.take()
        self.assertEqual((drain.type, parse_drain(drain.payload)), (DRAIN, (8, [KEYS["C"].public])))
        self.assertEqual([frame for frame in b.take() if frame.type == DRAIN], [])
        refused = self.send(a, Frame(REQUEST, 2, KEYS["A"].public + KEYS["B"].public))
        self.assertEqual(refused[0].payload[0], CloseReason.SHUTTING_DOWN)
