"""Codes between machines, each a network namespace: ``make long WHICH=operate``."""

from __future__ import annotations

from dmsg.apps.codes.stream import MAX_WRONG_GUESSES
from dmsg.apps.codes.words import Code
from tests.testing.test_namespaces import NamespaceCase

CODE = r"code: (\d+(?:-\w+)+)"


class CodeTests(NamespaceCase):
    """A file by a few words, and a stranger on a machine of his own who guesses them."""

    hosts = ("hub", "relay1", "relay2", "alice", "bob", "stranger")

    def test_a_stranger_has_five_guesses(self) -> None:
        self.network()
        (self.lab.directory / "film").write_bytes(bytes(range(256)) * 4000)
        sending = self.dmsg("alice", "send", "film", "--no-qr")
        code = Code.parse(sending.line(CODE)[1])
        mistyped = self.dmsg("stranger", "receive", f"{code}"[:-1] + "?", "--yes", "--dir", "stolen")
        self.assertEqual(mistyped.wait(), 2, mistyped.output)
        for number in range(MAX_WRONG_GUESSES):
            wrong = str(Code.make(code.nameplate))  # The words fit the nameplate, as those of a guess have to.
            self.assertNotEqual(wrong, str(code))
            guessing = self.dmsg("stranger", "receive", wrong, "--yes", "--dir", "stolen")
            self.assertEqual(guessing.wait(), 4, (number, guessing.output))
        self.assertNotEqual(sending.wait(), 0)
        self.assertRegex(sending.output, "wrong|guess")
        self.assertFalse((self.lab.directory / "stolen" / "film").exists())
        # The right words no longer work, either.
        late = self.dmsg("bob", "receive", str(code), "--yes", "--dir", "inbox")
        self.assertIn(late.wait(), (3, 4))
        again = self.dmsg("alice", "send", "film", "--no-qr")
        taking = self.dmsg("bob", "receive", again.line(CODE)[1], "--yes", "--dir", "inbox")
        self.assertEqual(taking.wait(), 0, taking.output)
        self.assertEqual(again.wait(), 0, again.output)
        self.assertEqual((self.lab.directory / "inbox" / "film").read_bytes(), bytes(range(256)) * 4000)
