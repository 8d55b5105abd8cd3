"""Race of carriers, with a clock and endpoints of the test."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import HandshakeError
from dmsg.keys import SecKey
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import Link
from dmsg.net.links.race import HEAD_START, CarrierMemory, CarrierRace
from dmsg.net.links.records import RecordLink
from dmsg.noise.xk import XKHandshake
from tests.net.links.support import User

WEBSOCKET, SECURE = Carrier("ws"), Carrier("wss", 443)


class Way:
    """Endpoint whose connection the test makes."""

    def __init__(self) -> None:
        self.tries: list[tuple[Any, Deferred[Any]]] = []
        self.given_up = 0

    def connect(self, factory: Any) -> Deferred[Any]:
        def give_up(_: Any) -> None:
            self.given_up += 1

        connected: Deferred[Any] = Deferred(give_up)
        self.tries.append((factory, connected))
        return connected

    def connected(self) -> Any:
        """Connect, and return the link."""
        factory, connected = self.tries[-1]
        link = factory.buildProtocol(None)
        transport = StringTransportWithDisconnection()
        transport.protocol = link
        link.makeConnection(transport)
        connected.callback(link)
        return link

    def fail(self, error: Exception) -> None:
        """Fail to connect."""
        self.tries[-1][1].errback(error)


class RaceTests(SynchronousTestCase):
    """Choice between the ways to a server."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.server = SecKey.generate()
        self.ways = {PLAIN: Way(), WEBSOCKET: Way(), SECURE: Way()}

    def race(self, *carriers: Carrier) -> Any:
        ways: Any = self.ways
        race = CarrierRace(self.clock, carriers or (PLAIN, WEBSOCKET, SECURE), ways.__getitem__, self.make_link)
        self.result = race.connect(lambda remote: User())
        self.result.addErrback(self.keep)
        self.error: Any = None
        return race

    def keep(self, failure: Any) -> None:
        self.error = failure.value

    def make_link(self, make_user: Any, failed: Any) -> Link:
        handshake = XKHandshake(SecKey.generate(), self.server.public)
        return RecordLink(self.clock, TurnFlush(self.clock), handshake, make_user, on_failure=failed)

    def answer(self, link: Any) -> None:
        """Answer the first message of a link's handshake, as the server does."""
        handshake = XKHandshake(self.server)
        handshake.receive_data(link.transport.value())
        link.dataReceived(handshake.data_to_send())
        self.clock.advance(0)

    def started(self) -> list[int]:
        return [len(way.tries) for way in self.ways.values()]

    def test_others_are_not_tried_while_plain_tcp_answers_in_time(self) -> None:
        race = self.race()
        link = self.ways[PLAIN].connected()
        self.clock.advance(HEAD_START * 0.9)
        self.answer(link)
        self.clock.advance(10)
        self.assertIsInstance(self.successResultOf(self.result), User)
        self.assertEqual((race.used, self.started()), (PLAIN, [1, 0, 0]))

    def test_each_gets_a_head_start_and_the_first_answer_wins(self) -> None:
        race = self.race()
        self.clock.advance(HEAD_START)
        self.assertEqual(self.started(), [1, 1, 0])
        late = self.ways[PLAIN].connected()
        self.answer(self.ways[WEBSOCKET].connected())
        self.assertEqual(race.used, WEBSOCKET)
        self.successResultOf(self.result)
        self.assertEqual(race.failed, {PLAIN: "no answer before the one by ws"})
        # The loser is gone before it could send the client's key.
        self.assertFalse(late.transport.connected)
        self.clock.advance(10)
        self.assertEqual(self.started(), [1, 1, 0])

    def test_a_failure_starts_the_next_at_once(self) -> None:
        race = self.race()
        self.ways[PLAIN].fail(ConnectionRefusedError())
        self.assertEqual(self.started(), [1, 1, 0])
        self.answer(self.ways[WEBSOCKET].connected())
        self.successResultOf(self.result)
        self.assertIn("refused", race.failed[PLAIN])

    def test_what_is_no_server_of_ours_gives_way_to_the_others(self) -> None:
        """A portal of a hotel answers at any port."""
        race = self.race(PLAIN, WEBSOCKET)
        self.clock.advance(HEAD_START)
        self.ways[PLAIN].connected().dataReceived(b"HTTP/1.1 302 Found\r\nLocation: http://portal\r\n\r\n" * 9)
        self.clock.advance(0)
        self.answer(self.ways[WEBSOCKET].connected())
        self.successResultOf(self.result)
        self.assertEqual((race.used, list(race.failed)), (WEBSOCKET, [PLAIN]))
        self.assertEqual(self.started(), [1, 2, 0])

    def test_when_all_fail_the_error_is_that_of_the_first(self) -> None:
        race = self.race(PLAIN, WEBSOCKET)
        self.ways[PLAIN].fail(ConnectionRefusedError())
        self.ways[WEBSOCKET].fail(HandshakeError("no websocket"))
        self.assertIsInstance(self.error, ConnectionRefusedError)
        self.assertEqual(list(race.failed), [PLAIN, WEBSOCKET])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_giving_up_ends_all_tries(self) -> None:
        self.race()
        self.clock.advance(HEAD_START)
        link = self.ways[PLAIN].connected()
        self.result.cancel()
        self.assertFalse(link.transport.connected)
        self.assertEqual(self.ways[WEBSOCKET].given_up, 1)
        self.clock.advance(60)
        self.assertEqual(self.started(), [1, 1, 0])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_worked_last_goes_first(self) -> None:
        memory, server = CarrierMemory(), self.server.public
        carriers = [PLAIN, WEBSOCKET, SECURE]
        self.assertEqual(memory.order(server, carriers), carriers)
        self.assertEqual(memory.record_success(server, SECURE, {PLAIN: "refused"}), {PLAIN: "refused"})
        self.assertEqual(memory.order(server, carriers), [SECURE, PLAIN, WEBSOCKET])
        self.assertEqual(memory.order(SecKey.generate().public, carriers), carriers)
        # Plain TCP was not tried this time, and its failure is still known; that of a carrier that is gone is not.
        self.assertEqual(memory.record_success(server, SECURE, {WEBSOCKET: "no"}), {PLAIN: "refused", WEBSOCKET: "no"})
        memory.order(server, [PLAIN, SECURE])
        self.assertEqual(memory.record_success(server, SECURE, {}), {PLAIN: "refused"})
        self.assertEqual(memory.record_success(server, PLAIN, {}), {})
        self.assertEqual(memory.order(server, carriers), carriers)
