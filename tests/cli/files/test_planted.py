"""Files that arrive in a shared directory into which another user has put directories and links."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest

from tests.cli.test_commands import CommandCase
from tests.support import asynchronous

STRANGER = 65534


class PlantedTests(CommandCase):
    """``receive`` and ``cp`` refuse the directory and say whose it is."""

    @asynchronous
    async def test_nothing_is_written_where_another_user_put_a_directory(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        shared, own = Path(tempfile.mkdtemp()), self.directory.absolute() / "own"
        self.addCleanup(shutil.rmtree, shared)
        shared.chmod(0o1777)
        own.mkdir()
        (shared / "inbox").mkdir()
        (shared / "link").symlink_to(own)
        (self.directory / "a").write_bytes(b"a")
        for name in ("inbox", "link"):
            os.lchown(shared / name, STRANGER, STRANGER)
            at = str(shared / name)
            for arguments in (
                ("receive", "5274-guitar-alpha-juice", "--yes", "--dir", at),
                ("receive", "--listen", "--anyone", "--dir", f"{at}/new"),
                ("cp", "--listen", at, "--writable", "--anyone"),
                ("cp", "ak" + "a" * 51 + ":a", f"{at}/a"),
            ):
                status, _, err = await self.run_command(*arguments, "-d", "http://127.0.0.1:9")
                self.assertEqual(status, 2, (arguments, err))
                self.assertIn(f"{at} is another user's (uid {STRANGER})", err)
        self.assertEqual(list(own.iterdir()) + list((shared / "inbox").iterdir()), [])
