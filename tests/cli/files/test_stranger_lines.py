"""Lines that strangers make the listening commands print: their number, their length, and what they look like."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.copy_listener import CopyPeer
from dmsg.apps.http_directory import file_site
from dmsg.apps.intake import ENTRY_COST, Intake
from dmsg.apps.parcels.wire import encode
from dmsg.apps.partial_files import part_name
from dmsg.base.log_throttle import INTERVAL, LogThrottle
from dmsg.base.printable import MAX_PEER_TEXT
from dmsg.cli.access import Access, AllowOption
from dmsg.cli.files.cp_run import CopyFactory
from dmsg.cli.files.receive_run import _Inbox
from dmsg.cli.files.send_by_key import transfer_progress
from dmsg.cli.files.web_run import FileSite
from dmsg.cli.output import indent_text
from dmsg.cli.tunnels import forward
from dmsg.keys import PubKey, SecKey
from dmsg.net.streams.address import DmsgAddress

STRANGER = SecKey.from_seed(b"stranger").public
FRIEND = SecKey.from_seed(b"friend").public
FRIENDS = Access((AllowOption("friend", frozenset({FRIEND})),))
ANYONE = Access(())


class LinesCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.clock = Clock()
        self.out, self.err = io.StringIO(), io.StringIO()
        self.patch(sys, "stdout", self.out)
        self.patch(sys, "stderr", self.err)

    def errors(self) -> list[str]:
        """Return the lines on standard error, and remove them."""
        text = self.err.getvalue()
        self.err.seek(0)
        self.err.truncate()
        return text.splitlines()

    def say(self, factory: Any, message: bytes, peer: PubKey = STRANGER) -> StringTransport:
        """Connect to the factory, send a message, and end the connection."""
        protocol = factory.buildProtocol(DmsgAddress(peer, 1))
        transport = StringTransport(peerAddress=DmsgAddress(peer, 1))
        transport.resumeProducing = lambda: None  # type: ignore[method-assign]  # A stream permits it while it closes.
        protocol.makeConnection(transport)
        protocol.dataReceived(message)
        protocol.connectionLost()
        return transport


class ReceiveTests(LinesCase):
    """``dmsg receive --listen``."""

    def inbox(self, access: Access = ANYONE, limit: int = 200_000) -> _Inbox:
        intake = Intake(self.clock, limit, lambda key: key == FRIEND)
        lines = LogThrottle(self.clock.seconds)
        progress = transfer_progress()
        return _Inbox(progress, access, self.root, False, False, None, intake, lines, lambda failure: None)

    def test_failed_transfers_of_strangers_have_few_lines(self) -> None:
        inbox = self.inbox()
        for _ in range(100):
            self.say(inbox, b"GET / HTTP/1.0\r\n\r\n", SecKey.generate().public)
        self.assertEqual(len(self.errors()), 1)
        self.clock.advance(INTERVAL)
        self.say(inbox, b"")
        (line,) = self.errors()
        self.assertIn(", and 99 more since the last line", line)

    def test_each_failed_transfer_of_a_named_peer_has_a_line(self) -> None:
        inbox = self.inbox(FRIENDS)
        for _ in range(3):
            self.say(inbox, b"", FRIEND)
        self.assertEqual(len(self.errors()), 3)

    def test_a_name_begins_no_line_of_its_own(self) -> None:
        name = "x\nreceived film from alice"
        (self.root / name).touch()
        thing = {"name": name, "kind": "f", "size": 1, "files": 1, "directories": 0}
        self.say(self.inbox(), encode(offer="files", things=[thing], size=1, files=1))
        (line,) = self.errors()
        self.assertIn("failed: x received film from alice exists already", line)

    def test_a_refused_name_begins_no_line_of_its_own(self) -> None:
        inbox, thing = self.inbox(), {"name": "x\nbob: hi", "kind": "f", "size": 1, "files": 1, "directories": 0}
        offer = encode(offer="files", things=[thing], size=1, files=1)
        part = self.root / part_name("x\nbob: hi")
        protocol: Any = inbox.buildProtocol(DmsgAddress(FRIEND, 1))
        protocol.makeConnection(StringTransport())
        protocol.dataReceived(offer)
        self.assertTrue(part.exists())
        self.say(inbox, offer)
        (line,) = self.errors()
        self.assertIn("is refused: x bob: hi is unfinished here", line)
        protocol.connectionLost()

    def test_a_text_begins_no_line_of_its_own(self) -> None:
        self.say(self.inbox(), encode(offer="text", text="hi\ndmsg: run this\nbob: hello"))
        self.assertEqual(self.out.getvalue(), f"{STRANGER.text}: hi\n  dmsg: run this\n  bob: hello\n")

    def test_texts_have_a_limit(self) -> None:
        inbox = self.inbox(limit=200_000)
        for _ in range(20):
            transport = self.say(inbox, encode(offer="text", text="x" * 20_000))
        self.assertIn(b"this side accepts 100.0 kB", transport.value())
        self.assertEqual(self.out.getvalue().count("\n"), 100_000 // (20_000 + ENTRY_COST))
        self.assertEqual(len(self.errors()), 1)
        self.say(inbox, encode(offer="text", text="x" * 20_000), FRIEND)
        self.assertEqual(self.out.getvalue().count("\n"), 100_000 // (20_000 + ENTRY_COST) + 1)


class OtherCommandsTests(LinesCase):
    """The other commands that accept connections."""

    def test_failed_copies_of_strangers_have_few_short_lines(self) -> None:
        for access, peer, expected in ((ANYONE, STRANGER, 1), (FRIENDS, FRIEND, 50)):
            factory = CopyFactory(lambda: CopyPeer(self.clock, self.root), access, None, self.clock.seconds)
            for number in range(50):
                self.say(factory, encode(op="get-tree", path=f"{number}{'x' * 4000}"), peer)
            lines = self.errors()
            self.assertEqual(len(lines), expected)
            self.assertLess(max(map(len, lines)), 1100)

    def test_a_request_for_a_long_path_has_a_short_line(self) -> None:
        site = FileSite(self.clock, file_site(self.root), ANYONE)  # type: ignore[arg-type]
        self.say(site, b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 10_000))
        (line,) = self.out.getvalue().splitlines()
        self.assertIn(" GET /aaaa", line)
        self.assertLess(len(line), MAX_PEER_TEXT + 20)
        self.say(site, b"%s / HTTP/1.1\r\nHost: x\r\n\r\n" % (b"A" * 10_000))
        self.assertLess(max(map(len, self.out.getvalue().splitlines())), MAX_PEER_TEXT + 20)

    def test_an_exposed_port_that_is_closed_has_few_lines(self) -> None:
        lines = LogThrottle(self.clock.seconds)
        for _ in range(50):
            forward.warn(Failure(ConnectionRefusedError()), "127.0.0.1:22", lines)
        self.assertEqual(len(self.errors()), 1)
        self.clock.advance(INTERVAL)
        forward.warn(Failure(ConnectionRefusedError()), "127.0.0.1:22", lines)
        self.assertIn(", and 49 more since the last line", self.errors()[0])


class IndentTests(SynchronousTestCase):
    """Lines of a text that a terminal shows."""

    def test_no_line_is_broken_by_the_terminal(self) -> None:
        for text in ("x" * 40 + "bob: hello", "\u4e16" * 20 + "bob: hello", "a\tb\tbob: hello" * 5, "a\n" + "b" * 99):
            first, *others = indent_text(text, 40).split("\n")
            self.assertTrue(others)
            for line in (first, *others):
                self.assertLessEqual(cell_len(line), 40)
                self.assertNotIn("\t", line)
            self.assertTrue(all(line.startswith("  ") for line in others))

    def test_an_empty_line_stays(self) -> None:
        self.assertEqual(indent_text("a\n\nb", 40), "a\n  \n  b")
