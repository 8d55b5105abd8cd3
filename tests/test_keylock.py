"""Whether a program holds the lock of a key file. Locks of programs that have ended do not count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.filelock import LOCK_SUFFIX
from dmsg.keylock import hold_key, is_held

HOLDER = "import sys; from dmsg.keylock import hold_key; hold_key(sys.argv[1], 'other'); print(flush=True); input()"


class HeldTests(SynchronousTestCase):
    """A lock as other programs see it."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp()).absolute()
        self.path.parent.mkdir(exist_ok=True)
        self.lock_file = Path(f"{self.path}{LOCK_SUFFIX}")

    def holder(self) -> subprocess.Popen[bytes]:
        """Start a program that holds the lock, and wait until it does."""
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(self.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.addCleanup(holder.communicate)
        self.addCleanup(holder.kill)
        assert holder.stdout is not None
        holder.stdout.readline()
        return holder

    def test_a_lock_is_held_until_it_is_released(self) -> None:
        self.assertFalse(is_held(self.path))
        self.assertFalse(self.lock_file.exists(), "to ask creates nothing")
        lock = hold_key(self.path, "this")
        self.assertTrue(is_held(self.path))
        lock.release()
        self.assertFalse(is_held(self.path))

    def test_the_lock_of_a_killed_program_is_not_held(self) -> None:
        holder = self.holder()
        self.assertTrue(is_held(self.path))
        holder.kill()
        holder.wait()
        self.assertTrue(self.lock_file.exists())
        self.assertFalse(is_held(self.path))
        hold_key(self.path, "this").release()

    def test_a_replaced_lock_file_is_looked_at_again(self) -> None:
        """The file that was opened may be that of an earlier program, which removed it."""
        self.lock_file.touch()
        opened = os.open

        def replaced(path: str, flags: int) -> int:
            self.patch(os, "open", opened)
            descriptor = opened(path, flags)
            self.lock_file.unlink()
            self.holder()
            return descriptor

        self.patch(os, "open", replaced)
        self.assertTrue(is_held(self.path))
