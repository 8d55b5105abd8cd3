"""The load generator of the benchmarks, against a real server."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from benchmarks.machine import start_server
from benchmarks.wire import Connection, open_transport, pump, seal_frames
from dmsg.v2019.core.congestion import ROUTE_QUEUE_LIMIT

SIZE = 16 * 1024
FRAMES = 16 * ROUTE_QUEUE_LIMIT // SIZE
"""Number of frames that neither the queue of a receiver nor the buffers of its sockets can hold."""


class PumpTests(SynchronousTestCase):
    def test_a_transport_that_is_lost_to_a_paused_receiver_is_named(self) -> None:
        server, address, key = start_server()
        with server:
            sender, receiver = Connection(address, key), Connection(address, key)
            self.addCleanup(sender.close)
            self.addCleanup(receiver.close)
            open_transport(sender, receiver, 2)
            data = seal_frames(sender, 2, SIZE, FRAMES, coalesced=True)
            with self.assertRaisesRegex(ConnectionError, "closed transport 2, .*2 MiB in the receiver's queue"):
                pump([(sender, data)], [], FRAMES * SIZE)
