"""Files of events and uploads after power cuts between any two of the system calls that wrote them."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.testing.traced_files import Call, Files, in_hex, is_available, power_cuts, record
from tests.testing.writing_files import PROGRAMS

SEEDS = range(int(os.environ.get("POWER_CUTS", "4")))
"""Seeds of the power cuts after each system call."""


class FilesTests(SynchronousTestCase):
    """Recorded calls, by plain calls."""

    def left(self, *calls: Call) -> set[tuple[tuple[str, bytes], ...]]:
        found = set()
        for seed in range(40):
            files = Files("/d")
            for call in calls:
                files.repeat(call)
            directory = Path(self.mktemp())
            directory.mkdir()
            files.cut_power(Random(seed), directory)
            found.add(tuple(sorted((path.name, path.read_bytes()) for path in directory.iterdir())))
        return found

    def test_a_rename_without_a_sync_may_leave_an_empty_file(self) -> None:
        def text(value: str) -> str:
            return f'"{in_hex(value)}"'

        written = (
            Call("openat", f"AT_FDCWD, {text('/d/a')}, O_WRONLY|O_CREAT, 0666", 3),
            Call("write", f"3, {text('xy')}, 2", 2),
        )
        renamed = (
            Call("rename", f"{text('/d/a')}, {text('/d/b')}", 0),
            Call("openat", f"AT_FDCWD, {text('/d')}, O_RDONLY", 4),
            Call("fsync", "4", 0),
        )
        contents = (b"", b"xy", b"\0\0")
        self.assertEqual({(("b", content),) for content in contents}, self.left(*written, *renamed))
        self.assertEqual({(("b", b"xy"),)}, self.left(*written, Call("fsync", "3", 0), *renamed))
        self.assertIn((), self.left(*written, Call("fsync", "3", 0), renamed[0]))


class PowerCutTests(SynchronousTestCase):
    """Programs of the product, recorded by strace."""

    def check(self, name: str) -> None:
        if not is_available():
            raise SkipTest("strace is not here, or may not trace programs")
        root, left = Path(self.mktemp()).resolve(), Path(self.mktemp())
        root.mkdir()
        calls = record("tests.testing.writing_files", name, str(root))
        cuts = 0
        for done in power_cuts(calls, str(root), left, SEEDS):
            self.assertIsNone(PROGRAMS[name][1](left, done))
            cuts += 1
        self.assertGreater(cuts, 20)
        self.assertEqual(2, len(done))

    def test_sealed_files_of_events_are_complete(self) -> None:
        self.check("spool")

    def test_a_collector_loses_no_file_that_it_has_confirmed(self) -> None:
        self.check("collector")

    def test_a_peer_loses_no_upload_that_it_has_answered(self) -> None:
        self.check("upload")
