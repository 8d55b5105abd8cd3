"""Counts of user data."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.v2019.core.peers import data_in
from dmsg.v2019.core.wire import FWD, SECURE_OVERHEAD, Frame


class DataTests(SynchronousTestCase):
    def test_headers_and_tags_are_not_user_data(self) -> None:
        frames = [Frame(FWD, 2, bytes(size)) for size in (0, 1, 2, 5, 18, 40)]
        run = memoryview(b"".join(frame.encode() for frame in frames))
        self.assertEqual(data_in(run, False), 3 + 16 + 38)
        self.assertEqual(data_in(run, True), 40 - SECURE_OVERHEAD)
