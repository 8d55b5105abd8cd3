"""The error message names the full disk, whichever program notices it."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import full_disk
from dmsg.analytics.full_disk import explain_full_disk, is_of_full_disk, temporary_directories


class OfJava(Exception):
    """An exception of Spark, which keeps Java's words in attributes."""

    def __init__(self, text: str, trace: str, cause: OfJava | None = None) -> None:
        super().__init__(text)
        self._stackTrace = trace
        self._cause = cause


class CauseTests(SynchronousTestCase):
    """Error texts of the programs, recorded on a full disk."""

    def test_who_says_so(self) -> None:
        for error in (
            OSError(errno.ENOSPC, "No space left on device"),
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            sqlite3.OperationalError("database or disk is full"),
            ValueError(
                "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)"
            ),
            ValueError("Error writing bytes to file. Detail: [errno 28] No space left on device"),
            OfJava(
                "[TASK_WRITE_FAILED] Task failed while writing rows to file:/t.",
                "java.io.IOException: No space left on device",
            ),
            OfJava("Job aborted", "", OfJava("[TASK_WRITE_FAILED]", "", OfJava("No space left on device", ""))),
        ):
            self.assertTrue(is_of_full_disk(error), error)
        outer = RuntimeError("a run failed")
        outer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
        self.assertTrue(is_of_full_disk(outer))
        outer.__cause__.__cause__ = outer
        for other in (OSError(errno.EACCES, "Permission denied"), OfJava("[TASK_WRITE_FAILED]", "at java.lang.Thread")):
            self.assertFalse(is_of_full_disk(other), other)

    def test_what_is_full_is_named(self) -> None:
        root = Path(self.mktemp()).absolute()
        (root / "temporary").mkdir(parents=True)
        free = {root: 1000, root / "temporary": 50 << 20}
        self.patch(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path], total=100 << 20))
        out = root / "tables" / "are not there yet"
        text = explain_full_disk([out], [root / "temporary"])
        self.assertEqual(
            text,
            f"no room is left on the disk of {out} (1 kB of 105 MB free now): make room and repeat the command; "
            "the tables are as the last finished run left them",
        )
        free[root], free[root / "temporary"] = 50 << 20, 0
        text = explain_full_disk([out], [root / "temporary"])
        self.assertIn(f"disk of {root / 'temporary'} (0 B of", text)
        self.assertIn("--conf spark.local.dir=DIR moves", text)
        # What filled the disk is gone already.
        free[root / "temporary"] = 50 << 20
        self.assertIn(
            f"or in a quota: {out} or {root / 'temporary'}: make", explain_full_disk([out], [root / "temporary"])
        )

    def test_temporary_directories(self) -> None:
        self.patch(full_disk, "os", SimpleNamespace(environ={"SPARK_LOCAL_DIRS": "/a,/b"}))
        self.assertEqual(temporary_directories(), [Path("/a"), Path("/b")])
