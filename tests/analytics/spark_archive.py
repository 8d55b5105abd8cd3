"""The archive of Spark's classes: who may have written it, and for which Java and Spark it is."""

from __future__ import annotations

from pathlib import Path

import pyspark
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.class_archive import archive_path, usable_archive


class ArchiveTests(SynchronousTestCase):
    """Files, without Java; ``long_archive`` makes one."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir(mode=0o700)
        self.java = Path(self.mktemp())
        self.java.mkdir()
        (self.java / "release").write_text('JAVA_VERSION="17.0.1"\n')

    def made(self) -> Path:
        path = archive_path(self.directory, self.java)
        assert path is not None
        path.write_bytes(b"x")
        path.chmod(0o600)
        return path

    def test_it_is_used_if_it_is_there(self) -> None:
        self.assertIsNone(usable_archive(self.directory, self.java))
        path = self.made()
        self.assertEqual(usable_archive(self.directory, self.java), path)
        self.assertIsNone(usable_archive(self.directory / "nowhere", self.java))

    def test_another_java_or_spark_has_another(self) -> None:
        path = self.made()
        self.patch(pyspark, "__version__", "9.9.9")
        self.assertNotEqual(archive_path(self.directory, self.java), path)
        self.assertIsNone(usable_archive(self.directory, self.java))
        (self.java / "release").write_text('JAVA_VERSION="17.0.2"\n')
        self.assertIsNone(usable_archive(self.directory, self.java))
        (self.java / "release").unlink()
        self.assertIsNone(archive_path(self.directory, self.java))
        self.assertIsNone(usable_archive(self.directory, self.java))

    def test_one_that_others_can_write_is_not_used(self) -> None:
        path = self.made()
        path.chmod(0o620)
        self.assertIsNone(usable_archive(self.directory, self.java))
        path.chmod(0o600)
        self.directory.chmod(0o777)
        self.assertIsNone(usable_archive(self.directory, self.java))
        self.directory.chmod(0o755)
        self.assertEqual(usable_archive(self.directory, self.java), path)
