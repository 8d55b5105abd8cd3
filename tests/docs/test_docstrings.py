"""Docstrings say their subject."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.docs.docstrings import Docstring, docstrings

MOST = 0.01
"""Part of the docstrings that may begin with a preposition or a pronoun, where the sentence is clear all the same."""


class DocstringTests(SynchronousTestCase):
    """Tests of all docstrings of the product."""

    def test_nearly_all_say_their_subject(self) -> None:
        every = list(docstrings())
        riddles = [one for one in every if not one.says_its_subject]
        shown = "\n".join(f"{one.place}: {one.text.splitlines()[0]}" for one in riddles[:20])
        self.assertLess(len(riddles) / len(every), MOST, f"{len(riddles)} of {len(every)}:\n{shown}")

    def test_docstrings_with_a_subject_pass(self) -> None:
        for text in (
            "Token bucket that limits requests.",
            "Whether the link is up.",
            "Return the key.",
            "Item of a list.",
        ):
            self.assertTrue(Docstring("", text).says_its_subject, text)
        for text in ("Of one client.", "It is over.", "What was sent.", "Those of one key.", "With a key."):
            self.assertFalse(Docstring("", text).says_its_subject, text)
