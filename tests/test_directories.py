"""Directories in which another user could replace what is kept there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.analytics.atomic_write import write_atomically
from dmsg.base.options import Flag, rows_of
from dmsg.cli.agent.log import open_log
from dmsg.cli.config_file import ConfigError, read_config
from dmsg.cli.config_writer import write_settings
from dmsg.clients.address_book import AddressBook, UnknownName
from dmsg.clients.groups import Groups
from dmsg.collector.store import Store, StoreError
from dmsg.directories import (
    cache_directory,
    config_directory,
    data_directory,
    free_bytes,
    socket_directory,
    state_directory,
)
from dmsg.directory_checks import (
    UnsafeDirectory,
    check_directory,
    check_not_planted,
    make_directory,
    read_trusted,
)
from dmsg.errors import DmsgError, KeyFileError
from dmsg.keys import SecKey, default_key, write_new
from dmsg.rmb.peer.settings import PeerSettings
from dmsg.rmb.twins.secrets import TwinSecret, write_secret
from dmsg.tap.log_files import check_can_write
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
        # In another user's directory without the sticky bit, everybody could replace the directory of the entity.
        shared.chmod(0o777)
        os.chown(shared, STRANGER, STRANGER)
        for kind, use in (
            (DmsgError, lambda: TelemetrySettings(shared / "spool").prepare()),
            (StoreError, lambda: Store(shared / "spool").open()),
            (KeyFileError, lambda: write_new(shared / "key", "secret")),
            (ValueError, lambda: uploads.kind.read(str(shared / "spool"))),
            (KeyFileError, lambda: write_secret(str(shared / "twin"), TwinSecret("words", "sr25519"))),
            (UnsafeDirectory, lambda: check_can_write(shared / "log")),
        ):
            error = self.assertRaises(kind, use)
            self.assertIn("of another user (uid 65534) where others may write (mode 0777)", str(error))
        self.assertEqual(sorted(path.name for path in shared.iterdir()), [".part-of.part", "page", "spool"])
        os.chown(shared, 0, 0)
        shared.chmod(0o1777)
        # Root may remove the file of the other user; this user would get an error.
        write_atomically(shared / "part-of", b"page")
        self.assertEqual((shared / "part-of").read_bytes(), b"page")
        self.assertFalse(own.exists())
        self.assertEqual((list((shared / "spool").iterdir()), (shared / "page").read_bytes()), ([], b""))

    def test_files_that_decide_whom_this_user_trusts(self) -> None:
        """Another user could change which key a name or a group means, or which discovery is asked."""
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        key = SecKey.generate().public
        self.path.mkdir()
        names, config = self.path / "names", self.path / "config.toml"
        book = AddressBook(names)
        groups = Groups(book)
        self.patch(os, "environ", {**os.environ, "DMSG_CONFIG": str(config)})
        uses: tuple[tuple[type[Exception], Path, Callable[[], object]], ...] = (
            (UnknownName, names, lambda: AddressBook(names).find("bob")),
            (UnknownName, names, lambda: AddressBook(names).add("carol", key)),
            (UnknownName, groups.path, lambda: groups.keys("@all")),
            (UnknownName, groups.path, lambda: groups.add("all", (str(key),))),
            (ConfigError, config, read_config),
            (DmsgError, config, lambda: write_settings({"min-servers": 2})),
            (DmsgError, config, lambda: write_settings({"discovery": None})),
        )
        for uid, file_mode, directory_mode, safe in (
            (0, 0o600, 0o755, True),
            (0, 0o664, 0o775, True),
            (0, 0o666, 0o755, False),
            (0, 0o600, 0o777, False),
            (0, 0o600, 0o1777, True),
            (STRANGER, 0o600, 0o755, False),
            (STRANGER, 0o666, 0o1777, False),
        ):
            for kind, path, use in uses:
                names.write_text(f"bob {key}\n")
                groups.path.write_text(f"all {key}\n")
                config.write_text('discovery = "http://127.0.0.1:9"\n')
                for one in (names, groups.path, config):
                    one.chmod(0o600)
                os.chown(path, uid, -1)
                path.chmod(file_mode)
                os.chown(self.path, uid, -1)
                self.path.chmod(directory_mode)
                if safe:
                    use()
                    continue
                before = path.read_text()
                self.assertRegex(str(self.assertRaises(kind, use)), "another user|others may write")
                self.assertEqual(path.read_text(), before)
                if file_mode == 0o600:
                    path.unlink()
                    if use is not uses[0][2] and use is not uses[2][2] and use is not read_config:
                        self.assertRaises(kind, use)
                    self.assertFalse(path.exists(), "no file was created in the directory of another user")

    def test_a_device_is_a_file_to_trust(self) -> None:
        """``DMSG_CONFIG=/dev/null`` stands for no settings, although everybody may write there."""
        self.assertEqual(read_trusted(Path(os.devnull)), "")

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
