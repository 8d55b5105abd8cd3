"""Supervised entities: which code their processes run."""

from __future__ import annotations

from pathlib import Path

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from dmsg.cli.network.supervisor import start_entity
from tests.support import asynchronous


class WorkingDirectoryTests(TestCase):
    """A real process in a directory where another user may write, as in ``/tmp``."""

    @asynchronous
    async def test_a_module_in_the_working_directory_is_not_imported(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        (directory / "ctypes.py").write_text("print('planted', flush=True)\nraise SystemExit(3)\n")
        lines: list[str] = []
        child = start_entity(reactor, ["dmsg-server", "--no-such-option"], directory, lines.append)
        self.assertNotEqual(await child.ended, 3)
        self.assertNotIn("planted", lines)
        self.assertIn("no-such-option", "".join(lines))
