"""Supervised entities: which code their processes run, and when."""

from __future__ import annotations

from pathlib import Path

from twisted.internet import reactor
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.cli.network import supervisor
from dmsg.cli.network.supervisor import CannotStart, Supervised, load_entity, run_entity, without_head
from tests.support import asynchronous


class WorkingDirectoryTests(TestCase):
    """A real process in a directory where another user may write, as in ``/tmp``."""

    @asynchronous
    async def test_a_module_in_the_working_directory_is_not_imported(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        (directory / "ctypes.py").write_text("print('planted', flush=True)\nraise SystemExit(3)\n")
        lines: list[str] = []
        child = load_entity(reactor, ["dmsg-server", "--no-such-option"], directory, lines.append)
        run_entity(child)
        self.assertNotEqual(await child.ended, 3)
        self.assertNotIn("planted", lines)
        self.assertIn("no-such-option", "".join(lines))


class LoadingTests(TestCase):
    """A real process that has its modules before it is needed."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.lines: list[str] = []

    @asynchronous
    async def test_an_entity_that_is_not_started_does_nothing(self) -> None:
        child = load_entity(reactor, ["dmsg-server", "--no-such-option"], self.directory, self.lines.append)
        assert child.transport is not None
        child.transport.closeStdin()
        self.assertEqual(await child.ended, 0, "its parent is gone")
        self.assertEqual(self.lines, [])

    @asynchronous
    async def test_an_entity_that_ended_before_its_start_is_an_error_at_once(self) -> None:
        self.patch(supervisor, "MODULES", {"dmsg-server": "dmsg.tap.no_such_module"})
        arguments = ["dmsg-server", "--listen=tcp:0"]
        entity = Supervised(
            reactor, "server", arguments, "ready", directory=self.directory, log=self.lines.append, notice=self.fail
        )
        await entity.load().ended
        error = await self.assertFailure(entity.start(), CannotStart)
        self.assertIn("no_such_module", str(error))


class LogTests(SynchronousTestCase):
    """Lines of an entity's log, as a person sees them."""

    def test_a_plugin_cache_that_cannot_be_written_is_no_line(self) -> None:
        lines: list[str] = []
        entity = Supervised(
            reactor, "server", ["dmsg-server"], "ready", directory=Path(), log=lines.append, notice=self.fail
        )
        cache = "Unable to write to plugin cache /opt/dmsg/twisted/plugins/dropin.cache: error number 13"
        for line in (f"2026-11-26T00:00:00+0000 [-] {cache}", f"2026-11-26T00:00:00+0000 [-] 1.0.0.9 said: {cache}"):
            entity._log(line)
        self.assertEqual(lines, [f"2026-11-26T00:00:00+0000 [-] 1.0.0.9 said: {cache}"])

    def test_addresses_are_host_and_port(self) -> None:
        for shown, line in (
            ("127.0.0.1:80", "IPv4Address(type='TCP', host='127.0.0.1', port=80)"),
            ("[::]:80", "IPv6Address(type='TCP', host='::', port=80, flowInfo=0, scopeID=0)"),
        ):
            line = f"2026-11-26T00:00:00+0000 [dmsg.net#info] discovery listens on {line}"
            self.assertEqual(without_head(line), f"discovery listens on {shown}")
