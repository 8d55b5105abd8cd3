"""A forked program is like one that is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import SkipTest, TestCase

from tests import forking
from tests.support import asynchronous

TELL = """
import json, os, random, stat, sys
told = {
    "arguments": sys.argv, "directory": os.getcwd(), "parent": os.getppid(), "group": os.getpgid(0),
    "environment": dict(os.environ), "input": sys.stdin.read(), "path": sys.path,
    "kinds": [stat.S_IFMT(os.fstat(one).st_mode) for one in range(3)],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "buffered": [(one.line_buffering, one.write_through) for one in (sys.stdout, sys.stderr)],
    "encodings": [(one.encoding, one.errors) for one in (sys.stdin, sys.stdout, sys.stderr)],
    "reactor": "twisted.internet.reactor" in sys.modules, "name": __name__,
}
random = random.random()
print(json.dumps([told, random]))
sys.exit(3)
"""

SIGNALS = """
import json, signal
def name(handler):
    return getattr(handler, "__name__", repr(handler).partition(":")[0].strip("<"))
print(json.dumps({one.name: name(signal.getsignal(one)) for one in signal.Signals}))
"""

STARTS = """
import json, os, pathlib, subprocess, sys
command = [sys.executable, "-P", "-m", "dmsg.cli.network.entity_process", str(os.getpid()), "dmsg.tap.server"]
program = subprocess.Popen(command, stdin=subprocess.PIPE)  # It waits for its input.
process = pathlib.Path("/proc", str(program.pid))
is_forked = "forking.py" in (process / "cmdline").read_text()
parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
program.communicate()
print(json.dumps([is_forked, parent == os.getpid(), program.returncode]))
"""

AT_TERMINAL = """
import os, sys, time
streams = sys.stdin, sys.stdout, sys.stderr
with open("/dev/tty") as own:
    print(os.getsid(0) == os.getpid(), os.tcgetpgrp(0) == os.getpid(), own.isatty(), [one.isatty() for one in streams])
print([one.line_buffering for one in streams])
print("ready")
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""

RUN = """
import signal, subprocess, sys
from twisted.trial.unittest import SynchronousTestCase
from tests import forking
class Tests(SynchronousTestCase):
    def test_child(self):
        is_forked = forking._inherited is not None
        self.assertEqual(is_forked, "workertrial" in sys.argv[0])
        code = "import signal; print(signal.getsignal(signal.SIGINT))"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        self.assertIn("default_int_handler", said)
"""

ENDS = """
import atexit, sys, threading
class Late:
    def __del__(self):
        print("deleted")
def tell():
    print("at exit")
    sys.stderr.write("an error")
atexit.register(tell)
late = Late()
late.itself = late
del late
threading.Thread(target=lambda: (threading.main_thread().join(), sys.stdout.write("thread\\n"))).start()
sys.stdout.write("x" * 300_000 + "\\n")
sys.exit({status})
"""


class _Program(ProcessProtocol):
    def __init__(self) -> None:
        self.out = b""
        self.err = b""
        self.ended: Deferred[Any] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self.out += data

    def errReceived(self, data: bytes) -> None:
        self.err += data

    def processEnded(self, reason: Any) -> None:
        self.ended.callback(reason.value)


class ForkingTests(TestCase):
    """Programs that ``reactor.spawnProcess`` forks, beside those that it starts."""

    def setUp(self) -> None:
        if not sys.platform.startswith("linux") or os.environ.get(forking.VARIABLE) == "0":
            raise SkipTest("programs are started as usual here")
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.forks = 0
        fork = forking._fork

        def count(*arguments: Any) -> int | None:
            self.forks += 1
            return fork(*arguments)

        self.patch(forking, "_fork", count)

    def start(
        self,
        code: str,
        *arguments: str,
        forked: bool = True,
        options: tuple[str, ...] = (),
        is_at_terminal: bool = False,
        **environment: str,
    ) -> _Program:
        self.patch(forking, "CODES", (code,) if forked else ())
        program = _Program()
        argv = [sys.executable, *options, "-c", code, *arguments]
        environment = {**os.environ, **environment}
        run: Any = reactor.spawnProcess
        run(program, sys.executable, argv, env=environment, path=str(self.directory), usePTY=is_at_terminal)
        return program

    @staticmethod
    def is_ready(program: _Program) -> bool:
        return b"ready" in program.out or program.ended.called

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await deferLater(reactor, 0.01)

    @asynchronous
    async def test_a_forked_process_sees_the_same_state(self) -> None:
        for options in ((), ("-P",)):
            told, drawn = [], []
            for forked in (True, True, False):
                program = self.start(TELL, "a", "--b", forked=forked, options=options, DMSG_X="1")
                program.transport.write(b"some input")  # type: ignore[union-attr]
                program.transport.closeStdin()  # type: ignore[union-attr]
                ended = await program.ended
                self.assertEqual((ended.exitCode, program.err), (3, b""))
                said, number = json.loads(program.out)
                told.append(said)
                drawn.append(number)
            self.assertEqual(told[0], told[2])
            self.assertEqual(told[1], told[2])
            self.assertEqual(told[0]["parent"], os.getpid())
            self.assertEqual("" in told[0]["path"], not options)
            self.assertEqual(len(set(drawn)), 3, "forked programs must not draw the same numbers")
        self.assertEqual(self.forks, 4)

    def test_subprocess_forks_programs_too(self) -> None:
        every: tuple[dict[str, Any], ...] = ({}, {"stderr": subprocess.STDOUT}, {"start_new_session": True})
        for options in every:
            told = []
            for forked in (True, False):
                self.patch(forking, "CODES", (TELL,) if forked else ())
                command = [sys.executable, "-c", TELL, "a"]
                done = subprocess.run(command, input=b"x", stdout=subprocess.PIPE, cwd=self.directory, **options)
                self.assertEqual(done.returncode, 3)
                told.append(json.loads(done.stdout)[0])
            self.assertEqual(len({one.pop("group") == os.getpgid(0) for one in told}), 1)
            self.assertEqual(*told)
        self.assertEqual(self.forks, 3)

    @asynchronous
    async def test_a_command_that_starts_programs_forks_them(self) -> None:
        command = self.start(STARTS, "up")
        self.assertEqual((await command.ended).exitCode, 0, command.err)
        self.assertEqual(json.loads(command.out), [True, True, 0])

    @asynchronous
    async def test_a_program_at_a_terminal(self) -> None:
        """It has the terminal for itself, and Ctrl-C reaches it."""
        said = []
        for forked in (True, False):
            program = self.start(AT_TERMINAL, forked=forked, is_at_terminal=True)
            await self.until(partial(self.is_ready, program))
            program.transport.write(b"\x03")  # type: ignore[union-attr]
            self.assertEqual((await program.ended).exitCode, 7)
            said.append(program.out)
        self.assertEqual(*said)
        self.assertEqual(self.forks, 1)
        self.assertIn(b"True True True [True, True, True]", said[0])

    @asynchronous
    async def test_signals_that_a_run_ignores_are_not_ignored_by_its_programs(self) -> None:
        """Below nohup, a run ignores SIGHUP; in the background of a script, SIGINT, too."""
        for number in (signal.SIGHUP, signal.SIGINT):
            self.addCleanup(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        # The server of the run was started before this test ignored the signals.
        self.patch(forking, "_inherited", None)
        bare = mock.patch.dict(os.environ, {forking.VARIABLE: forking.BARE})
        bare.start()
        self.addCleanup(bare.stop)
        server = forking.ForkServer()
        # The server ends with its connection; it must not be a child of this process after the test.
        self.addCleanup(lambda: (server._connection.close(), server._process.wait()))
        self.patch(forking, "fork_server", lambda: server)
        told = []
        for forked in (True, False):
            program = self.start(SIGNALS, forked=forked)
            self.assertEqual(((await program.ended).exitCode, program.err), (0, b""))
            told.append(json.loads(program.out))
        self.assertEqual(*told)
        self.assertEqual(told[0]["SIGHUP"], "Handlers.SIG_DFL")
        self.assertIn("default_int_handler", told[0]["SIGINT"])

    def test_a_run_that_ignores_ctrl_c_does_not_pass_that_on(self) -> None:
        """In the background of a script, a run ignores SIGINT, but its tests interrupt programs."""
        (self.directory / "ctrl_c.py").write_text(RUN)
        path = os.pathsep.join([str(self.directory), str(Path(forking.__file__).parents[1])])
        # Workers are not forked if they are measured.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
        for workers in ((), ("--jobs=1",)):
            done = subprocess.run(
                [sys.executable, "-m", "tests.run", *workers, "ctrl_c"],
                cwd=self.directory,
                env=environment | {"PYTHONPATH": path, forking.VARIABLE: forking.BARE},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
                capture_output=True,
                text=True,
            )
            self.assertIn("PASSED (successes=1)", done.stdout, done.stdout + done.stderr)

    @asynchronous
    async def test_a_forked_program_ends_like_a_started_one(self) -> None:
        for status, expected in (("None", 0), ("7", 7), ("258", 2), ("True", 1), ("'no'", 1)):
            ends = []
            for forked in (True, False):
                program = self.start(ENDS.format(status=status), forked=forked)
                ended = await program.ended
                self.assertEqual(ended.exitCode, expected)
                ends.append((program.out, program.err))
            self.assertEqual(*ends)
            self.assertTrue(ends[0][0].endswith(b"x\nthread\nat exit\ndeleted\n"))

    @asynchronous
    async def test_output_that_cannot_be_written(self) -> None:
        for forked in (True, False):
            program = self.start("import sys; sys.stdout = open('/dev/full', 'w'); print('lost')", forked=forked)
            self.assertEqual((await program.ended).exitCode, 120)
            self.assertIn(b"No space left", program.err)

    @asynchronous
    async def test_signals_and_errors(self) -> None:
        waiting = self.start("print('here', flush=True); import time; time.sleep(60)")
        await self.until(lambda: waiting.out)
        waiting.transport.signalProcess("TERM")  # type: ignore[union-attr]
        self.assertEqual((await waiting.ended).signal, 15)
        failed = self.start("1 / 0")
        self.assertEqual((await failed.ended).exitCode, 1)
        self.assertIn(b"ZeroDivisionError", failed.err)

    def test_another_interpreter_is_started(self) -> None:
        given = {0: 0, 1: 1, 2: 2}
        server, program = forking.fork_server(), forking.Program("pass", [])
        self.assertIsNone(server.fork(program, {**os.environ, "PYTHONUTF8": "1"}, ".", given))
        self.assertIsNone(server.fork(program, dict(os.environ), ".", {1: 1}))
