"""Names and paths that a peer has sent."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

import dmsg
from dmsg.apps.copy_listener import CopyPeer
from dmsg.apps.parcels.manifest import parts_of
from dmsg.apps.parcels.wire import encode
from dmsg.apps.paths import PATH_LIMIT, is_possible, local_name, path_inside
from dmsg.apps.transfer import TransferError

PROGRAM = r"""
import os, sys
from pathlib import Path
from dmsg.apps.parcels.manifest import decode_item
from dmsg.apps.parcels.offers import parse_item
from dmsg.apps.paths import path_inside
assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
for name in ("\u00fc.txt", "\udcc3\udcbc.txt", "bad\udcff"):
    item = decode_item([name, "f", 1, 0o644, 0])
    link = decode_item(["d/" + name, "l", 0, 0o644, 0, name])
    thing = parse_item({"name": name, "kind": "f", "size": 1, "files": 1, "directories": 0})
    path = path_inside(Path("."), name)
    print(*(os.fsencode(one).hex() for one in (item.path, link.path, link.target, thing[0], path.name)))
"""
"""Program that decodes names from a peer, and prints the bytes of the files that it would use."""


class LocalNameTests(SynchronousTestCase):
    def test_a_name_is_the_same_file_whatever_the_encoding_of_the_file_system_is(self) -> None:
        """LC_ALL=C without Python's UTF-8 mode."""
        environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        environment["PYTHONPATH"] = str(Path(dmsg.__file__).parent.parent)
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        self.assertEqual(done.stderr, "")
        umlaut, other = b"\xc3\xbc.txt", b"bad\xff"
        expected = [" ".join(one.hex() for one in (name, b"d/" + name, name, name, name)) for name in (umlaut, other)]
        self.assertEqual(done.stdout.splitlines(), [expected[0], expected[0], expected[1]])

    def test_a_name_in_utf_8(self) -> None:
        for name in ("a", "\u00fc", "bad\udcff", "\U0001f600", "\ud800", "\udc2f", ""):
            self.assertEqual(local_name(name), name)
        self.assertEqual(local_name("\udcc3\udcbc"), "\u00fc", "as a program with another encoding sends it")

    def test_a_path_that_no_file_can_have_is_refused(self) -> None:
        for path in ("\ud800", "a/\udfff/b", "\udc2f..\udc2f"):
            for op in ("put-tree", "get-tree"):
                peer = CopyPeer(Clock(), Path(self.mktemp()), writable=True)
                said = StringTransport()
                peer.makeConnection(said)
                peer.dataReceived(encode(op=op, path=path))
                self.assertIn("malformed", str(self.failureResultOf(peer.done, TransferError).value))
                self.assertIn(b"malformed", said.value())

    def test_paths_of_copies_and_parcels_have_one_limit_in_bytes(self) -> None:
        longest = "\u00fc" * (PATH_LIMIT // 2)
        self.assertTrue(is_possible(longest))
        self.assertFalse(is_possible(longest + "a"))
        for check in (parts_of, partial(path_inside, Path("."))):
            self.assertRaisesRegex(TransferError, "malformed", check, longest + "a")
