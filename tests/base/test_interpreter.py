"""The end of a process without the interpreter's clean-up, and the objects that garbage collection leaves out."""

from __future__ import annotations

import os
import subprocess
import sys

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.base.interpreter import GC_THRESHOLDS

ENDS = """
import atexit, sys, threading
from dmsg.base.interpreter import end_process
class Late:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print("deleted", self.name)
def tell():
    print("at exit")
    sys.stderr.write("an error")
atexit.register(tell)
kept = Late("kept")
lost = Late("lost")
lost.itself = lost
del lost
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
print("x" * 300_000)
end_process(STATUS)
print("not ended")
"""
SAY_THRESHOLDS = """
import gc, sys
from dmsg.cli import main
main.entry = lambda: print(*gc.get_threshold(), gc.get_freeze_count() > 10_000)
from dmsg.cli.entry import entry
entry()
"""

ALLOCATES = """
import ctypes
from dmsg.base.interpreter import keep_large_blocks
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd u f uordblks fordblks k".split()]
kept = keep_large_blocks()
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
before = mallinfo().hblks
large = bytearray(1 << 20)
print(kept, mallinfo().hblks - before)
"""
"""Prints whether the allocator was configured, and how many mappings of their own a large buffer takes."""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


class EndTests(SynchronousTestCase):
    def test_everything_but_the_clean_up_of_modules_is_done(self) -> None:
        for status, ended in (("None", 0), ("3", 3), ("256 + 7", 7), ("True", 1)):
            done = _run(ENDS.replace("STATUS", status))
            self.assertEqual(done.returncode, ended)
            self.assertEqual(done.stdout.splitlines(), ["x" * 300_000, "thread", "at exit", "deleted lost"])
            self.assertEqual(done.stderr, "an error")

    def test_the_interpreter_prints_a_message(self) -> None:
        done = _run(ENDS.replace("STATUS", "'a message'"))
        self.assertIn("not ended", done.stdout)

    def test_the_interpreter_reports_an_output_that_cannot_be_written(self) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", ENDS.replace("STATUS", "0").replace("300_000", "100")],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            )
        self.assertEqual(done.returncode, 120)
        self.assertIn("No space left", done.stderr)


class CollectionTests(SynchronousTestCase):
    def test_a_command_keeps_its_modules_out_of_garbage_collection(self) -> None:
        done = _run(SAY_THRESHOLDS)
        self.assertEqual(done.stdout.split(), [*map(str, GC_THRESHOLDS), "True"], done.stderr)


class AllocatorTests(SynchronousTestCase):
    def test_large_buffers_come_from_the_heap_unless_the_environment_decides(self) -> None:
        usual = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        for more, expected in (({}, "True 0"), ({"MALLOC_ARENA_MAX": "4"}, "False 1")):
            done = subprocess.run(
                [sys.executable, "-c", ALLOCATES], capture_output=True, text=True, check=False, env={**usual, **more}
            )
            if "mallinfo2" in done.stderr:
                raise SkipTest("the allocator is not that of glibc 2.33 or later")
            self.assertEqual((done.stdout.strip(), done.stderr), (expected, ""))
