"""Clients of the Go code of March and April 2019: ids in ChannelOpened, and acknowledgements inside channels."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.error import ConnectionAborted
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason, HandshakeError, TransportClosed
from dmsg.keys import SecKey
from dmsg.messaging.ack_timers import UNDECIDED_LIMIT
from dmsg.messaging.core.acks import ACK_INTERVAL, MAX_DUE, AckLayer, looks_acknowledged
from dmsg.messaging.core.relay import Relay
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, CLOSE_CHANNEL, OPEN_CHANNEL, SEND, Profile
from dmsg.messaging.session import ClientSession
from dmsg.net.streams.address import StreamLost
from dmsg.net.streams.stream import LINGER
from tests.messaging.core.test_relay import RelayCase
from tests.messaging.stock import StockChannel, StockClient
from tests.messaging.support import KEYS, Network, vectors
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import Accepting, Recorder

ERAS = {"2019-03-06": (False, True), "2019-03-13": (True, True), "2019-04-15": (True, False)}
"""Two ids, and acknowledgements, by the date from which the Go code had them."""


class LayerTests(SynchronousTestCase):
    """The layer by itself, against what the Go code wrote."""

    def test_the_layer_reproduces_the_recorded_bytes(self) -> None:
        recorded = vectors("ack_layer")
        layer = AckLayer()
        self.assertEqual(layer.payload(b"foo").hex(), recorded["write_foo_plaintext_hex"])
        other = AckLayer()
        self.assertEqual(other.receive(b"\0\0bar"), (b"bar", False))
        self.assertEqual(other.acknowledgements(), b"")
        other.consumed()
        self.assertEqual(other.acknowledgements().hex(), recorded["ack_for_bar_plaintext_hex"])
        three = bytes.fromhex(recorded["three_pending_acks_flush_hex"])
        self.assertEqual(layer.receive(three), (None, False))
        self.assertEqual(layer.in_flight, 1)

    @given(st.lists(st.binary(max_size=300), max_size=30))
    def test_two_ends_of_the_layer_understand_each_other(self, messages: list[bytes]) -> None:
        one, two = AckLayer(), AckLayer()
        for data in messages:
            got, acknowledged = two.receive(one.payload(data))
            self.assertEqual((got, acknowledged), (data, False))
            two.consumed()
            self.assertEqual(one.receive(two.acknowledgements()), (None, True))
        self.assertEqual((one.in_flight, two.due), (0, False))

    @given(st.binary(max_size=120))
    def test_random_bytes_do_not_break_the_layer(self, message: bytes) -> None:
        layer = AckLayer()
        layer.payload(b"under way")
        try:
            layer.receive(message)
        except (HandshakeError, TransportClosed):
            pass

    def test_other_messages_are_not_acks(self) -> None:
        layer = AckLayer()
        for wrong in (b"hell", b"\1", b"\1\0" + bytes(31), b"\0", b"\1\0" + bytes(32) + b"\7"):
            self.assertRaises(HandshakeError, layer.receive, wrong)
        layer.payload(b"x")
        with self.assertRaises(TransportClosed) as caught:
            layer.receive(b"\1\0" + sha256(b"y").digest())
        self.assertEqual(caught.exception.reason, CloseReason.HASH_MISMATCH)

    def test_waiting_data_is_limited(self) -> None:
        layer = AckLayer()
        for number in range(MAX_DUE):
            layer.receive(bytes((0, number)))
        self.assertRaises(HandshakeError, layer.receive, b"\0\0")

    def test_a_first_word(self) -> None:
        self.assertTrue(looks_acknowledged(b"\0\0hello"))
        self.assertFalse(looks_acknowledged(b"hello"))
        self.assertFalse(looks_acknowledged(b""))


class OldNetwork(Network):
    """A server, clients of this package, and clients as the Go code has them."""

    def __init__(self, **server_options: Any) -> None:
        super().__init__(Profile.SKYWIRE, **server_options)

    def stock(self, key: SecKey, era: str, **options: Any) -> StockClient:
        """Return a connected client of that date."""
        two_ids, acks = ERAS[era]
        client = StockClient(key, KEYS["S"].public, self.clock.callLater, two_ids=two_ids, acks=acks, **options)
        client.server_side = self.join(client)
        self.settle()
        return client


def echo(channel: StockChannel, data: bytes) -> None:
    """A program that answers with what it reads."""
    channel.write(data)


class Leaving(Recorder):
    """Protocol that closes the channel when the first data arrives."""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        assert self.transport is not None
        self.transport.loseConnection()


class LeavingDiallerTests(SynchronousTestCase):
    """Clients that have opened channels to an unmodified acceptor disconnect."""

    def test_an_acceptor_recovers_its_ids(self) -> None:
        for era in ERAS:
            network = OldNetwork()
            stock = network.stock(KEYS["B"], era)
            relay_peer = network.relay.newest[KEYS["B"].public]
            # Each session opens eight channels, so that together there are more channels than ids.
            for number in range(35):
                session = network.client(KEYS["A"])
                openings = [session.open(stock.key.public, Accepting(), acks=ERAS[era][1]) for _ in range(8)]
                network.settle()
                for opening in openings:
                    self.successResultOf(opening)
                session.link.transport.abortConnection()
                network.settle()
                self.assertEqual((stock.channels, stock.panics), ({}, []), (era, number))
            self.assertEqual((relay_peer.answers_due, relay_peer.doubtful), ({}, {}))
            # The client's answers do not count as unrequested frames.
            self.assertEqual(network.relay.drops[DropReason.NO_SUCH_TRANSPORT], 0)
            self.assertTrue(all(one.over for one in stock.accepted))

    def test_other_channels_go_on(self) -> None:
        """The answers to what is over close nothing else, by whichever id a program names its channels."""
        for era in ERAS:
            network = OldNetwork()
            stock = network.stock(KEYS["B"], era, got=echo)
            stays, leaves = network.client(KEYS["A"]), network.client(SecKey.from_seed(b"client-c"))
            acks = ERAS[era][1]
            openings = [one.open(stock.key.public, Accepting(), acks=acks) for one in (stays, leaves) for _ in range(3)]
            network.settle()
            living = [self.successResultOf(one) for one in openings][:3]
            leaves.link.transport.abortConnection()
            network.settle()
            for one in living:
                one.transport.write(b"still here")
            network.settle()
            self.assertEqual([one.data for one in living], [b"still here"] * 3, era)
            self.assertEqual(len(stock.channels), 3, era)

    def test_our_programs_see_an_unclean_end(self) -> None:
        for two_ids in (False, True):
            network = OldNetwork()
            accepting = Accepting()
            network.client(KEYS["B"], accepting, two_ids=two_ids)
            session = network.client(KEYS["A"], two_ids=two_ids)
            opening = session.open(KEYS["B"].public, Accepting())
            network.settle()
            self.successResultOf(opening)
            session.link.transport.abortConnection()
            network.settle()
            (there,) = accepting.built
            self.assertEqual(there.lost.value.close_reason, CloseReason.ABORTED)
            peer = network.relay.newest[KEYS["B"].public]
            self.assertEqual(peer.answers_due, {})


class DialTests(SynchronousTestCase):
    """A client of this package opens a channel to a program of 2019."""

    def reach(self, era: str, **options: Any) -> tuple[OldNetwork, Any, StockClient]:
        network = OldNetwork()
        stock = network.stock(KEYS["B"], era, **options)
        session = network.client(KEYS["A"])
        two_ids, acks = ERAS[era]
        mine = Accepting()
        opening = session.open(stock.key.public, mine, acks=acks)
        network.settle()
        self.successResultOf(opening)
        return network, mine.built[0], stock

    def test_a_short_message_and_its_end_arrive(self) -> None:
        """Without acknowledgements, this ended the process of an unmodified acceptor."""
        for era in ERAS:
            network, mine, stock = self.reach(era)
            mine.transport.write(b"hell")
            mine.transport.loseConnection()
            network.settle()
            for _ in range(30):
                network.advance(ACK_INTERVAL)
            (channel,) = stock.accepted
            self.assertEqual((channel.data, stock.panics), (b"hell", []), era)
            self.assertTrue(mine.lost and channel.over, era)
            self.assertFalse(mine.lost.check(StreamLost), era)
            self.assertEqual(network.relay.channel_count, 0)

    def test_a_large_echo_arrives(self) -> None:
        for era in ERAS:
            network, mine, stock = self.reach(era, got=echo)
            data = SecKey.generate().to_bytes() * 8192
            mine.transport.write(data)
            for _ in range(400):
                network.advance(0.02)
                if len(mine.data) == len(data):
                    break
            self.assertEqual((mine.data == data, stock.panics), (True, []), era)

    def test_sends_are_acknowledged(self) -> None:
        network, mine, stock = self.reach("2019-03-13")
        sent = mine.transport.send(b"x" * 200_000)
        self.assertNoResult(sent)
        for _ in range(6):
            network.advance(ACK_INTERVAL)
        self.successResultOf(sent)
        self.assertEqual(len(stock.accepted[0].data), 200_000)

    def test_a_writer_is_acknowledged_on_delivery(self) -> None:
        network, mine, stock = self.reach("2019-03-06")
        (channel,) = stock.accepted
        mine.transport.pauseProducing()
        channel.write(b"one")
        for _ in range(5):
            network.advance(1)
        self.assertEqual((channel.writes, mine.data), (0, b""))
        mine.transport.resumeProducing()
        network.settle()
        self.assertEqual((channel.writes, mine.data), (1, b"one"))

    def test_a_leaving_program_acknowledges_first(self) -> None:
        network = OldNetwork()
        stock = network.stock(KEYS["B"], "2019-03-06")
        mine = Accepting(Leaving)
        network.client(KEYS["A"]).open(stock.key.public, mine, acks=True)
        network.settle()
        (channel,) = stock.accepted
        channel.write(b"that is all")
        network.settle()
        self.assertEqual((channel.writes, channel.over, mine.built[0].data), (1, True, b"that is all"))

    def test_many_at_a_time(self) -> None:
        """Each writer has an unacknowledged message; all of them are acknowledged."""
        network, mine, stock = self.reach("2019-03-13")
        self.assertTrue(mine.transport.confirms)
        (channel,) = stock.accepted
        for number in range(40):
            channel.write(b"%d," % number)
        for _ in range(20):
            network.advance(0.02)
        self.assertEqual(channel.writes, 40)
        self.assertEqual(mine.data, b"".join(b"%d," % number for number in range(40)))

    def test_a_client_without_acks_is_detected(self) -> None:
        network = OldNetwork()
        stock = network.stock(KEYS["B"], "2019-04-15")
        session = network.client(KEYS["A"])
        mine = Accepting()
        session.open(stock.key.public, mine, acks=True)
        network.settle()
        stock.accepted[0].write(b"hello there")
        network.settle()
        (protocol,) = mine.built
        assert protocol.lost is not None
        self.assertEqual(protocol.lost.value.close_reason, CloseReason.ACKS_DIFFER)
        self.assertTrue(stock.accepted[0].over)

    def test_the_first_word_reveals_the_dialect(self) -> None:
        for era in ("2019-03-13", "2019-04-15"):
            network = OldNetwork()
            stock = network.stock(KEYS["B"], era)
            session = network.client(KEYS["A"])
            mine = Accepting()
            session.open(stock.key.public, mine, acks=None)
            network.settle()
            (protocol,) = mine.built
            protocol.transport.write(b"waits")
            network.settle()
            self.assertEqual(stock.accepted[0].received, [])
            stock.accepted[0].write(b"first")
            for _ in range(10):
                network.advance(0.05)
            self.assertEqual((protocol.data, stock.accepted[0].data, stock.panics), (b"first", b"waits", []))
            network.advance(UNDECIDED_LIMIT)
            self.assertIsNone(protocol.lost)

    def undecided(self, network: OldNetwork) -> tuple[Any, StockClient]:
        """Return a protocol that has written to a client whose dialect is not known yet, and this client."""
        stock = network.stock(KEYS["B"], "2019-03-13")
        mine = Accepting()
        network.client(KEYS["A"]).open(stock.key.public, mine, acks=None)
        network.settle()
        (protocol,) = mine.built
        protocol.transport.write(b"x")
        network.settle()
        return protocol, stock

    def test_pauses_of_this_process_do_not_count_while_a_remote_is_undecided(self) -> None:
        network = OldNetwork()
        let_pause(network.clock)
        protocol, _ = self.undecided(network)
        network.clock.advance(10 * UNDECIDED_LIMIT)
        pass_time(network.clock, UNDECIDED_LIMIT - 0.2)
        self.assertIsNone(protocol.lost)
        pass_time(network.clock, 0.3)
        self.assertEqual(protocol.lost.value.close_reason, CloseReason.ACKS_UNKNOWN)

    def test_an_undecided_remote_is_decided_after_a_limit(self) -> None:
        network = OldNetwork()
        protocol, stock = self.undecided(network)
        network.advance(UNDECIDED_LIMIT)
        self.assertEqual(protocol.lost.value.close_reason, CloseReason.ACKS_UNKNOWN)
        self.assertRegex(str(protocol.lost.value), "--acks yes .* before 2019-04-15, --acks no .* later")
        self.assertEqual((stock.accepted[0].received, stock.panics), ([], []))


class EndTests(SynchronousTestCase):
    """The event at the end of a channel tells whether the other end has received all data."""

    def reach(self, acks: bool | None) -> tuple[OldNetwork, Any, Any]:
        network = OldNetwork()
        stock = network.stock(KEYS["B"], "2019-03-13")
        session = network.client(KEYS["A"])
        mine = Accepting()
        session.open(stock.key.public, mine, acks=acks)
        network.settle()
        return network, mine.built[0], stock.accepted[0]

    def reason(self, protocol: Any) -> int:
        failure = protocol.lost
        assert failure is not None
        return int(failure.value.close_reason) if failure.check(StreamLost) else 0

    def test_an_end_without_data_is_clean(self) -> None:
        network, mine, channel = self.reach(None)
        mine.transport.write(b"request")
        network.settle()
        channel.close()
        network.settle()
        self.assertEqual(self.reason(mine), CloseReason.ABORTED)

    def test_an_end_with_unacknowledged_data_is_no_clean_end(self) -> None:
        network, mine, channel = self.reach(True)
        sent = mine.transport.send(b"request")
        network.settle()
        channel.client.send(CLOSE_CHANNEL, bytes((channel.name,)))
        network.settle()
        self.assertEqual(self.reason(mine), CloseReason.UNCONFIRMED)
        self.failureResultOf(sent, TransportClosed)

    def test_unacknowledged_data_ends_the_channel(self) -> None:
        network, mine, channel = self.reach(True)
        channel.flush = lambda: None
        mine.transport.write(b"x" * 200)
        mine.transport.loseConnection()
        network.settle()
        network.advance(LINGER)
        self.assertEqual(self.reason(mine), CloseReason.TIMEOUT)
        self.assertEqual(network.clock.getDelayedCalls(), [])

    def test_a_session_that_ends_acknowledges_first(self) -> None:
        network, mine, channel = self.reach(True)
        mine.transport.write(b"under way")
        network.settle()
        channel.pending.clear()  # The client's own acknowledgement comes later.
        channel.write(b"taken")
        network.settle()
        self.assertEqual((mine.data, channel.writes), (b"taken", 0))
        mine.transport._carrier.session.close()
        network.settle()
        self.assertEqual(channel.writes, 1)
        mine.lost.trap(ConnectionAborted)

    def test_sends_keep_10_ms_apart_unless_acknowledged(self) -> None:
        network, mine, channel = self.reach(True)
        times: list[float] = []
        take = channel.message
        channel.message = lambda plain: (times.append(network.clock.seconds()), take(plain))
        for number in range(40):
            channel.write(b"%d," % number)
        for _ in range(100):
            network.advance(0.001)
        self.assertEqual(len(times), 5)
        self.assertTrue(all(later - sooner >= 0.0099 for sooner, later in zip(times, times[1:], strict=False)), times)


class AcceptTests(SynchronousTestCase):
    """A program of 2019 opens a channel to this package."""

    def session(self, network: OldNetwork, era: str, accept: Any, **options: Any) -> ClientSession:
        two_ids, acknowledges = ERAS[era]
        return network.client(KEYS["B"], accept, **{"acks": acknowledges, "two_ids": two_ids, **options})

    def test_a_greeting_and_the_end_arrive(self) -> None:
        for era in ERAS:
            network = OldNetwork()
            theirs = Accepting()
            self.session(network, era, theirs)
            stock = network.stock(KEYS["A"], era)
            channel = stock.dial(KEYS["B"].public)
            network.settle()
            channel.write(b"hello")
            network.settle()
            (protocol,) = theirs.built
            self.assertEqual((protocol.data, stock.panics), (b"hello", []), era)
            protocol.transport.write(b"and you")
            for _ in range(3):
                network.advance(ACK_INTERVAL)
            self.assertEqual(channel.data, b"and you", era)
            channel.close()
            network.settle()
            self.assertTrue(channel.over and protocol.lost, era)
            self.assertEqual(network.relay.channel_count, 0)

    def test_the_first_message_reveals_the_dialect(self) -> None:
        for era in ERAS:
            network = OldNetwork()
            theirs = Accepting()
            self.session(network, era, theirs, acks=None)
            stock = network.stock(KEYS["A"], era)
            channel = stock.dial(KEYS["B"].public)
            network.settle()
            (protocol,) = theirs.built
            protocol.transport.write(b"waits")
            network.settle()
            self.assertEqual(channel.received, [])
            channel.write(b"first")
            for _ in range(10):
                network.advance(0.05)
            self.assertEqual((protocol.data, channel.data, stock.panics), (b"first", b"waits", []), era)

    def test_two_clients_of_this_package_exchange_plain_bytes(self) -> None:
        """The bytes arrive unchanged, whatever they begin with, and whatever the acceptor knows about other clients."""
        for told in (None, True, False):
            network = OldNetwork()
            theirs, mine = Accepting(), Accepting()
            self.session(network, "2019-04-15", theirs, acks=told)
            network.client(KEYS["A"]).open(KEYS["B"].public, mine, acks=False, greet=True)
            network.settle()
            theirs.built[0].transport.write(b"\0\0\0\3you")
            mine.built[0].transport.write(b"\0\0\0\5hello")
            network.settle()
            network.advance(10)
            self.assertEqual((theirs.built[0].data, mine.built[0].data), (b"\0\0\0\5hello", b"\0\0\0\3you"))
            self.assertEqual((theirs.built[0].lost, mine.built[0].lost), (None, None))


class TwoIdsTests(SynchronousTestCase):
    """The two sides of a link may use different ids for a channel."""

    def test_stock_clients_among_themselves(self) -> None:
        for one in ERAS:
            for two in ERAS:
                if ERAS[one][1] != ERAS[two][1]:
                    continue
                # The relay knows whether a client that has accepted before uses two ids. For other clients, there is
                # the option.
                network = OldNetwork(two_ids=ERAS[one][0])
                dialler, acceptor = network.stock(KEYS["A"], one), network.stock(KEYS["B"], two, got=echo)
                acceptor_of_many = [acceptor]
                channels = [dialler.dial(KEYS["B"].public) for _ in range(5)]
                network.settle()
                for number, channel in enumerate(channels):
                    channel.write(b"%d" % number)
                for _ in range(5):
                    network.advance(ACK_INTERVAL)
                self.assertEqual([channel.data for channel in channels], [b"0", b"1", b"2", b"3", b"4"], (one, two))
                self.assertEqual((dialler.panics, acceptor_of_many[0].panics), ([], []))
                for channel in channels:
                    channel.close()
                network.settle()
                self.assertEqual((network.relay.channel_count, dialler.channels, acceptor.channels), (0, {}, {}))

    def test_the_dialect_of_a_client_is_remembered(self) -> None:
        """A client that has accepted a channel is recognised when it opens one, also over its next link."""
        for era in ERAS:
            for other in (False, True):
                network = OldNetwork(two_ids=other)
                first = network.stock(KEYS["A"], era)
                network.client(KEYS["B"], Accepting()).open(first.key.public, Accepting())
                network.settle()
                self.assertEqual(len(first.accepted), 1)
                assert first.transport is not None
                first.transport.loseConnection()
                network.settle()
                again = network.stock(KEYS["A"], era)
                channel = again.dial(KEYS["B"].public)
                network.settle()
                self.assertTrue(channel.ciphers is not None and not again.panics, (era, other))

    def test_ids_of_both_sides_may_be_equal(self) -> None:
        """A stock client that has 200 channels of either kind: its own ids meet those of the server."""
        network = OldNetwork(two_ids=True)
        stock = network.stock(KEYS["A"], "2019-04-15", got=echo)
        peers = [network.client(KEYS[name], Accepting(), two_ids=True, acks=False) for name in ("B", "X")]
        mine = Accepting()
        theirs = []
        for number in range(200):
            if number % 2:
                theirs.append(stock.dial(KEYS["B"].public))
            else:
                peers[number % 4 // 2].open(stock.key.public, mine)
            network.settle()
        self.assertEqual((len(mine.built), stock.panics), (100, []))
        live = [one for one in theirs if one.ciphers is not None]
        for number, protocol in enumerate(mine.built):
            protocol.transport.write(b"%d" % number)
        network.settle()
        self.assertEqual([one.data for one in mine.built], [b"%d" % number for number in range(100)])
        self.assertEqual(len(live), 100)
        for number, channel in enumerate(live):
            channel.write(b"%d" % number)
        network.settle()

    def test_a_client_of_this_package_that_accepts(self) -> None:
        """With two ids, the acceptor's own ids differ from the server's."""
        network = OldNetwork(two_ids=True)
        accepting, mine = Accepting(), Accepting()
        bob = network.client(KEYS["B"], accepting, two_ids=True)
        alice = network.client(KEYS["A"], Accepting(Recorder), two_ids=True)
        for number in range(150):
            (alice if number % 2 else bob).open((bob if number % 2 else alice)._local, mine)
            network.settle()
        self.assertEqual(len(mine.built), 150)
        for number, protocol in enumerate(mine.built):
            protocol.transport.write(b"%d" % number)
        network.settle()
        self.assertEqual(sum(len(one.data) for one in accepting.built), sum(len(b"%d" % n) for n in range(1, 150, 2)))
        for protocol in mine.built:
            protocol.transport.loseConnection()
        network.settle()
        self.assertEqual((network.relay.channel_count, bob.transports, alice.transports), (0, 0, 0))


class OfferTests(RelayCase):
    """Offers whose opener has gone, at a client that speaks of two ids."""

    profile = Profile.SKYWIRE

    def test_the_offer_is_reported_with_the_channels_name(self) -> None:
        a, b = self.peer(0), self.peer(1)
        for known in (False, True):
            self.say(a, (OPEN_CHANNEL, b"\0" + b.key + bytes(49)))
            offered = self.ports[b].take()[-1][1][0]
            self.say(a, (CLOSE_CHANNEL, b"\0"))
            told = self.ports[b].take()
            # The client would take the server's id for another channel. So the relay sends nothing once it knows the
            # client's kind.
            self.assertEqual(bool(told), not known)
            self.say(b, (CHANNEL_OPENED, bytes((offered, 7)) + bytes(49)))
            self.assertEqual(self.ports[b].take(), [(CLOSE_CHANNEL, b"\7")])
        self.assertEqual(self.relay.channel_count, 0)

    def test_names_of_others(self) -> None:
        """The offered id may be the name of another channel. The answer is sent all the same."""
        a, b = self.peer(0), self.peer(1)
        self.say(a, (OPEN_CHANNEL, b"\0" + b.key + bytes(49)))
        first = self.ports[b].take()[-1][1][0]
        self.say(b, (CHANNEL_OPENED, bytes((first, first - 1)) + bytes(49)))
        self.say(a, (OPEN_CHANNEL, b"\1" + b.key + bytes(49)))
        offered = self.ports[b].take()[-1][1][0]
        self.assertEqual(offered, first - 1)
        self.say(a, (CLOSE_CHANNEL, b"\1"))
        self.say(b, (CHANNEL_OPENED, bytes((offered, 77)) + bytes(49)))
        self.assertEqual(self.ports[b].take(), [(CLOSE_CHANNEL, bytes((77,)))])
        self.assertEqual(self.relay.channel_count, 1)

    def test_a_client_may_change_to_a_single_id(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.say(a, (OPEN_CHANNEL, b"\0" + b.key + bytes(49)))
        self.say(b, (CHANNEL_OPENED, bytes((self.ports[b].take()[-1][1][0], 3)) + bytes(49)))
        self.say(a, (OPEN_CHANNEL, b"\1" + b.key + bytes(49)))
        offered = self.ports[b].take()[-1][1][0]
        self.say(a, (CLOSE_CHANNEL, b"\1"))
        self.assertEqual(self.ports[b].take(), [])
        self.say(b, (CHANNEL_OPENED, bytes((offered,)) + bytes(49)))
        self.assertEqual(self.ports[b].take(), [(CLOSE_CHANNEL, bytes((offered,)))])

    def test_ids_with_data_in_flight_are_not_reused(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.say(a, (OPEN_CHANNEL, b"\0" + b.key + bytes(49)))
        offered = self.ports[b].take()[-1][1][0]
        self.say(b, (CHANNEL_OPENED, bytes((offered, 0)) + bytes(49)))
        self.ports[b].stuck = True
        self.relay.congest(b)
        self.say(a, (SEND, b"\0" + (40).to_bytes(2, "big") + bytes(40)), (CHANNEL_CLOSED, b"\0"))
        self.assertIn(offered, b.draining)
        self.say(b, (OPEN_CHANNEL, bytes((offered,)) + a.key + bytes(49)))
        there = self.ports[a].take()[-1][1][0]
        self.say(a, (CHANNEL_OPENED, bytes((there, 9)) + bytes(49)))
        self.say(a, (SEND, bytes((there,)) + (40).to_bytes(2, "big") + bytes(40)), (CLOSE_CHANNEL, bytes((there,))))
        self.relay.relieve(b)
        self.relay.check()
        named = [body[0] for kind, body in self.ports[b].take() if kind == CHANNEL_OPENED]
        self.assertEqual(named, [offered])

    def test_strangers_flush_no_memory(self) -> None:
        known = self.peer(1)
        a = self.peer(0)
        self.say(a, (OPEN_CHANNEL, b"\0" + known.key + bytes(49)))
        self.say(known, (CHANNEL_OPENED, bytes((self.ports[known].take()[-1][1][0], 3)) + bytes(49)))
        before = dict(self.relay._known)
        for number in range(2, 6):
            self.say(self.peer(number), (CHANNEL_OPENED, b"\5\6" + bytes(49)))
        self.assertEqual(self.relay._known, before)

    def test_the_seed_profile_refuses_two_ids(self) -> None:
        self.assertRaises(ValueError, Relay, Profile.SEED, two_ids=True)
