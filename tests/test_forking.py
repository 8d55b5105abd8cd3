"""A forked program is like one that is started."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
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
threading.Thread(target=lambda: (threading.Event().wait(0.05), sys.stdout.write("thread\\n"))).start()
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
        if not sys.platform.startswith("linux") or os.environ.get("DMSG_TESTS_FORK") == "0":
            raise SkipTest("programs are started as usual here")
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()

    def start(self, code: str, *arguments: str, forked: bool = True, **environment: str) -> _Program:
        self.patch(forking, "CODES", (code,) if forked else ())
        program = _Program()
        argv = [sys.executable, "-c", code, *arguments]
        run: Any = reactor.spawnProcess
        run(program, sys.executable, argv, env={**os.environ, **environment}, path=str(self.directory))
        return program

    @asynchronous
    async def test_a_forked_process_sees_the_same_state(self) -> None:
        told, drawn = [], []
        for forked in (True, True, False):
            program = self.start(TELL, "a", "--b", forked=forked, DMSG_X="1")
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
        self.assertEqual(len(set(drawn)), 3, "forked programs must not draw the same numbers")

    @asynchronous
    async def test_signals_that_a_run_ignores_are_not_ignored_by_its_programs(self) -> None:
        """Below nohup, a run ignores SIGHUP; in the background of a script, SIGINT, too."""
        for number in (signal.SIGHUP, signal.SIGINT):
            self.addCleanup(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        # The server of the run was started before this test ignored the signals.
        self.patch(forking, "_inherited", None)
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
        while not waiting.out:
            looked: Deferred[None] = Deferred()
            reactor.callLater(0.01, looked.callback, None)
            await looked
        waiting.transport.signalProcess("TERM")  # type: ignore[union-attr]
        self.assertEqual((await waiting.ended).signal, 15)
        failed = self.start("1 / 0")
        self.assertEqual((await failed.ended).exitCode, 1)
        self.assertIn(b"ZeroDivisionError", failed.err)

    def test_another_interpreter_is_started(self) -> None:
        given = {0: 0, 1: 1, 2: 2}
        server = forking.fork_server()
        self.assertIsNone(server.fork(["pass"], {**os.environ, "PYTHONUTF8": "1"}, ".", given))
        self.assertIsNone(server.fork(["pass"], dict(os.environ), ".", {1: 1}))
