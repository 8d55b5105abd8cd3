"""Channels: items C, O, K and X of the checklist, with real clients and the real server in memory."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DmsgTimeout, DropReason, LocalProtocolError, TransportClosed, TransportRefused
from dmsg.messaging.core.agreement import Offer
from dmsg.messaging.core.table import MAX_PINGS
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, CLOSE_CHANNEL, OPEN_CHANNEL, SEND, Profile
from dmsg.messaging.session import CLOSE_TIMEOUT, STALL_TIMEOUT, UNREAD_PAUSE, ClientSession
from dmsg.net.streams.address import StreamLost
from tests.messaging.support import KEYS, Network, RawClient, vectors
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import Accepting, Recorder

A, B, X = KEYS["A"], KEYS["B"], KEYS["X"]


class PingTests(SynchronousTestCase):
    """Opened and closed below the remote's program."""

    def setUp(self) -> None:
        self.network = Network(Profile.SEED)
        self.a = self.network.client(A, Accepting())

    def ping(self) -> Any:
        opening = self.a.open(B.public, Accepting(), ping=True)
        self.network.settle()
        return self.successResultOf(opening)

    def test_pings_are_invisible_to_the_program(self) -> None:
        factory = Accepting()
        b = self.network.client(B, factory)
        protocol = self.ping()
        protocol.transport.write(b"what nobody waits for")
        protocol.transport.loseConnection()
        self.network.settle()
        self.assertEqual((factory.built, b.core.channels, self.a.core.channels), ([], {}, {}))

    def test_pings_need_no_listener(self) -> None:
        self.network.client(B, None)
        self.ping()

    def test_unclosed_ping_channels_are_evicted(self) -> None:
        """Ids are few, and pings take some of them only."""
        b = self.network.client(B, None)
        pings = [self.ping() for _ in range(MAX_PINGS + 3)]
        self.assertEqual(len(b.core.channels), MAX_PINGS)
        self.assertTrue(all(one.transport.has_ended for one in pings[:3]))
        self.assertFalse(pings[-1].transport.has_ended)

    def test_pings_of_one_client_end_none_of_another(self) -> None:
        self.network.client(B, None)
        other = self.network.client(X, Accepting())
        opening = other.open(B.public, Accepting(), ping=True)
        self.network.settle()
        modest = self.successResultOf(opening)
        greedy = [self.ping() for _ in range(2 * MAX_PINGS)]
        self.assertFalse(modest.transport.has_ended)
        self.assertEqual(sum(not one.transport.has_ended for one in greedy), MAX_PINGS - 1)


class ChannelCase(SynchronousTestCase):
    """A network in memory."""

    profile = Profile.SEED

    def setUp(self) -> None:
        self.network = Network(self.profile)
        self.factory = Accepting()
        self.a = self.network.client(A, Accepting())
        self.b = self.network.client(B, self.factory)

    def open(self, session: ClientSession | None = None, remote: Any = None) -> Any:
        """The protocol of a new channel from A to B."""
        opening = (session or self.a).open(remote or B.public, Accepting())
        self.network.settle()
        return self.successResultOf(opening)

    def pair(self) -> tuple[Any, Any]:
        """Return both ends of a new channel."""
        mine = self.open()
        return mine, self.factory.built[-1]

    def ids(self, session: ClientSession) -> list[int]:
        return sorted(session.core.channels)

    def raw_pair(self) -> tuple[Any, RawClient]:
        """Return a real client's end of a channel, and the other client, which sends and receives plain frames."""
        raw = self.network.raw(X)
        opening = self.a.open(X.public, Accepting())
        self.network.settle()
        ((_, body),) = raw.take()
        raw.ciphers, message = Offer(X, A.public, body[34:], self.profile).accept()  # type: ignore[attr-defined]
        raw.send(CHANNEL_OPENED, body[:1] + message)
        self.network.settle()
        return self.successResultOf(opening), raw

    def say(self, raw: Any, channel: int, data: bytes) -> None:
        ciphertext = raw.ciphers.seal(data)
        raw.send(SEND, bytes((channel,)) + len(ciphertext).to_bytes(2, "big") + ciphertext)


class C_ManagementTests(ChannelCase):
    """Channel management."""

    def test_send_does_not_confirm_delivery(self) -> None:
        """The Deferred fires when the link has the data, because nothing is acknowledged; ``confirms`` is False."""
        mine, theirs = self.pair()
        self.assertFalse(mine.transport.confirms)
        sending = mine.transport.send(b"word")
        mine.transport.flush()
        self.successResultOf(sending)
        self.assertEqual(theirs.data, b"")
        self.network.settle()
        self.assertEqual(theirs.data, b"word")

    def test_C1_the_same_id_on_two_links(self) -> None:
        second = Network(self.profile)
        other = second.client(A, Accepting())
        there = Accepting()
        second.client(B, there)
        mine, theirs = self.pair()
        opening = other.open(B.public, Accepting())
        second.settle()
        elsewhere: Any = self.successResultOf(opening)
        self.assertEqual((self.ids(self.a), self.ids(other)), ([0], [0]))
        mine.transport.write(b"here")
        elsewhere.transport.write(b"there")
        self.network.settle()
        second.settle()
        self.assertEqual((theirs.data, there.built[0].data), (b"here", b"there"))

    def test_C2_256_channels_on_one_link(self) -> None:
        recorded = vectors("limits")
        c = self.network.client(KEYS["X"], Accepting())
        for _ in range(recorded["opened_on_one_link"]):
            self.open()
        self.assertEqual(len(self.ids(self.a)), recorded["distinct_ids"])
        frames = self.network.relay.frames
        error = self.failureResultOf(self.a.open(B.public, Accepting()), LocalProtocolError)
        self.assertIn("no free channel id", str(error.value))
        self.network.settle()
        self.assertEqual(self.network.relay.frames, frames)
        # A third client connects to a client whose ids are all in use.
        refused = c.open(B.public, Accepting())
        self.network.settle()
        self.failureResultOf(refused, TransportRefused)
        self.assertEqual(self.network.relay.drops[DropReason.TOO_MANY_TRANSPORTS], 1)

    def test_C3_ids_are_used_again(self) -> None:
        mine, _ = self.pair()
        mine.transport.loseConnection()
        self.network.settle()
        self.assertEqual((self.ids(self.a), self.ids(self.b)), ([], []))
        # The loop opens more channels than there are ids.
        for _ in range(260):
            again, _ = self.pair()
            again.transport.loseConnection()
            self.network.settle()
        self.assertEqual((self.ids(self.a), self.ids(self.b)), ([], []))
        self.pair()
        there = self.ids(self.a)
        # The remote rejects the channel.
        opening = self.a.open(X.public, Accepting())
        self.network.settle()
        self.failureResultOf(opening, TransportRefused)
        self.assertEqual(self.ids(self.a), there)
        # The remote does not answer.
        raw = self.network.raw(X)
        opening = self.a.open(X.public, Accepting(), timeout=5)
        self.network.settle()
        self.network.advance(5)
        self.failureResultOf(opening, DmsgTimeout)
        self.assertEqual(self.ids(self.a), there)
        # The Go client frees an id only when it receives CloseChannel.
        more = [CLOSE_CHANNEL] if self.profile is Profile.SKYWIRE else []
        self.assertEqual([frame for frame, _ in raw.take()], [OPEN_CHANNEL, CHANNEL_CLOSED, *more])
        self.assertEqual(self.network.relay.channel_count, 1)

    def test_C4_the_server_s_ids_are_its_own(self) -> None:
        for _ in range(3):
            self.open()
        c = self.network.client(X, Accepting())
        self.open(c)
        self.assertEqual(self.ids(self.a), [0, 1, 2])
        self.assertEqual(self.ids(self.b), [252, 253, 254, 255])
        self.assertEqual(self.ids(c), [0])

    def test_C4_ids_of_the_server_are_not_used_again_at_once(self) -> None:
        """An answer to the channel before could be taken for one to the channel after."""
        seen = []
        for _ in range(130):
            mine, _ = self.pair()
            seen += self.ids(self.b)
            mine.transport.loseConnection()
            self.network.settle()
        self.assertEqual(len(set(seen[:128])), 128)
        self.assertEqual(seen[128:], [255, 254])


class O_OpeningTests(ChannelCase):
    """Opening."""

    def test_O1_the_order_of_frames(self) -> None:
        raw_a, raw_b = self.network.raw(A), self.network.raw(X)
        message = bytes(range(49))
        raw_a.send(OPEN_CHANNEL, b"\7" + X.public + message)
        self.network.settle()
        self.assertEqual(raw_b.take(), [(OPEN_CHANNEL, b"\xff" + A.public + message)])
        self.assertEqual(raw_a.take(), [])
        raw_b.send(CHANNEL_OPENED, b"\xff" + message[::-1])
        self.network.settle()
        self.assertEqual(raw_a.take(), [(CHANNEL_OPENED, b"\7" + message[::-1])])
        self.assertEqual(raw_b.take(), [])

    def test_O2_rejected_channels_fail(self) -> None:
        raw = self.network.raw(X)
        for remote in (KEYS["S"].public, X.public, b"\2" + b"\xff" * 32, bytes(33)):
            raw.send(OPEN_CHANNEL, b"\7" + remote + bytes(49))
            self.network.settle()
            self.assertEqual(raw.take(), [(CHANNEL_CLOSED, b"\7")])
        # If an id is in use, both channels with this id end, because the answer says so.
        other = self.network.raw(KEYS["S"])
        raw.send(OPEN_CHANNEL, b"\7" + other.key.public + bytes(49))
        raw.send(OPEN_CHANNEL, b"\7" + other.key.public + bytes(49))
        self.network.settle()
        self.assertEqual(raw.take(), [(CHANNEL_CLOSED, b"\7")])
        self.assertEqual([frame for frame, _ in other.take()], [OPEN_CHANNEL, CHANNEL_CLOSED])
        drops = self.network.relay.drops
        self.assertEqual(drops[DropReason.NO_SUCH_PEER], 1)
        self.assertEqual(drops[DropReason.REFUSED], 1)
        self.assertEqual(drops[DropReason.BAD_REQUEST], 2)
        self.assertEqual(drops[DropReason.ID_IN_USE], 1)

    def test_O3_the_client_rejects(self) -> None:
        nobody = self.network.client(X)
        opening = self.a.open(X.public, Accepting())
        self.network.settle()
        error = self.failureResultOf(opening, TransportRefused)
        self.assertIn("rejected", str(error.value))
        self.assertEqual((self.ids(self.a), self.ids(nobody), self.network.relay.channel_count), ([], [], 0))

    def test_O3_factories_that_decline_or_fail(self) -> None:
        for fault in (lambda: None, lambda: 1 / 0):
            c = self.network.client(X, Accepting(fault))
            opening = self.a.open(X.public, Accepting())
            self.network.settle()
            self.failureResultOf(opening, TransportRefused)
            c.close()
            self.network.settle()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_O4_no_data_before_channel_opened(self) -> None:
        """The application has the channel when the remote was told (the Go client said things before)."""

        class Eager(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(b"hello")
                self.transport.loseConnection()

        raw = self.network.raw(X)
        c = self.network.client(KEYS["S"], Accepting(Eager))
        from dmsg.messaging.core.agreement import Proposal

        proposal = Proposal(X, KEYS["S"].public, self.profile)
        raw.send(OPEN_CHANNEL, b"\5" + KEYS["S"].public + proposal.message)
        self.network.settle()
        self.assertEqual([frame for frame, _ in raw.take()], [CHANNEL_OPENED, SEND, CLOSE_CHANNEL])
        self.assertEqual(self.ids(c), [255])

    def test_O5_no_answer(self) -> None:
        """If neither the remote nor the server answers, the id is free a second later."""
        self.network.raw(X)
        opening = self.a.open(X.public, Accepting(), timeout=2)
        self.network.settle()
        silent = self.network.pumps.pop(0)  # Nothing passes between A and the server.
        self.network.advance(1.9)
        self.assertNoResult(opening)
        self.network.advance(0.2)
        self.failureResultOf(opening, DmsgTimeout)
        self.assertEqual(self.ids(self.a), [0])
        self.network.advance(CLOSE_TIMEOUT)
        self.assertEqual(self.ids(self.a), [])
        # The answer to the earlier OpenChannel may still arrive, so another id is used meanwhile.
        self.a.open(X.public, Accepting()).addErrback(lambda _: None)
        self.assertEqual(self.ids(self.a), [1])
        self.network.pumps.append(silent)
        self.network.settle()
        self.assertEqual(self.network.relay.channel_count, 1)

    def test_O5_cancelling_closes_the_channel(self) -> None:
        raw = self.network.raw(X)
        opening = self.a.open(X.public, Accepting())
        opening.addErrback(lambda _: None)
        self.network.settle()
        opening.cancel()
        self.network.settle()
        more = [CLOSE_CHANNEL] if self.profile is Profile.SKYWIRE else []
        self.assertEqual([frame for frame, _ in raw.take()], [OPEN_CHANNEL, CHANNEL_CLOSED, *more])
        self.assertEqual(self.ids(self.a), [])
        # The answer was already under way, and opens nothing.
        raw.send(CHANNEL_OPENED, b"\xff" + bytes(49))
        self.network.settle()
        self.assertEqual(self.network.relay.channel_count, 0)

    def test_an_answer_that_comes_at_once(self) -> None:
        """The Go client lost it when it came before Dial waited."""
        for _ in range(40):
            self.pair()
        self.assertEqual(self.network.relay.channel_count, 40)

    def test_simultaneous_opens_with_one_id_end_both_channels(self) -> None:
        """A client and the server take the same id at once: both channels end, and nothing stays behind."""
        network = Network(choose=lambda peer: 0)
        factory = Accepting()
        a, b = network.client(A, factory), network.client(B, factory)
        one, two = a.open(B.public, Accepting()), b.open(A.public, Accepting())
        for opening in (one, two):
            opening.addErrback(lambda failure: failure.trap(TransportRefused) and None)
        network.settle()
        self.assertEqual((self.ids(a), self.ids(b), network.relay.channel_count), ([], [], 0))
        self.successResultOf(one)
        self.successResultOf(two)


class K_ClosingTests(ChannelCase):
    """Closing."""

    def test_K1_either_side_may_close(self) -> None:
        for closer in (0, 1):
            ends = self.pair()
            ends[closer].transport.loseConnection()
            self.network.settle()
            for end in ends:
                end.lost.trap(ConnectionDone)
            self.assertEqual((self.ids(self.a), self.ids(self.b), self.network.relay.channel_count), ([], [], 0))

    def test_K1_close_frames_are_exchanged(self) -> None:
        mine, raw = self.raw_pair()
        mine.transport.loseConnection()
        self.network.settle()
        self.assertEqual(raw.take(), [(CLOSE_CHANNEL, b"\xff")])
        self.assertIsNone(mine.lost)
        raw.send(CHANNEL_CLOSED, b"\xff")
        self.network.settle()
        mine.lost.trap(ConnectionDone)
        self.assertEqual(raw.take(), [])

    def test_K2_half_close(self) -> None:
        mine, raw = self.raw_pair()
        mine.transport.write(b"last")
        mine.transport.loseConnection()
        mine.transport.write(b"too late")
        self.network.settle()
        self.assertEqual([frame for frame, _ in raw.take()], [SEND, CLOSE_CHANNEL])
        self.say(raw, 255, b"late message, ")
        self.say(raw, 255, b"and another")
        self.network.settle()
        self.assertEqual(mine.data, b"late message, and another")
        self.assertIsNone(mine.lost)
        raw.send(CHANNEL_CLOSED, b"\xff")
        self.network.settle()
        mine.lost.trap(ConnectionDone)

    def test_K3_pauses_of_this_process_do_not_count(self) -> None:
        let_pause(self.network.clock)
        mine, _ = self.raw_pair()
        mine.transport.loseConnection()
        self.network.settle()
        self.network.clock.advance(10 * CLOSE_TIMEOUT)
        pass_time(self.network.clock, CLOSE_TIMEOUT - 0.1)
        self.assertIsNone(mine.lost)
        pass_time(self.network.clock, 0.2)
        self.assertEqual(mine.lost.value.close_reason, CloseReason.UNCONFIRMED)

    def test_an_application_that_does_not_read_loses_its_stream(self) -> None:
        """Otherwise it would keep the link paused.  A pause of the process also pauses the application."""
        let_pause(self.network.clock)
        mine, theirs = self.pair()
        theirs.transport.pauseProducing()
        mine.transport.write(bytes(2 * UNREAD_PAUSE))
        self.network.settle()
        pass_time(self.network.clock, 1.0)
        self.network.settle()
        self.network.clock.advance(10 * STALL_TIMEOUT)
        pass_time(self.network.clock, STALL_TIMEOUT - 1.5)
        self.assertEqual(len(self.b._holding), 1)
        pass_time(self.network.clock, 2.0)
        self.assertEqual(self.b._holding, {})
        theirs.transport.resumeProducing()
        self.assertEqual(theirs.lost.value.close_reason, CloseReason.STALLED)

    def test_K3_no_answer_to_close(self) -> None:
        mine, raw = self.raw_pair()
        mine.transport.loseConnection()
        self.network.settle()
        self.network.advance(CLOSE_TIMEOUT - 0.1)
        self.assertIsNone(mine.lost)
        self.network.advance(0.2)
        # Nobody knows whether the other end has received all data.
        self.assertEqual(mine.lost.check(StreamLost) and mine.lost.value.close_reason, CloseReason.UNCONFIRMED)
        self.assertEqual(raw.take(), [(CLOSE_CHANNEL, b"\xff"), (CHANNEL_CLOSED, b"\xff")])
        self.assertEqual((self.ids(self.a), self.network.relay.channel_count), ([], 0))

    def test_K4_the_end_follows_queued_data(self) -> None:
        mine, theirs = self.pair()
        theirs.transport.pauseProducing()
        mine.transport.write(b"before the end")
        mine.transport.loseConnection()
        self.network.settle()
        self.assertEqual((theirs.data, theirs.lost), (b"", None))
        theirs.transport.write(b"into the void")
        self.failureResultOf(theirs.transport.send(b"x"), TransportClosed)
        theirs.transport.resumeProducing()
        self.network.settle()
        self.assertEqual(theirs.data, b"before the end")
        theirs.lost.trap(ConnectionDone)
        self.assertEqual(mine.data, b"")

    def test_K5_channel_closed_at_any_time(self) -> None:
        mine, raw = self.raw_pair()
        raw.send(CHANNEL_CLOSED, b"\xff")
        self.network.settle()
        # Without an earlier CloseChannel, nobody can know which data is missing.
        mine.lost.trap(StreamLost)
        mine.transport.write(b"nobody is there")
        self.network.settle()
        self.assertEqual(raw.take(), [])
        # ChannelClosed is also valid as the answer to OpenChannel, and while a channel is closing.
        opening = self.a.open(X.public, Accepting())
        self.network.settle()
        raw.send(CHANNEL_CLOSED, bytes((raw.take()[0][1][0],)))
        self.network.settle()
        self.failureResultOf(opening, TransportRefused)
        self.assertEqual(self.ids(self.a), [])

    def test_K6_both_close_at_once(self) -> None:
        mine, theirs = self.pair()
        mine.transport.loseConnection()
        theirs.transport.loseConnection()
        self.network.settle()
        mine.lost.trap(ConnectionDone)
        theirs.lost.trap(ConnectionDone)
        self.network.advance(CLOSE_TIMEOUT)
        self.assertEqual((self.ids(self.a), self.ids(self.b), self.network.relay.channel_count), ([], [], 0))
        # The id whose end the server has not reported is reserved for a second.
        self.pair()

    def test_K7_send_after_close_is_dropped(self) -> None:
        mine, raw = self.raw_pair()
        raw.send(CLOSE_CHANNEL, b"\xff")
        self.say(raw, 255, b"after the end")
        self.network.settle()
        self.assertEqual(mine.data, b"")
        mine.lost.trap(ConnectionDone)
        self.assertEqual(self.network.relay.drops[DropReason.NO_SUCH_TRANSPORT], 1)

    def test_K3_the_timeout_begins_when_close_is_sent(self) -> None:
        """The timeout does not run while CloseChannel waits behind other data."""
        mine, raw = self.raw_pair()
        self.patch(self.a.link, "unsent", lambda: 1)
        mine.transport.loseConnection()
        self.network.advance(CLOSE_TIMEOUT * 5)
        self.assertIsNone(mine.lost)
        self.patch(self.a.link, "unsent", lambda: 0)
        self.network.advance(CLOSE_TIMEOUT * 2)
        self.assertIsNotNone(mine.lost)
        self.assertEqual(raw.take()[-1], (CHANNEL_CLOSED, b"\xff"))

    def test_a_paused_reader_gets_the_data_before_the_close(self) -> None:
        for abort in (False, True):
            mine, raw = self.raw_pair()
            number = 255 - int(abort)
            mine.transport.pauseProducing()
            self.say(raw, number, b"not wanted")
            self.network.settle()
            mine.transport.loseConnection()
            self.network.settle()
            if abort:
                mine.transport.abortConnection()
                self.network.settle()
                mine.lost.trap(ConnectionAborted)
            else:
                raw.send(CHANNEL_CLOSED, bytes((number,)))
                self.network.settle()
                mine.lost.trap(ConnectionDone)
            self.assertEqual(mine.data, b"")
            raw.lost = None

    def test_a_deadline_while_closing(self) -> None:
        mine, _ = self.raw_pair()
        mine.transport.setReadDeadline(0.5)
        mine.transport.loseConnection()
        self.network.settle()
        self.network.advance(0.6)
        self.assertIn("deadline passed", str(mine.lost.value))

    def test_a_new_channel_is_not_hit_by_the_end_of_the_old_one(self) -> None:
        """A client that stops says CloseChannel and is gone: the server says ChannelClosed behind its back."""
        again: list[Any] = []
        session = self.a

        class Reconnects(Recorder):
            def connectionLost(self, reason: Any = None) -> None:
                super().connectionLost(reason)
                session.open(X.public, Accepting()).addBoth(again.append)

        for _ in range(5):
            raw = self.network.raw(B)
            other = Accepting()
            there = self.network.client(X, other)
            opening = session.open(B.public, Accepting(Reconnects))
            self.network.settle()
            ((_, body),) = raw.take()
            _, message = Offer(B, A.public, body[34:], self.profile).accept()
            raw.send(CHANNEL_OPENED, body[:1] + message)
            self.network.settle()
            self.successResultOf(opening)
            raw.send(CLOSE_CHANNEL, body[:1])
            cast(Any, raw.transport).loseConnection()
            self.network.settle()
            mine: Any = again.pop()
            self.assertIsInstance(mine, Recorder)
            mine.transport.write(b"alive")
            self.network.settle()
            self.assertEqual(other.built[-1].data, b"alive")
            mine.transport.loseConnection()
            there.close()
            self.network.settle()

    def test_a_session_closed_within_a_callback(self) -> None:
        session = self.b

        class Stops(Recorder):
            def dataReceived(self, data: bytes) -> None:
                super().dataReceived(data)
                session.close()

        self.factory.protocol = Stops
        mine, theirs = self.pair()
        waiting = session.open(A.public, Accepting())
        waiting.addErrback(lambda failure: failure.trap(TransportClosed, TransportRefused) and None)
        mine.transport.write(b"x")
        self.network.settle()
        mine.lost.trap(StreamLost)
        self.assertIsNotNone(theirs.lost)
        self.assertFalse(session.connected)
        self.assertEqual(self.network.relay.channel_count, 0)

    def test_a_producer_that_fails_to_stop(self) -> None:
        class Fails:
            def stopProducing(self) -> None:
                raise ValueError("a bug")

            pauseProducing = resumeProducing = lambda self: None

        mine, theirs = self.pair()
        theirs.transport.registerProducer(Fails(), True)
        good, _ = self.pair()
        mine.transport.abortConnection()
        self.network.settle()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertIsNotNone(theirs.lost)
        self.assertIsNone(good.lost)

    def test_aborting_reports_a_lost_stream(self) -> None:
        mine, theirs = self.pair()
        mine.transport.write(b"x" * 1000)
        mine.transport.abortConnection()
        self.network.settle()
        self.assertIsNotNone(theirs.lost)
        self.assertEqual((self.ids(self.a), self.ids(self.b), self.network.relay.channel_count), ([], [], 0))

    def test_a_bug_of_an_application_ends_its_channel_only(self) -> None:
        class Broken(Recorder):
            def dataReceived(self, data: bytes) -> None:
                raise RuntimeError("a bug")

        good, _ = self.pair()
        self.factory.protocol = Broken
        bad, _ = self.pair()
        bad.transport.write(b"x")
        self.network.settle()
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertIsNotNone(bad.lost)
        self.assertIsNone(good.lost)


class X_DisconnectionTests(ChannelCase):
    """Disconnections."""

    def test_X1_the_server_is_lost(self) -> None:
        mine, theirs = self.pair()
        elsewhere = Network(self.profile)
        there = Accepting()
        elsewhere.client(B, there)
        other = elsewhere.client(A)
        opening = other.open(B.public, Accepting())
        elsewhere.settle()
        living: Any = self.successResultOf(opening)
        waiting = self.a.open(X.public, Accepting())
        for session in (self.a, self.b):
            session.link.server_side.transport.abortConnection()
        self.network.settle()
        for end in (mine, theirs):
            self.assertIn("connection to the server was lost", str(end.lost.value))
        mine.transport.write(b"nobody is there")
        self.failureResultOf(mine.transport.send(b"x"), TransportClosed)
        self.failureResultOf(waiting)
        self.assertIsNone(self.successResultOf(self.a.lost))
        living.transport.write(b"still here")
        elsewhere.settle()
        self.assertEqual(there.built[0].data, b"still here")

    def test_X2_a_client_is_lost(self) -> None:
        raw = self.network.raw(X)
        for number in range(3):
            raw.send(OPEN_CHANNEL, bytes((number,)) + B.public + bytes(49))
        mine, second = self.raw_pair()
        opening = self.a.open(X.public, Accepting())
        self.network.settle()
        second.take()
        self.a.link.transport.abortConnection()
        self.network.settle()
        told = [(CHANNEL_CLOSED, b"\xff")]
        if self.profile is Profile.SKYWIRE:  # The Go client frees the id of an open channel only after CloseChannel.
            told.append((CLOSE_CHANNEL, b"\xff"))
        self.assertEqual(second.take(), [*told, (CHANNEL_CLOSED, b"\xfe")])
        self.failureResultOf(opening)
        self.assertIsNotNone(mine.lost)
        self.assertEqual(self.network.relay.channel_count, 0)
        self.assertEqual(self.network.relay.drops[DropReason.PEER_DISCONNECTED], 2)

    def test_X3_data_before_the_loss_is_delivered(self) -> None:
        mine, theirs = self.pair()
        theirs.transport.pauseProducing()
        mine.transport.write(b"queued")
        self.network.settle()
        self.b.link.server_side.transport.abortConnection()
        self.network.settle()
        self.assertEqual((theirs.data, theirs.lost), (b"", None))
        theirs.transport.resumeProducing()
        self.network.settle()
        self.assertEqual(theirs.data, b"queued")
        self.assertIsNotNone(theirs.lost)

    def test_the_newest_link_of_a_key_wins(self) -> None:
        """The end of the older link does not affect the newest one; the Go pool forgot the newest one."""
        mine, old = self.pair()
        newer = Accepting()
        session = self.network.client(B, newer)
        self.open()
        self.assertEqual((len(newer.built), len(self.factory.built)), (1, 1))
        mine.transport.write(b"over the old one")
        self.network.settle()
        self.assertEqual(old.data, b"over the old one")
        self.b.link.transport.abortConnection()
        self.network.settle()
        self.open()
        self.assertEqual(len(newer.built), 2)
        self.assertTrue(session.connected)


class StreamTests(ChannelCase):
    """Guarantees of the applications' transports apart from their bytes."""

    def test_stream_deadlines_end_the_channel(self) -> None:
        for name, use in (
            ("read", lambda transport: transport.setReadDeadline(3)),
            ("idle", lambda transport: transport.setIdleTimeout(3)),
        ):
            mine, theirs = self.pair()
            use(mine.transport)
            self.network.advance(2.9)
            self.assertIsNone(mine.lost)
            self.network.advance(0.2)
            self.assertIn(f"{name} deadline passed", str(mine.lost.value))
            self.assertIsNotNone(theirs.lost)
            self.assertEqual((self.ids(self.a), self.ids(self.b)), ([], []))

    def test_send_fires_when_the_link_has_the_data(self) -> None:
        mine, theirs = self.pair()
        sent = mine.transport.send(b"x" * 200_000)
        self.assertNoResult(sent)
        self.network.settle()
        self.successResultOf(sent)
        self.assertEqual(len(theirs.data), 200_000)

    def test_a_producer_is_paused_and_finishes_before_the_end(self) -> None:
        mine, theirs = self.pair()
        transport = mine.transport
        told: list[str] = []

        class Producer:
            left = 30

            def resumeProducing(self) -> None:
                told.append("resume")
                self.left -= 1
                if self.left:
                    transport.write(bytes(10_000))
                else:
                    transport.unregisterProducer()

            def pauseProducing(self) -> None:
                told.append("pause")

            def stopProducing(self) -> None:
                told.append("stop")

        transport.registerProducer(Producer(), False)
        transport.loseConnection()
        self.network.settle()
        self.assertEqual((len(theirs.data), told.count("resume")), (290_000, 30))
        mine.lost.trap(ConnectionDone)
        theirs.lost.trap(ConnectionDone)

    def test_streams_know_both_addresses(self) -> None:
        mine, theirs = self.pair()
        self.assertEqual(mine.transport.getPeer().public_key, B.public)
        self.assertEqual(theirs.transport.getPeer().public_key, A.public)
        self.assertTrue(mine.transport.secure)


class SkywireC(C_ManagementTests):
    profile = Profile.SKYWIRE


class SkywireO(O_OpeningTests):
    profile = Profile.SKYWIRE


class SkywireK(K_ClosingTests):
    profile = Profile.SKYWIRE


class SkywireX(X_DisconnectionTests):
    profile = Profile.SKYWIRE
