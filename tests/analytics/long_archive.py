"""An archive of Spark's classes is made, and Java starts from it (``make long WHICH=pipeline``)."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.class_archive import ArchiveFailed, make_archive, usable_archive
from dmsg.analytics.session import find_java


class MadeTests(SynchronousTestCase):
    """The whole way, in processes of its own."""

    def test_it_is_made_and_replaces_older_ones(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir(mode=0o700)
        (directory / "spark-1.0.0-0000.jsa").write_bytes(b"x")
        path = make_archive(directory, find_java())
        self.assertEqual(list(directory.iterdir()), [path])
        self.assertGreater(path.stat().st_size, 50 * 1024**2)
        self.assertEqual(usable_archive(directory, find_java()), path)

    def test_a_java_that_fails(self) -> None:
        java = Path(self.mktemp()).absolute()
        java.mkdir()
        self.assertRaisesRegex(ArchiveFailed, "no file `release`", make_archive, java / "cache", java)
