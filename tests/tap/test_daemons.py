"""Entities as daemons, as twistd makes them without ``--nodaemon``: real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import TestCase

from tests.support import asynchronous


class DaemonTests(TestCase):
    """A start that fails reports its error to the waiting program, and frees the terminal."""

    async def twistd(self, *arguments: str) -> tuple[str, int]:
        running: Deferred[tuple[bytes, bytes, int]] = getProcessOutputAndValue(
            sys.executable,
            ["-c", "from twisted.scripts.twistd import run; run()", "--logfile=log", "--pidfile=pid", *arguments],
            env=dict(os.environ),
            path=str(self.directory),
        )
        out, err, status = await running.addTimeout(30, reactor)
        return (out + err).decode(), status

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()

    async def fails(self, why: str, *arguments: str) -> None:
        said, status = await self.twistd(*arguments)
        self.assertEqual(status, 1, said)
        self.assertIn(why, said)
        await self.gone()

    async def gone(self) -> None:
        """The file of its process is; the daemon itself may take a moment longer than who waits for it."""
        for _ in range(600):
            if not (self.directory / "pid").exists():
                return
            await deferLater(reactor, 0.05)
        self.fail("the file of its process stays")

    @asynchronous
    async def test_a_port_in_use(self) -> None:
        taken = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory())
        self.addCleanup(taken.stopListening)
        listen = f"--listen=tcp:{taken.getHost().port}:interface=127.0.0.1"
        await self.fails("listen on", "dmsg-discovery", "--store=memory:", listen)
        await self.fails("listen on", "dmsg-server", "--key-file=key", "--create", listen)

    @asynchronous
    async def test_a_store_that_cannot_be_opened_fails_the_start(self) -> None:
        listen = "--listen=tcp:0:interface=127.0.0.1"
        await self.fails("unable to open", "dmsg-discovery", "--store=sqlite:/nodir/x", listen)

    @asynchronous
    async def test_a_removed_working_directory_is_named(self) -> None:
        code = (
            "import os; from twisted.scripts.twistd import run\n"
            "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); run()"
        )
        out, err, status = await getProcessOutputAndValue(
            sys.executable,
            ["-P", "-c", code, "-n", "dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1"],
            env=dict(os.environ),
            path=str(self.directory),
        )
        self.assertEqual((status, err), (1, b""))
        self.assertIn(b"the working directory has been removed", out.splitlines()[-1])

    @asynchronous
    async def test_an_empty_pid_file_stops_no_start(self) -> None:
        """A full disk or a power failure leaves such a file. A file with other contents is not removed."""
        (self.directory / "pid").touch()
        said, status = await self.twistd("dmsg-discovery", "--store=memory:", "--listen=tcp:0:interface=127.0.0.1")
        self.addCleanup(os.kill, int((self.directory / "pid").read_text()), signal.SIGKILL)
        self.assertEqual(status, 0, said)
        self.assertIn("removed an empty pid file", said)
        (self.directory / "pid").rename(self.directory / "of-the-daemon")
        (self.directory / "pid").write_text("?")
        said, status = await self.twistd("dmsg-discovery", "--store=memory:", "--listen=tcp:0:interface=127.0.0.1")
        self.assertEqual(status, 1, said)
        self.assertEqual((self.directory / "pid").read_text(), "?")

    @asynchronous
    async def test_hangup_ends_no_entity(self) -> None:
        """Programs that rotate logs send SIGHUP to all entities."""
        said, status = await self.twistd("dmsg-discovery", "--store=memory:", "--listen=tcp:0:interface=127.0.0.1")
        self.assertEqual(status, 0, said)
        pid = int((self.directory / "pid").read_text())
        log = self.directory / "log"
        try:
            for wanted in ("listens on", "SIGHUP: this program has nothing to reload"):
                for _ in range(600):
                    if log.exists() and wanted in log.read_text():
                        break
                    await deferLater(reactor, 0.05)
                else:
                    self.fail(f"{wanted} is not in {log.read_text()}")
                os.kill(pid, signal.SIGHUP)
        finally:
            os.kill(pid, signal.SIGTERM)
        await self.gone()

    async def logged(self, wanted: str, name: str = "log") -> str:
        """The log, when ``wanted`` is in it."""
        log = self.directory / name
        for _ in range(600):
            if log.exists() and wanted in log.read_text():
                return log.read_text()
            await deferLater(reactor, 0.05)
        raise self.failureException(f"{wanted} is not in {log}")

    @asynchronous
    async def test_rotated_logs_are_reopened(self) -> None:
        """Renamed, and a signal sent, as logrotate does it; text and JSON, either signal."""
        self.addCleanup(os.umask, os.umask(0o022))
        for form, number in (("text", signal.SIGUSR1), ("json", signal.SIGHUP)):
            options = ("--store=memory:", "--listen=tcp:0:interface=127.0.0.1", f"--log-format={form}")
            said, status = await self.twistd("dmsg-discovery", *options)
            self.assertEqual(status, 0, said)
            pid = int((self.directory / "pid").read_text())
            try:
                await self.logged("listens on")
                (self.directory / "log").rename(self.directory / "log.old")
                os.kill(pid, number)
                fresh = await self.logged("the log file was reopened")
                self.assertEqual(fresh.startswith("{"), form == "json")
                # A log contains the addresses and keys of clients.
                modes = {path.name: path.stat().st_mode & 0o777 for path in self.directory.glob("log*")}
                self.assertEqual(modes, {"log": 0o640, "log.old": 0o640})
            finally:
                os.kill(pid, signal.SIGTERM)
            await self.gone()
            last = await self.logged("Server Shut Down")
            self.assertNotIn("Server Shut Down", (self.directory / "log.old").read_text(), last)
            # Without this package's code, twistd would have renamed the new log.
            self.assertEqual(sorted(path.name for path in self.directory.glob("log*")), ["log", "log.old"])
            (self.directory / "log").unlink()

    @asynchronous
    async def test_a_log_that_cannot_be_opened_anew(self) -> None:
        """The log continues in the old file: an entity without a log could not report the error."""
        said, status = await self.twistd("dmsg-discovery", "--store=memory:", "--listen=tcp:0:interface=127.0.0.1")
        self.assertEqual(status, 0, said)
        pid = int((self.directory / "pid").read_text())
        try:
            await self.logged("listens on")
            (self.directory / "log").rename(self.directory / "log.old")
            (self.directory / "log").mkdir()
            os.kill(pid, signal.SIGUSR1)
            await self.logged("cannot be reopened", "log.old")
        finally:
            os.kill(pid, signal.SIGTERM)
        await self.gone()
