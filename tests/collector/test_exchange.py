"""Both ends of a stream of files, joined in memory."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.task import Clock
from twisted.test import iosim
from twisted.trial.unittest import SynchronousTestCase

from dmsg.collector.receiver import QUIET_LIMIT, STREAMS_LIMIT, ReceiverFactory, ReceiverProtocol
from dmsg.collector.sender import QUIET_LIMIT as SENDER_QUIET_LIMIT, SenderProtocol, SendError
from dmsg.collector.store import Store, StoreFull
from dmsg.collector.wire import LINE_LIMIT, Answer, Kind
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress
from tests.collector.support import kept_files, offer_of, packed, spool_name
from tests.net.test_own_pauses import let_pause, pass_time

ALICE, BOB = (SecKey.from_seed(name).public for name in (b"alice", b"bob"))


class Stream:
    """Both ends of a stream and the connection between them."""

    def __init__(self, clock: Clock, factory: ReceiverFactory, key: Any = ALICE) -> None:
        built = factory.buildProtocol(DmsgAddress(key))
        assert built is not None
        self.receiving: ReceiverProtocol = built
        self.sending = SenderProtocol(clock)
        self.server: Any = iosim.makeFakeServer(self.receiving)
        self.client: Any = iosim.makeFakeClient(self.sending)
        self.pump = iosim.connect(self.receiving, self.server, self.sending, self.client)

    def offer(self, name: str, data: bytes, file: Any = None) -> Any:
        answered = self.sending.offer(offer_of(name, data), file or io.BytesIO(data))
        self.pump.flush()
        return answered


class ExchangeTests(SynchronousTestCase):
    """A clock has no threads: what a thread does is done at once."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.root = Path(self.mktemp())
        self.store = Store(self.root, limit=10**9, reserve=0)
        self.store.open()
        self.addCleanup(self.store.close)
        self.factory = ReceiverFactory(self.clock, self.store, lambda key: key in (ALICE, BOB), lambda: 1e9)

    def answer(self, name: str, data: bytes, stream: Stream | None = None) -> Answer:
        result: Answer = self.successResultOf((stream or Stream(self.clock, self.factory)).offer(name, data))
        return result

    def test_several_files_are_stored_over_one_stream(self) -> None:
        stream = Stream(self.clock, self.factory)
        files = {spool_name(number): packed(count=5 + 400 * number) for number in range(5)}
        for name, data in files.items():
            self.assertEqual(self.answer(name, data, stream), Answer(Kind.KEPT))
        self.assertEqual(kept_files(self.root), files)
        self.assertEqual((self.factory.file_count, self.factory.byte_count), (5, sum(map(len, files.values()))))
        # The sender was killed before it could remove the files.
        for name, data in files.items():
            self.assertEqual(self.answer(name, data, stream), Answer(Kind.KEPT))
        self.assertEqual((self.factory.file_count, kept_files(self.root)), (5, files))

    def test_a_file_may_arrive_byte_by_byte(self) -> None:
        receiving = self.factory.buildProtocol(DmsgAddress(ALICE))
        assert receiving is not None
        server: Any = iosim.makeFakeServer(receiving)
        receiving.makeConnection(server)
        data = packed()
        for byte in offer_of(spool_name(1), data).line() + b"\n" + data + offer_of(spool_name(1), data).line() + b"\n":
            receiving.dataReceived(bytes([byte]))
        self.assertEqual(kept_files(self.root), {spool_name(1): data})
        answers = b'{"answer": "send"}\n{"answer": "kept"}\n{"answer": "kept"}\n'
        self.assertEqual(server.getOutBuffer(), answers)

    def test_a_refused_file_does_not_end_the_stream(self) -> None:
        stream = Stream(self.clock, self.factory)
        refused = self.answer(spool_name(1), b"no gzip at all", stream)
        self.assertEqual(refused, Answer(Kind.REFUSED, "the file is not in gzip format"))
        self.assertEqual(self.answer(spool_name(2), packed(), stream), Answer(Kind.KEPT))
        self.assertEqual(dict(self.factory.refusals), {"unfit": 1})
        self.assertEqual(list(self.root.glob("*/.part-*")), [])

    def test_a_file_without_room_is_put_off(self) -> None:
        with mock.patch.object(self.store, "check_room", side_effect=StoreFull("the collector's disk is full")):
            self.assertEqual(self.answer(spool_name(1), packed()).kind, Kind.LATER)
        with mock.patch.object(self.store, "open_part", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            later = self.answer(spool_name(1), packed())
        self.assertEqual(later, Answer(Kind.LATER, "the collector cannot write: No space left on device"))
        with mock.patch.object(self.store, "keep", side_effect=OSError(errno.EIO, "Input/output error")):
            self.assertEqual(self.answer(spool_name(1), packed()).kind, Kind.LATER)
        self.assertEqual((self.factory.refusals["full"], self.factory.refusals["disk"]), (1, 2))
        self.assertEqual(self.answer(spool_name(1), packed()), Answer(Kind.KEPT))

    def test_a_disk_that_fills_on_the_way(self) -> None:
        stream = Stream(self.clock, self.factory)
        part = self.store.open_part(ALICE)
        full = mock.Mock(wraps=part, write=mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        full.name = part.name
        with mock.patch.object(self.store, "open_part", return_value=full):
            later = self.answer(spool_name(1), packed(), stream)
        self.assertEqual(later.kind, Kind.LATER)
        self.assertTrue(self.server_closed(stream))
        self.assertEqual(list(self.root.glob("*/.part-*")), [])

    def server_closed(self, stream: Stream) -> bool:
        stream.pump.flush()
        return bool(stream.server.disconnecting or stream.server.disconnected)

    def test_a_stream_that_ends_within_a_file_leaves_no_part(self) -> None:
        stream = Stream(self.clock, self.factory)
        data = packed()
        answered = stream.sending.offer(offer_of(spool_name(1), data), io.BytesIO(data[:-5]))
        stream.pump.flush()
        self.assertNoResult(answered)
        self.assertEqual(len(list(self.root.glob("*/.part-*"))), 1)
        stream.server.abortConnection()
        stream.pump.flush()
        self.failureResultOf(answered, SendError)
        self.assertEqual(list(self.root.glob("*/.part-*")), [])
        self.failureResultOf(stream.offer(spool_name(2), data), SendError)
        self.assertEqual(self.answer(spool_name(1), data), Answer(Kind.KEPT))

    def test_a_malformed_offer_ends_the_stream(self) -> None:
        for line in (b"GET / HTTP/1.1", b"x" * (LINE_LIMIT + 2), b"{}"):
            stream = Stream(self.clock, self.factory)
            stream.client.write(line + b"\n")
            stream.pump.flush()
            self.assertTrue(self.server_closed(stream), line)
        self.assertEqual(self.factory.refusals["malformed"], 3)
        self.assertEqual(self.factory._streams, [])

    def test_a_sender_that_stalls_within_a_file_times_out(self) -> None:
        stream = Stream(self.clock, self.factory)
        data = packed()
        answered = stream.sending.offer(offer_of(spool_name(1), data), io.BytesIO(data[:-5]))
        stream.pump.flush()
        self.clock.advance(QUIET_LIMIT)
        stream.pump.flush()
        self.failureResultOf(answered, SendError)
        self.assertEqual(dict(self.factory.refusals), {"silent": 1})
        idle = Stream(self.clock, self.factory)
        self.clock.advance(QUIET_LIMIT)
        self.assertTrue(self.server_closed(idle))
        self.assertEqual(dict(self.factory.refusals), {"silent": 1})

    def test_pauses_of_this_process_end_no_stream(self) -> None:
        """Neither at the collector, with an unfinished file or without any, nor at a sender."""
        let_pause(self.clock)
        stream, idle = Stream(self.clock, self.factory), Stream(self.clock, self.factory)
        data = packed()
        stream.sending.offer(offer_of(spool_name(1), data), io.BytesIO(data[:-5])).addErrback(lambda _: None)
        stream.pump.flush()
        pass_time(self.clock, 5.0)
        self.clock.advance(10 * QUIET_LIMIT)
        pass_time(self.clock, QUIET_LIMIT - 10.0)
        self.assertEqual((self.server_closed(stream), self.server_closed(idle)), (False, False))
        pass_time(self.clock, 10.0)
        self.assertEqual((self.server_closed(stream), self.server_closed(idle)), (True, True))
        sending = SenderProtocol(self.clock)
        sending.makeConnection(iosim.makeFakeClient(sending))
        answered = sending.offer(offer_of(spool_name(2), packed()), io.BytesIO(packed()))
        pass_time(self.clock, 5.0)
        self.clock.advance(10 * SENDER_QUIET_LIMIT)
        pass_time(self.clock, SENDER_QUIET_LIMIT - 20.0)
        self.assertNoResult(answered)
        pass_time(self.clock, 20.0)
        self.failureResultOf(answered, SendError)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_silent_or_malformed_collector_ends_the_round(self) -> None:
        for said, why in (
            (b"", "nothing came"),
            (b"hello\n", "not a JSON object"),
            (b'{"answer": "what"}\n', "not an answer"),
            (b"x" * (LINE_LIMIT + 2), "too long"),
            (b'{"answer": "send"}\n{"answer": "send"}\n', "the collector sent an answer without a request"),
        ):
            sending = SenderProtocol(self.clock)
            client: Any = iosim.makeFakeClient(sending)
            sending.makeConnection(client)
            answered = sending.offer(offer_of(spool_name(1), packed()), io.BytesIO(packed()))
            sending.dataReceived(said)
            self.clock.advance(SENDER_QUIET_LIMIT)
            self.assertIn(why, str(self.failureResultOf(answered, SendError).value))
        unasked = SenderProtocol(self.clock)
        unasked.makeConnection(iosim.makeFakeClient(unasked))
        unasked.dataReceived(b'{"answer": "kept"}\n')
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_stream_that_was_replaced_takes_no_room(self) -> None:
        """A sender may open any number of streams, but only two of them count."""
        streams = []
        for number in range(6):
            stream = Stream(self.clock, self.factory)
            stream.receiving.dataReceived(offer_of(spool_name(number), packed()).line() + b"\n")
            streams.append(stream)
        self.assertEqual(len(list(self.root.glob("*/.part-*"))), 2)
        other = Stream(self.clock, self.factory, BOB)
        size = len(packed())
        self.assertEqual(self.factory.incoming_size(other.receiving), (0, 2 * size))
        self.assertEqual(self.factory.incoming_size(streams[-1].receiving), (size, size))
        self.assertEqual(self.answer(spool_name(1), packed(), other).kind, Kind.KEPT)

    def test_work_for_a_sender_is_serialised(self) -> None:
        """Other senders do not wait, and work for a stream that has ended is not done."""
        held = self.successResultOf(self.factory.turn(ALICE).acquire())
        streams = [Stream(self.clock, self.factory) for _ in range(4)]
        answers = [stream.offer(spool_name(number), packed()) for number, stream in enumerate(streams)]
        self.assertEqual(self.answer(spool_name(9), packed("b"), Stream(self.clock, self.factory, BOB)).kind, Kind.KEPT)
        with mock.patch.object(self.store, "has", wraps=self.store.has) as looked:
            held.release()
            for stream in streams:
                stream.pump.flush()
        self.assertEqual({call.args[1].name for call in looked.call_args_list}, {spool_name(2), spool_name(3)})
        for answer in answers[:2]:
            self.failureResultOf(answer)
        self.assertEqual([self.successResultOf(answer).kind for answer in answers[2:]], [Kind.KEPT] * 2)

    def test_senders_that_are_not_listed_are_refused(self) -> None:
        carol = SecKey.from_seed(b"carol").public
        self.assertFalse(self.factory.admits(DmsgAddress(carol)))
        self.assertIsNone(self.factory.buildProtocol(DmsgAddress(carol)))
        streams = [Stream(self.clock, self.factory) for _ in range(3)]
        self.assertTrue(self.server_closed(streams[0]))
        self.assertFalse(self.server_closed(streams[1]))
        self.assertEqual(self.answer(spool_name(1), packed(), Stream(self.clock, self.factory, BOB)).kind, Kind.KEPT)
        self.assertEqual(dict(self.factory.refusals), {"not allowed": 1, "replaced": 1})
        with mock.patch.object(self.factory, "_streams", [None] * STREAMS_LIMIT):
            self.assertIsNone(self.factory.buildProtocol(DmsgAddress(ALICE)))
