"""What is made from the code and stands in a file is current."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.v2019.core.state import TRANSITIONS, Input, State
from tests.docs import message_catalogue, state_drawings


class DrawingTests(SynchronousTestCase):
    """Drawings of states."""

    def test_each_is_current(self) -> None:
        for module in state_drawings.MODULES:
            text = Path(module.__file__).read_text()
            self.assertIn(state_drawings.drawing(module.TRANSITIONS), text, module.__name__)

    def test_a_table_that_changes_changes_its_drawing(self) -> None:
        other = {**TRANSITIONS, (State.OPEN, Input.RECV_CLOSE): State.ANSWERED}
        self.assertIn("OPEN      -- receive CLOSE -------> ANSWERED\n", state_drawings.drawing(other))


class CatalogueTests(SynchronousTestCase):
    """The catalogue of messages."""

    def test_it_is_current(self) -> None:
        current = message_catalogue.PAGE.read_text() == message_catalogue.page()
        self.assertTrue(current, "say: python -m tests.docs.message_catalogue")

    def test_it_has_errors_log_lines_and_what_commands_print(self) -> None:
        kinds = {message.kind for message in message_catalogue.messages()}
        self.assertLessEqual({"DmsgError", "UsageError", "info", "warn", "failure", "shown"}, kinds)
