"""Renames to a new name, with hard links and on file systems that have none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.renames import rename_to_new


class RenameTests(SynchronousTestCase):
    """A rename on a file system that has hard links."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.source, self.target = self.directory / "source", self.directory / "target"
        self.source.write_text("new")
        self.source.chmod(0o640)

    def content(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.directory.iterdir()}

    def test_a_file_gets_its_new_name_and_keeps_its_mode(self) -> None:
        rename_to_new(self.source, self.target)
        self.assertEqual({"target": "new"}, self.content())
        self.assertEqual(0o640, self.target.stat().st_mode & 0o777)

    def test_names_belong_to_the_given_directory(self) -> None:
        at = os.open(self.directory, os.O_RDONLY)
        self.addCleanup(os.close, at)
        rename_to_new("source", "target", at=at)
        self.assertEqual({"target": "new"}, self.content())

    def test_an_existing_file_stays(self) -> None:
        self.target.write_text("old")
        self.assertRaises(FileExistsError, rename_to_new, self.source, self.target)
        self.assertEqual({"source": "new", "target": "old"}, self.content())

    def test_a_symbolic_link_stays(self) -> None:
        elsewhere = self.directory / "elsewhere"
        self.target.symlink_to(elsewhere)
        self.assertRaises(FileExistsError, rename_to_new, self.source, self.target)
        self.assertTrue(self.target.is_symlink())
        self.assertFalse(elsewhere.exists())

    def test_a_missing_file_leaves_nothing(self) -> None:
        self.source.unlink()
        self.assertRaises(FileNotFoundError, rename_to_new, self.source, self.target)
        self.assertEqual({}, self.content())


class NoHardLinkTests(RenameTests):
    """A rename on a file system without hard links, such as FAT: ``link`` fails with EPERM."""

    def setUp(self) -> None:
        super().setUp()

        def link(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        self.patch(os, "link", link)
