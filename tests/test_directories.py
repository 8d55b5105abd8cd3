"""Directories in which another user could replace what is kept there."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.analytics.atomic_write import write_atomically
from dmsg.base.options import Flag, rows_of
from dmsg.cli.agent.log import open_log
from dmsg.collector.store import Store, StoreError
from dmsg.directories import (
    cache_directory,
    config_directory,
    data_directory,
    free_bytes,
    socket_directory,
    state_directory,
)
from dmsg.directory_checks import UnsafeDirectory, check_directory, check_not_planted, make_directory
from dmsg.errors import DmsgError, KeyFileError
from dmsg.keys import default_key, write_new
from dmsg.rmb.peer.settings import PeerSettings
from dmsg.rmb.twins.secrets import TwinSecret, write_secret
from dmsg.telemetry.settings import TelemetrySettings

STRANGER = 65534


class LocationTests(SynchronousTestCase):
    """Variables of the XDG Base Directory Specification, which must be absolute paths."""

    def test_a_relative_path_is_ignored(self) -> None:
        functions = {
            "XDG_CONFIG_HOME": (config_directory, "/home/u/.config/dmsg"),
            "XDG_STATE_HOME": (state_directory, "/home/u/.local/state/dmsg"),
            "XDG_DATA_HOME": (data_directory, "/home/u/.local/share/dmsg"),
            "XDG_CACHE_HOME": (cache_directory, "/home/u/.cache/dmsg"),
            "XDG_RUNTIME_DIR": (socket_directory, "/home/u/.cache/dmsg"),
        }
        others = {name: value for name, value in os.environ.items() if name not in functions}
        for name, (function, default) in functions.items():
            for value, expected in (
                ("/x", "/x/dmsg"),
                ("x", default),
                ("./x", default),
                ("~/x", default),
                ("", default),
            ):
                self.patch(os, "environ", {**others, "HOME": "/home/u", name: value})
                self.assertEqual(str(function()), expected, (name, value))


class DirectoryTests(SynchronousTestCase):
    """Owners and modes of the directories."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        self.path = self.root / "dmsg"

    def test_each_mode_and_owner(self) -> None:
        self.path.mkdir()
        users = [os.geteuid()] + ([0, STRANGER] if os.geteuid() == 0 else [])
        for uid in users:
            for mode in (0o700, 0o755, 0o775, 0o777, 0o1777, 0o1775):
                if uid != os.geteuid():
                    os.chown(self.path, uid, -1)
                self.path.chmod(mode)
                mine, sticky = uid == os.geteuid(), mode & 0o1000
                trusted = mine or uid == 0
                expected = trusted and bool(sticky or not mode & (0o002 if mine else 0o022))
                try:
                    check_directory(self.path)
                except UnsafeDirectory as error:
                    self.assertFalse(expected, (uid, oct(mode)))
                    self.assertIn(str(self.path), error.strerror)
                else:
                    self.assertTrue(expected, (uid, oct(mode)))

    def test_a_user_and_a_directory_of_root(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can become another user")
        self.root.chmod(0o755)
        self.path.mkdir()
        os.seteuid(STRANGER)
        self.addCleanup(os.seteuid, 0)
        for mode, safe in ((0o755, True), (0o775, False), (0o777, False), (0o1777, True)):
            os.seteuid(0)
            self.path.chmod(mode)
            os.seteuid(STRANGER)
            if safe:
                make_directory(self.path)
            else:
                error = self.assertRaises(UnsafeDirectory, make_directory, self.path)
                self.assertIn(f"of another user (uid 0) where others may write (mode {mode:04o})", error.strerror)

    def test_a_directory_is_created_for_this_user_alone(self) -> None:
        make_directory(self.path / "a")
        self.assertEqual((self.path / "a").stat().st_mode & 0o777, 0o700)

    def test_what_another_user_has_put_into_a_shared_directory(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        shared, own = self.root / "shared", self.root / "own"
        for one in (shared, own):
            one.mkdir()
        shared.chmod(0o1777)
        for name in ("theirs", "mine"):
            (shared / name).mkdir()
            (shared / f"{name}-link").symlink_to(own)
        for name in ("theirs", "theirs-link"):
            os.lchown(shared / name, STRANGER, STRANGER)
        for path in (shared / "theirs", shared / "theirs" / "below" / "absent", shared / "theirs-link"):
            with self.assertRaisesRegex(UnsafeDirectory, r"theirs.* is another user's \(uid 65534\)"):
                check_not_planted(path)
        for path in (shared, shared / "mine", shared / "mine-link", shared / "absent", own, Path(".")):
            check_not_planted(path)
        # In a directory that is not shared, others write only if its owner permits that.
        shared.chmod(0o775)
        check_not_planted(shared / "theirs")

    def test_entities_use_nothing_that_another_user_has_put_into_a_shared_directory(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        shared, own = self.root / "shared", self.root / "own"
        shared.mkdir()
        shared.chmod(0o1777)
        (shared / "spool").mkdir()
        (shared / "page").touch()
        (shared / ".part-of.part").symlink_to(own)
        for path in shared.iterdir():
            os.lchown(path, STRANGER, STRANGER)
        (uploads,) = (row for row in rows_of(PeerSettings) if row.name == "uploads")
        assert not isinstance(uploads.kind, Flag)

        for kind, use in (
            (DmsgError, lambda: TelemetrySettings(shared / "spool").prepare()),
            (StoreError, lambda: Store(shared / "spool").open()),
            (KeyFileError, lambda: write_new(shared / "spool" / "key", "secret")),
            (DmsgError, lambda: write_atomically(shared / "page", b"page")),
            (ValueError, lambda: uploads.kind.read(str(shared / "spool"))),
            (UnsafeDirectory, lambda: make_directory(shared / "spool" / "host")),
            (
                KeyFileError,
                lambda: write_secret(str(shared / "spool" / "new" / "twin"), TwinSecret("words", "sr25519")),
            ),
        ):
            error = self.assertRaises(kind, use)
            self.assertIn(f"is another user's (uid {STRANGER})", str(error))
        # Root may remove the file of the other user; this user would get an error.
        write_atomically(shared / "part-of", b"page")
        self.assertEqual((shared / "part-of").read_bytes(), b"page")
        self.assertFalse(own.exists())
        self.assertEqual((list((shared / "spool").iterdir()), (shared / "page").read_bytes()), ([], b""))

    def test_the_agent_writes_only_to_private_directories(self) -> None:
        """Neither the key nor the log is written to a directory in which others may write."""
        self.path.mkdir()
        self.path.chmod(0o777)
        self.assertIn("chmod 700", str(self.assertRaises(KeyFileError, default_key, self.path / "key")))
        self.assertIn("chmod 700", str(self.assertRaises(DmsgError, open_log, self.path / "agent.log")))
        self.assertEqual(os.listdir(self.path), [])

    def test_a_log_created_by_another_user_is_refused(self) -> None:
        """The directory is writable for all; the log is a file, or a link to a file of this user."""
        if os.geteuid() != 0:
            raise SkipTest("only root can make files of another user")
        self.path.mkdir()
        self.path.chmod(0o1777)
        mine = self.root / "mine"
        mine.write_bytes(b"mine")
        log = self.path / "agent.log"
        for plant in (lambda: log.write_bytes(b"theirs"), lambda: log.symlink_to(mine)):
            plant()
            os.chown(log, STRANGER, -1, follow_symlinks=False)
            self.assertIn("belongs to another user", str(self.assertRaises(DmsgError, open_log, log)))
            log.unlink()
        log.symlink_to(mine)
        os.close(open_log(log))

    def test_free_bytes_of_a_directory(self) -> None:
        self.assertGreater(free_bytes(self.root) or 0, 0)
        self.patch(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
        self.assertIsNone(free_bytes(self.root))
