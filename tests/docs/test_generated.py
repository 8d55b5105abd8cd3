"""Texts that are made from the code and stored in files are current."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.v2019.core.state import TRANSITIONS, Input, State
from tests.docs import message_catalogue, state_drawings


class DrawingTests(SynchronousTestCase):
    """Tests of the drawings of states and of handshake messages."""

    def test_each_is_current(self) -> None:
        for module, make in state_drawings.DRAWINGS.items():
            text = state_drawings.path_of(module).read_text()
            current = state_drawings.with_drawing(text, make()) == text and make() in text
            self.assertTrue(current, f"{module.__name__}: say: python -m tests.docs.state_drawings")

    def test_a_table_that_changes_changes_its_drawing(self) -> None:
        other = {**TRANSITIONS, (State.OPEN, Input.RECV_CLOSE): State.ANSWERED}
        self.assertIn("OPEN      -- receive CLOSE -------> ANSWERED\n", state_drawings.drawing(other))


class CatalogueTests(SynchronousTestCase):
    """Tests of the catalogue of messages."""

    def rows(self) -> list[tuple[str, str]]:
        """Return message and kind of each row of the stored page, which the first test holds equal to the code."""
        lines = message_catalogue.PAGE.read_text().splitlines()
        cells = [line[2:-2].rpartition(" | ") for line in lines if line.startswith("| ")]
        return [(text, kind) for text, _, kind in cells]

    def test_the_message_catalogue_is_current(self) -> None:
        current = message_catalogue.PAGE.read_text() == message_catalogue.page()
        self.assertTrue(current, "say: python -m tests.docs.message_catalogue")

    def test_the_catalogue_covers_errors_logs_and_output(self) -> None:
        kinds = {kind for _, kind in self.rows()}
        self.assertLessEqual({"DmsgError", "UsageError", "info", "warn", "failure", "shown"}, kinds)

    def test_only_one_message_says_that_a_server_is_registered(self) -> None:
        """People and programs wait for these words, so a line about a failure must not contain them."""
        found = [row for row in self.rows() if "registered in discovery" in row[0]]
        self.assertEqual([kind for _, kind in found], ["info"], found)
