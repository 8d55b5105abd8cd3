"""Tests of the pipeline on an object store: events, receipts and tables in S3 (``make long WHICH=s3``)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
from twisted.trial.unittest import SkipTest

from dmsg.analytics.schemas import GOLD
from dmsg.analytics.store import Store
from dmsg.analytics.table_queries import rows_of
from tests.analytics.long_runs import DMSG, TIMEOUT, ProcessCase, analytics, simulate

PACKAGE = "org.apache.hadoop:hadoop-aws:3.5.0"
"""Spark's file system for S3, of the release of Hadoop that this release of Spark contains."""
BUCKET = "dmsg"
OUT = f"s3a://{BUCKET}/tables"
MOTO = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"


ELSEWHERE = """
set -e
hidden=$1 kept=$2
shift 2
[ -z "$kept" ] || mount --bind "$kept" /mnt
mount -t tmpfs elsewhere /tmp
[ -z "$kept" ] || { mkdir -p "$kept"; mount --bind /mnt "$kept"; }
mount -t tmpfs elsewhere "$hidden"
cd "$hidden"
exec "$@"
"""
"""Script that runs another command in which neither the test's directory, its first argument, nor /tmp is visible. Of
/tmp, only its second argument stays visible: a clone of dmsg, or nothing.
"""
CLONE = Path(__file__).parents[2]


def may_mount() -> bool:
    """Tell whether this machine lets a test hide a directory from a process."""
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, check=False
        ).returncode
    )


class ObjectStoreTests(ProcessCase):
    """Runs on an object store: the tables are those of a run on a directory, only one run writes at a time, the next
    run continues a killed one, and no directory is shared.
    """

    def setUp(self) -> None:
        super().setUp()
        log = self.root / "moto.log"
        with log.open("wb") as file:
            store = subprocess.Popen([sys.executable, "-c", MOTO], stdout=file, stderr=file)
        self.addCleanup(store.wait)
        self.addCleanup(store.kill)
        until = time.monotonic() + 60
        while "Running on " not in log.read_text():
            self.assertLess(time.monotonic(), until, log.read_text())
            time.sleep(0.1)
        url = log.read_text().partition("Running on ")[2].split()[0]
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        changed = patch.dict(os.environ, environment)
        changed.start()
        self.addCleanup(changed.stop)
        self.spark = [
            f"--conf=spark.jars.packages={PACKAGE}",
            f"--conf=spark.hadoop.fs.s3a.endpoint={url}",
            "--conf=spark.hadoop.fs.s3a.endpoint.region=us-east-1",
            "--conf=spark.hadoop.fs.s3a.path.style.access=true",
        ]
        simulate(self.root / "sim", 10_000, 6, 300, 2)
        self.client = boto3.client("s3", region_name="us-east-1", endpoint_url=url)
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, paths: list[Path]) -> None:
        for path in paths:
            self.client.upload_file(str(path), BUCKET, str(path.relative_to(self.root / "sim")))

    def command(self, *arguments: str) -> list[str]:
        return [*DMSG, *arguments, "--out", OUT]

    def run_command(self) -> list[str]:
        return [
            *self.command("run", "--spool", f"s3a://{BUCKET}/spool", "--receipts", f"s3a://{BUCKET}/checked"),
            *self.spark,
        ]

    def rows(self, out: str) -> dict[str, Counter[str]]:
        """Return all gold tables in a form that can be compared."""

        def plain(row: dict[str, Any]) -> str:
            return repr(sorted((key, f"{of:.9g}" if isinstance(of, float) else of) for key, of in row.items()))

        store = Store(out)
        state = store.state()
        found = {}
        for name in GOLD:
            table = store.table("gold", name).open(state.versions.get(f"gold/{name}"))
            found[name] = Counter(map(plain, [] if table is None else rows_of(table).to_pylist()))
        return found

    def files(self) -> list[Path]:
        return sorted(path for path in (self.root / "sim").glob("*/*") if path.is_file())

    def as_here(self) -> None:
        """Assert that the tables in the bucket are those of a run over the same files in a directory."""
        analytics(*self.run_arguments(self.root / "out"))
        expected, found = self.rows(str(self.root / "out")), self.rows(OUT)
        self.assertTrue(expected["traffic_hour"])
        for name, rows in expected.items():
            self.assertEqual(found[name], rows, name)

    def test_workers_that_see_another_directory(self) -> None:
        if not may_mount():
            raise SkipTest("no directory can be hidden from a process here: that needs unshare(1) and root")
        self.put(self.files())
        kept = str(CLONE) if CLONE.is_relative_to("/tmp") else ""
        within = ("unshare", "--mount", "sh", "-c", ELSEWHERE, "elsewhere", str(self.root), kept)
        master = self.cluster(within)
        # Workers with the same address would read each other's files; workers on two machines cannot.
        settings = ("--conf=spark.executor.memory=900m", "--conf=spark.shuffle.readHostLocalDisk=false")
        arguments = [*self.run_command(), "--master", master, *settings]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.as_here()

    def test_a_bucket(self) -> None:
        files = self.files()
        later = [path for path in files if path.name.startswith("events-")][::3]
        self.assertGreater(len(later), 1)
        self.put([path for path in files if path not in later])
        # A run is killed while it writes. Two others continue it at the same time, and one of the two is refused.
        killed = subprocess.Popen(self.run_command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + TIMEOUT
        while "Contents" not in self.client.list_objects_v2(Bucket=BUCKET, Prefix="tables/silver/"):
            self.assertIsNone(killed.poll(), killed.stderr and killed.stderr.read())
            self.assertLess(time.monotonic(), until)
            time.sleep(0.5)
        killed.kill()
        killed.communicate()
        two = [
            subprocess.Popen(self.run_command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        said = [process.communicate(timeout=TIMEOUT) for process in two]
        self.assertEqual(sorted(process.returncode for process in two), [0, 1], said)
        (told,) = [text for process, (_, text) in zip(two, said, strict=True) if process.returncode]
        self.assertIn(f"another run writes to {OUT}", told.splitlines()[-1])
        # More events.
        self.put(later)
        subprocess.run(self.run_command(), check=True, capture_output=True, text=True, timeout=TIMEOUT)
        self.as_here()
        before = self.rows(OUT)
        # Commands that need no Spark.
        for arguments in (["attention"], ["top"], ["optimize"], ["report", "--html", str(self.root / "report.html")]):
            done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=TIMEOUT)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.rows(OUT), before)
