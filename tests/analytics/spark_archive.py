"""Search for Java, and options with which it is started: the archive of Spark's classes, and the locale."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pyspark
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import session
from dmsg.analytics.class_archive import archive_path, usable_archive
from dmsg.analytics.session import JavaNotFound, find_java, name_files_in_utf8


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


class JavaTests(SynchronousTestCase):
    """Search for a Java that starts."""

    def home(self, script: str) -> str:
        """Return the home of a Java that is a shell script."""
        home = Path(self.mktemp()).absolute()
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "java").write_text(f"#!/bin/sh\n{script}\n")
        (home / "bin" / "java").chmod(0o700)
        return str(home)

    def error(self, **environment: str) -> str:
        with patch.dict(os.environ, environment):
            return str(self.assertRaises(JavaNotFound, find_java))

    def test_wrong_options_in_the_environment(self) -> None:
        java = find_java()
        for name in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"):
            self.assertEqual(
                self.error(JAVA_HOME=str(java), **{name: "-XX:NoSuchOption"}),
                f"{java}/bin/java does not start: Unrecognized VM option 'NoSuchOption'; correct the environment "
                f"variable {name}",
            )
        with patch.dict(os.environ, {"JAVA_HOME": str(java), "JDK_JAVA_OPTIONS": "-Dversion=1"}):
            self.assertEqual(find_java(), java)

    def test_a_java_that_does_not_start_is_passed_over(self) -> None:
        with patch.dict(os.environ, {"JAVA_HOME": self.home("exit 3")}):
            self.assertNotEqual(str(find_java()), os.environ["JAVA_HOME"])

    def test_no_java_starts(self) -> None:
        with patch("shutil.which", return_value=None), patch.object(Path, "glob", return_value=[]):
            broken = self.home("exit 3")
            self.assertEqual(self.error(JAVA_HOME=broken), f"{broken}/bin/java does not start: exit code 3")
            slow = self.home("exec sleep 60")
            with patch.object(session, "JAVA_TIMEOUT", 0.1):
                self.assertEqual(self.error(JAVA_HOME=slow), f"{slow}/bin/java has not answered for 0.1 seconds")
            old = self.home("echo 'openjdk version \"8.1\"'")
            self.assertTrue(self.error(JAVA_HOME=old).startswith(f"Spark needs Java 17: found 8 in {old}; on Debian"))


class LocaleTests(SynchronousTestCase):
    """Java finds files by their names as the locale writes them."""

    def test_names_are_utf8_in_every_locale(self) -> None:
        for before, after in (
            ({}, "C.UTF-8"),
            ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, "C.UTF-8"),
            ({"LC_CTYPE": "POSIX", "LANG": "de_DE.UTF-8"}, "C.UTF-8"),
            ({"LANG": "de_DE.utf8"}, None),
            ({"LC_ALL": "", "LC_CTYPE": "C.UTF-8", "LANG": "C"}, None),
        ):
            with patch.dict(os.environ, before, clear=True):
                name_files_in_utf8()
                self.assertEqual(os.environ.get("LC_ALL") or None, after, before)
