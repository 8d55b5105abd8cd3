"""Codes between machines, each a network namespace: ``make operate-long``."""

from __future__ import annotations

from tests.testing.test_namespaces import NamespaceCase


class CodeTests(NamespaceCase):
    """A file by a few words, and a stranger on a machine of his own who guesses them."""

    hosts = ("hub", "relay1", "relay2", "alice", "bob", "stranger")

    def test_a_stranger_has_one_guess(self) -> None:
        self.network()
        (self.lab.directory / "film").write_bytes(bytes(range(256)) * 4000)
        sending = self.dmsg("alice", "send", "film", "--no-qr")
        code = sending.line(r"code: (\d+)-(\w+)-(\w+)")
        wrong = "zoo" if code[2] != "zoo" else "zone"
        guessing = self.dmsg("stranger", "receive", f"{code[1]}-{wrong}-{code[3]}", "--yes", "--dir", "stolen")
        self.assertEqual(guessing.wait(), 4, guessing.output)
        self.assertNotEqual(sending.wait(), 0)
        self.assertRegex(sending.output, "wrong|guess")
        self.assertFalse((self.lab.directory / "stolen" / "film").exists())
        # the right words are of no use any more either
        late = self.dmsg("bob", "receive", "-".join(code.groups()), "--yes", "--dir", "inbox")
        self.assertIn(late.wait(), (3, 4))
        again = self.dmsg("alice", "send", "film", "--no-qr")
        code = again.line(r"code: (\d+-\w+-\w+)")
        taking = self.dmsg("bob", "receive", code[1], "--yes", "--dir", "inbox")
        self.assertEqual(taking.wait(), 0, taking.output)
        self.assertEqual(again.wait(), 0, again.output)
        self.assertEqual((self.lab.directory / "inbox" / "film").read_bytes(), bytes(range(256)) * 4000)
