"""Notices about streams that have lost their connection."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.reconnect_notice import CHECK_INTERVAL, NOTICE_AFTER, Texts, watch_connections

TEXTS = Texts("away until {until}", "back", "replaced", "ended")


class Stream:
    """Stream that says since when it has no connection."""

    away_since: float | None = None


class ConnectionsTests(SynchronousTestCase):
    """Several streams to one peer."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self.streams = [Stream(), Stream()]
        watching = watch_connections(self.clock, lambda: self.streams, 120.0, self.said.append, TEXTS)  # type: ignore[arg-type]
        watching.__enter__()
        self.addCleanup(watching.__exit__, None, None, None)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.pump([CHECK_INTERVAL] * round(seconds / CHECK_INTERVAL))

    def lose(self, *streams: Stream) -> None:
        for stream in streams:
            stream.away_since = self.clock.seconds()

    def test_they_come_back(self) -> None:
        self.pass_seconds(10)
        self.assertEqual(self.said, [])
        self.lose(*self.streams)
        self.pass_seconds(NOTICE_AFTER + 10)
        self.assertEqual(len(self.said), 1)
        self.assertRegex(self.said[0], r"^away until \d\d:\d\d:\d\d$")
        self.streams[0].away_since = None
        self.pass_seconds(10)
        self.assertEqual(len(self.said), 1, "one of the two is still away")
        self.streams[1].away_since = None
        self.pass_seconds(10)
        self.assertEqual(self.said[1:], ["back"])

    def test_they_end(self) -> None:
        self.lose(*self.streams)
        self.pass_seconds(60)
        self.streams.clear()
        self.pass_seconds(1)
        self.assertEqual(self.said[1:], ["ended"])
        # A later stream has nothing to do with them.
        self.streams.append(Stream())
        self.lose(*self.streams)
        self.pass_seconds(10)
        self.assertEqual(len(self.said), 3)

    def test_they_end_because_the_peer_has_restarted(self) -> None:
        """The peer resumes no stream of its former run, but a new stream works."""
        self.lose(*self.streams)
        self.pass_seconds(10)
        self.streams.append(Stream())
        self.pass_seconds(10)
        self.assertEqual(len(self.said), 1)
        del self.streams[:2]
        self.pass_seconds(1)
        self.assertEqual(self.said[1:], ["replaced"])

    def test_a_short_loss_is_not_told(self) -> None:
        self.lose(self.streams[0])
        self.pass_seconds(NOTICE_AFTER / 2)
        self.streams[0].away_since = None
        self.pass_seconds(10)
        self.assertEqual(self.said, [])
