"""Files that peers can read and write: names with dots, dmsg's own files under any name, home directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.descriptors import open_within
from dmsg.apps.exposure import OwnFile, check_target, check_written, is_home_or_above, own_files, record_own_files
from dmsg.apps.http_directory import Listing, ListingThreads
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import FILE, CheckedItems, Item
from dmsg.apps.parcels.receiver import ParcelReceiver
from dmsg.apps.parcels.walk import walk
from dmsg.apps.parcels.wire import encode
from dmsg.apps.paths import find_replaced, path_inside
from dmsg.apps.sources import open_regular
from dmsg.apps.transfer import TransferError
from dmsg.keys import SecKey, write_key_file
from dmsg.rmb.twins.secrets import TwinSecret, write_secret

WORDS = "bottom drive obey lake curtain smoke basket hold race lonely fit walk"


class HomeCase(SynchronousTestCase):
    """A home directory with an agent's key, settings and logs, and things of its owner."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            value = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run")}.get(name, "")
            self.patch(os, "environ", {**os.environ, name: value})
        for name in ("DMSG_CONFIG", "DMSG_NAMES", "DMSG_AGENT", "DMSG_KEY_FILE", "RMB_KEY_FILE"):
            os.environ.pop(name, None)
        self.config = self.home / ".config" / "dmsg"
        for directory in (self.config, self.home / ".local/state/dmsg", self.home / "run/dmsg", self.home / "public"):
            directory.mkdir(parents=True)
        write_key_file(self.config / "key", SecKey.generate())
        (self.config / "names").write_text("")
        (self.home / ".bash_profile").write_text("export PATH\n")
        (self.home / "public" / "notes.txt").write_text("notes")
        own_files.__globals__["_look_for_own_files"].cache_clear()

    def at(self, directory: Path) -> int:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, descriptor)
        return descriptor


class OwnFilesTests(HomeCase):
    """Keys, settings, logs and the socket, whatever leads to them."""

    def test_recorded_files_are_never_exposed(self) -> None:
        """A ``dmsg host`` with another directory records its files; files beside them are the user's."""
        public = self.home / "public"
        token, absent = public / "page.token", public / "network.json"
        token.write_text("the password of the status pages")
        record_own_files([token, absent])
        record_own_files([self.home / "gone" / "page.token"])
        record_own_files([token])
        own_files.__globals__["_look_for_own_files"].cache_clear()
        os.link(token, public / "other")
        for name in ("page.token", "other"):
            self.assertRaises(OwnFile, open_regular, public / name, name)
        for path in (token, absent, Path(f"{self.home}/.local/share/dmsg/own-files.json")):
            self.assertRaises(OwnFile, check_written, path)
        open_regular(public / "notes.txt", "notes.txt").close()
        check_written(public / "notes.txt")
        recorded = (self.home / ".local/share/dmsg/own-files.json").read_text()
        self.assertEqual(recorded.count("page.token"), 2)
        record_own_files([public / "more"])
        self.assertNotIn("gone", (self.home / ".local/share/dmsg/own-files.json").read_text())
        for broken in ("", "[]", '{"files": 1}', '{"files": [1, "relative"]}'):
            (self.home / ".local/share/dmsg/own-files.json").write_text(broken)
            own_files.__globals__["_look_for_own_files"].cache_clear()
            open_regular(token, "page.token").close()

    def test_key_files_are_never_exposed(self) -> None:
        public = self.home / "public"
        write_key_file(public / "alice.key", SecKey.generate())
        write_secret(str(public / "alice.twin"), TwinSecret(WORDS))
        (public / "by-hand.twin").write_text(WORDS + "\n")
        (public / "by-hand.twin").chmod(0o600)
        (public / "copy").write_text((self.config / "key").read_text())
        for name in ("alice.key", "alice.twin", "by-hand.twin", "copy"):
            self.assertRaises(OwnFile, open_regular, public / name, name)
            self.assertIn("is dmsg's own", str(self.assertRaises(TransferError, walk, [public / name])))
            self.assertRaises(OwnFile, check_target, name, self.at(public))
            self.assertRaises(OwnFile, find_replaced, name, self.at(public))
            self.assertRaises(OwnFile, Destination(public, overwrite=True).check, [(name, FILE)])
        # The file contains words, but they are no twin's secret.
        (public / "poem").write_text("the bottom of a lake " * 3)
        (public / "poem").chmod(0o600)
        open_regular(public / "poem", "poem").close()
        walked = walk([public])
        self.assertEqual(
            sorted(walked.own), ["public/alice.key", "public/alice.twin", "public/by-hand.twin", "public/copy"]
        )
        self.assertEqual({item.path for item in walked.checked.entries}, {"public", "public/notes.txt", "public/poem"})

    def test_the_directory_of_a_hosted_network_is_not_exposed(self) -> None:
        """It contains the token of the status pages, which cannot be recognised by its content."""
        share = self.home / ".local" / "share"
        hosted = share / "dmsg" / "host"
        hosted.mkdir(parents=True)
        (hosted / "page.token").write_text("0123456789abcdef01234567")
        (share / "dmsg" / "film").write_text("film")
        self.assertRaises(OwnFile, open_within, share, hosted)
        self.assertRaises(OwnFile, check_written, hosted / "page.token")
        walked = walk([share], hidden=True)
        self.assertEqual(walked.own, ["share/dmsg/host"])
        self.assertIn("share/dmsg/film", {item.path for item in walked.checked.entries})

    def test_links_to_own_files_are_not_exposed(self) -> None:
        public = self.home / "public"
        os.link(self.config / "names", public / "innocent")
        os.symlink(self.config / "names", public / "link")
        os.symlink(self.config, public / "directory")
        self.assertRaises(OwnFile, open_regular, public / "innocent", "innocent")
        self.assertRaises(OwnFile, open_regular, public / "link", "link", follow=True)
        self.assertRaises(OwnFile, check_target, "innocent", self.at(public))
        self.assertRaises(OwnFile, open_within, self.config, self.config)
        self.assertRaises(OwnFile, open_within, public / "directory", public / "directory")
        self.assertRaises(OwnFile, open_within, self.home, self.config)
        self.assertRaises(OwnFile, open_within, self.home / ".config", self.config)
        for path in (public / "link", self.config / "new", public / "directory" / "key"):
            self.assertRaises(OwnFile, check_written, path)
        for path in (public / "new", public / "notes.txt", Path("/dev/null")):
            check_written(path)
        os.mkdir(self.config / "below")
        self.assertRaises(OwnFile, open_within, self.config / "below", self.config / "below")
        self.assertEqual(walk([public]).own, ["public/innocent"])
        self.assertRaises(TransferError, walk, [self.config])
        self.assertEqual(walk([self.home / ".config"], hidden=True).own, [".config/dmsg"])

    def test_own_files_that_do_not_exist_yet_cannot_be_written(self) -> None:
        """Else a peer would write the settings that the next command reads."""
        self.assertRaises(OwnFile, check_target, "dmsg", self.at(self.home / ".config"))
        os.environ["XDG_CONFIG_HOME"] = str(self.home / "else/where")
        self.assertRaises(OwnFile, check_target, "else", self.at(self.home))
        self.assertRaises(OwnFile, open_within, self.home, self.home / "else/where/dmsg", make=True)
        self.assertFalse((self.home / "else").exists())

    def test_a_socket_and_files_that_are_named(self) -> None:
        os.environ["DMSG_AGENT"] = str(self.home / "public" / "agent")
        os.environ["DMSG_NAMES"] = str(self.home / "public" / "book")
        os.environ["DMSG_CONFIG"] = str(self.home / "settings" / "config.toml")
        (self.home / "settings").mkdir()
        at = self.at(self.home / "public")
        for name in ("agent", "book", "book.groups"):
            self.assertRaises(OwnFile, check_target, name, at)
        for name in ("config.toml", "key"):
            self.assertRaises(OwnFile, check_target, name, self.at(self.home / "settings"))
        check_target("notes.txt", at)

    def test_http_does_not_serve_own_files(self) -> None:
        os.link(self.config / "names", self.home / "innocent")
        listing: Any = Listing(str(self.home), str(self.home), "x", hidden=True, threads=ListingThreads(None))
        self.assertNotIn("innocent", [row.name for row in listing._rows()])
        below: Any = Listing(str(self.home / ".config"), str(self.home), "x", hidden=True, threads=ListingThreads(None))
        self.assertEqual(below._rows(), [])


class NamesTests(HomeCase):
    """Names that begin with a dot."""

    def test_paths_with_a_leading_dot_need_hidden(self) -> None:
        os.symlink("../.bash_profile", self.home / "public" / "innocent")
        for text in (".bash_profile", ".ssh/authorized_keys", "a/.b/c", "public/../.bash_profile", "public/innocent"):
            self.assertRaises(TransferError, path_inside, self.home, text)
            path_inside(self.home, text, hidden=True)
        path_inside(self.home, "./public/../public/notes.txt")

    def test_parcels_with_a_leading_dot_need_hidden(self) -> None:
        (self.home / "public" / ".git").mkdir()
        (self.home / "public" / ".git" / "config").write_text("")
        walked = walk([self.home / "public"])
        self.assertEqual(walked.dotted, ["public/.git"])
        self.assertEqual(len(walked.checked.entries), 2)
        self.assertEqual(len(walk([self.home / "public"], hidden=True).checked.entries), 4)
        self.assertRaises(TransferError, walk, [self.home / ".bash_profile"])
        self.assertRaises(TransferError, CheckedItems(hidden=False).add, Item(".bash_profile", FILE))
        self.assertRaises(TransferError, Destination(self.home).check, [(".bash_profile", FILE)])
        Destination(self.home / "public", hidden=True).check([(".bash_profile", FILE)])

    def test_a_manifest_that_has_more_than_the_offer_says(self) -> None:
        """The peer is the enemy's program: its offer has one directory, in which a hook of git lies."""
        inbox = self.home / "public"
        receiver = ParcelReceiver(Destination(inbox), lambda offer: None)
        transport: Any = StringTransport()
        receiver.makeConnection(transport)
        thing = {"name": "new", "kind": "d", "size": 4, "files": 1, "directories": 2}
        receiver.dataReceived(encode(offer="files", things=[thing], size=4, files=1))
        entries = [["new", "d", 0, 0o755, 1], ["new/.git", "d", 0, 0o755, 1], ["new/.git/hook", "f", 4, 0o755, 1]]
        receiver.dataReceived(encode(entries=entries))
        # A receiver whose slice of the turn is over reads the rest at the end of the connection.
        receiver.connectionLost()
        self.failureResultOf(receiver.done, TransferError)
        self.assertIn(b"begin with a dot", transport.value())
        self.assertFalse((inbox / "new").exists())


class HomesTests(HomeCase):
    """Directories that hold more than was meant."""

    def test_home_directories_and_their_parents_are_recognised(self) -> None:
        os.symlink(self.home, self.home / "public" / "link")
        for directory in (self.home, self.home.parent, Path("/"), Path("/root"), self.home / "public" / "link"):
            if os.access(directory, os.X_OK) and directory.exists():
                self.assertTrue(is_home_or_above(directory), directory)
        for directory in (self.home / "public", self.home / ".config"):
            self.assertFalse(is_home_or_above(directory), directory)
