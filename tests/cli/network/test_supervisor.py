"""Supervised entities: which code their processes run."""

from __future__ import annotations

from pathlib import Path

from twisted.internet import reactor
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.cli.network.supervisor import start_entity, without_head
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


class LogTests(SynchronousTestCase):
    """Lines of an entity's log, as a person sees them."""

    def test_addresses_are_host_and_port(self) -> None:
        for shown, line in (
            ("127.0.0.1:80", "IPv4Address(type='TCP', host='127.0.0.1', port=80)"),
            ("[::]:80", "IPv6Address(type='TCP', host='::', port=80, flowInfo=0, scopeID=0)"),
        ):
            line = f"2026-11-26T00:00:00+0000 [dmsg.net#info] discovery listens on {line}"
            self.assertEqual(without_head(line), f"discovery listens on {shown}")
