"""Secret of a twin: from a file or from the environment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import KeyFileError
from dmsg.rmb.errors import IdentityError
from dmsg.rmb.twins.secrets import DEFAULT_KEY_TYPE, SECRET, TwinSecret, read_secret, write_secret

SEED = "0x" + "ab" * 32


class ReadTests(SynchronousTestCase):
    def set_variable(self, value: str | None) -> None:
        before = os.environ.pop(SECRET, None)
        if value is not None:
            os.environ[SECRET] = value

        def restore() -> None:
            os.environ.pop(SECRET, None)
            if before is not None:
                os.environ[SECRET] = before

        self.addCleanup(restore)

    def file(self, text: str, mode: int = 0o600) -> str:
        path = self.mktemp()
        Path(path).write_text(text)
        os.chmod(path, mode)
        return path

    def test_the_environment_has_the_secret_when_there_is_no_file(self) -> None:
        self.set_variable(f" {SEED}\n")
        for key_type, expected in ((None, DEFAULT_KEY_TYPE), ("Ed25519", "ed25519")):
            self.assertEqual(read_secret(None, key_type), TwinSecret(SEED, expected))

    def test_without_a_secret_the_error_names_both_places(self) -> None:
        for value in (None, ""):
            self.set_variable(value)
            error = str(self.assertRaises(KeyFileError, read_secret, None))
            self.assertTrue("--key-file" in error and SECRET in error)

    def test_a_file_is_read_although_the_environment_has_a_secret(self) -> None:
        self.set_variable("0x" + "cd" * 32)
        path = self.file(f"{SEED}\ntype ed25519\n")
        self.assertEqual(read_secret(path), TwinSecret(SEED, "ed25519"))
        self.assertEqual(read_secret(path, "SR25519"), TwinSecret(SEED, "sr25519"))
        self.assertRaises(IdentityError, read_secret, self.file("0x12\n"))

    def test_words_may_begin_with_the_word_type(self) -> None:
        """Only ``type`` before a kind of key is the second line of the file."""
        words = "type soft lunar mirror essay vault umbrella idle mandate exist clutch width"
        secret = read_secret_or_text(self.file(f"{words}\ntype rsa\n"))
        self.assertIn("invalid words", secret)

    def test_errors_name_the_file_and_the_reason(self) -> None:
        directory = self.mktemp()
        os.mkdir(directory)
        missing = self.mktemp()
        binary = self.mktemp()
        Path(binary).write_bytes(b"\xff\xfe")
        os.chmod(binary, 0o600)
        for path, expected in (
            (missing, f"{missing}: No such file or directory"),
            (directory, f"{directory}: not a regular file"),
            ("", "an empty name: not a regular file"),
            (binary, f"{binary}: not a key file"),
        ):
            self.assertEqual(str(self.assertRaises(KeyFileError, read_secret, path)), expected)
        for mode in (0o604, 0o640, 0o677):
            path = self.file(SEED, mode)
            error = str(self.assertRaises(KeyFileError, read_secret, path))
            self.assertEqual(error, f"{path}: is accessible by others (mode {mode:04o}); do: chmod 600 {path}")


def read_secret_or_text(path: str) -> str:
    """Return the secret of a file, or the text of the error."""
    try:
        return read_secret(path).secret
    except IdentityError as error:
        return str(error)


class WriteTests(SynchronousTestCase):
    def test_a_written_secret_is_read_back_and_never_replaced(self) -> None:
        """Directories above the file are made, and closed to others."""
        top = self.mktemp()
        path = os.path.join(top, "deep", "twin.key")
        secret = TwinSecret(SEED, "ed25519")
        write_secret(path, secret)
        self.assertEqual(read_secret(path), secret)
        modes = [stat.S_IMODE(os.stat(one).st_mode) for one in (path, os.path.dirname(path))]
        self.assertEqual(modes, [0o600, 0o700])
        self.assertRaises(KeyFileError, write_secret, path, TwinSecret("0x" + "cd" * 32))
        self.assertEqual(read_secret(path), secret)
        write_secret(os.path.join(top, "deep", "other.key"), secret)

    def test_a_directory_that_cannot_be_made_is_an_error_in_one_line(self) -> None:
        file = self.mktemp()
        Path(file).write_text("")
        path = os.path.join(file, "twin.key")
        error = str(self.assertRaises(KeyFileError, write_secret, path, TwinSecret(SEED)))
        self.assertTrue(error.startswith(f"{path}: "), error)

    def test_the_secret_is_in_no_representation(self) -> None:
        self.assertEqual(repr(TwinSecret(SEED)), f"<TwinSecret {DEFAULT_KEY_TYPE}>")
