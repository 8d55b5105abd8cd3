"""Tests of the pipeline on an object store: events, receipts and tables in S3 (``make long WHICH=s3``)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
from twisted.trial.unittest import SkipTest

from dmsg.analytics.parquet import is_of_arrow
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.store import Store
from dmsg.analytics.table_queries import rows_of
from tests.analytics.long_runs import DMSG, TIMEOUT, ProcessCase, analytics, simulate

PACKAGE = "org.apache.hadoop:hadoop-aws:3.5.0"
"""Spark's file system for S3, of the release of Hadoop that this release of Spark contains."""
BUCKET = "dmsg"
OUT = f"s3a://{BUCKET}/tables"
IN_BUCKET = ("--spool", f"s3a://{BUCKET}/spool", "--receipts", f"s3a://{BUCKET}/checked")
SECRET = "xyzzy-plugh-4711"
"""Secret key of the store, a text that occurs nowhere else."""
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
            "AWS_SECRET_ACCESS_KEY": SECRET,
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
        return [*self.command("run", *IN_BUCKET), *self.spark]

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

    def parquet_files(self, table: str) -> set[str]:
        """Return the paths of all files below a table in the bucket, without its log."""
        start = f"tables/{table}/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=start)
        names = {one["Key"].removeprefix(start) for page in pages for one in page.get("Contents", ())}
        return {name for name in names if name.endswith(".parquet") and not name.startswith("_delta_log")}

    def as_here(self, out: str = OUT) -> None:
        """Assert that the tables are those of a run over the same files in a directory, and that Arrow has read the
        files for both.
        """
        analytics(*self.run_arguments(self.root / "out"))
        expected, found = self.rows(str(self.root / "out")), self.rows(out)
        here, there = Store(str(self.root / "out")), Store(out)
        for store in (here, there):
            paths = [file.path for file in store.table("", "bronze").files()]
            self.assertTrue(all(map(is_of_arrow, paths)), paths)
        # The names of the files differ; their sizes and hashes do not.
        names = [
            sorted(
                [row[key] for key in ("file_sha256", "file_bytes", "lines", "problem")]
                for row in store.table("silver", "files").read().to_pylist()
            )
            for store in (here, there)
        ]
        self.assertEqual(names[0], names[1])
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
        log = self.root / "log"
        log.mkdir()
        told = [f"--conf=spark.eventLog.{one}" for one in ("enabled=true", "compress=false", f"dir=file:{log}")]
        arguments = [*self.run_command(), "--master", master, *settings, *told]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("Spark reads", done.stderr)
        self.as_here()
        # The workers got the key of the store, which is not in their environment, and Spark has not written it down.
        self.assertNotIn("AWS_SECRET_ACCESS_KEY", self.environment)
        written = b"".join(path.read_bytes() for path in log.rglob("*") if path.is_file())
        self.assertIn(b"SparkListenerTaskEnd", written)
        self.assertNotIn(SECRET.encode(), written)
        self.assertNotIn(SECRET, done.stdout + done.stderr)
        for path in self.root.rglob("*.log"):
            self.assertNotIn(SECRET.encode(), path.read_bytes(), path)

    def test_files_in_a_bucket_and_tables_in_a_directory(self) -> None:
        self.put(self.files())
        out = str(self.root / "tables")
        subprocess.run([*DMSG, "run", *IN_BUCKET, "--out", out, *self.spark], check=True, timeout=TIMEOUT)
        self.as_here(out)

    def test_files_in_a_directory_and_tables_in_a_bucket(self) -> None:
        arguments = [*map(str, self.run_arguments(Path("."))[:-1]), OUT]
        subprocess.run([*DMSG, *arguments, *self.spark], check=True, timeout=TIMEOUT)
        self.as_here()
        # A task that is killed leaves a file that no log names.
        store = Store(OUT)
        kept = {file.path for file in store.table("", "bronze").files()}
        left = "run==spool.7.0a/family=beat/dt=2026-03-10/arrow-1.parquet"
        self.client.put_object(Bucket=BUCKET, Key=f"tables/bronze/{left}", Body=b"PAR1")
        self.assertEqual(self.parquet_files("bronze"), kept | {left})
        with store.claim() as claim:
            store.make_room(store.state(), claim, 64, left_behind=0)
        self.assertEqual(self.parquet_files("bronze"), kept)

    def test_a_stream_over_a_bucket(self) -> None:
        said = analytics(*self.run_arguments(self.root / "out")).stdout
        left = int(said.split(": ")[1].split()[0].replace(",", ""))
        files = self.files()
        self.put(files[::2])
        command = [*self.command("stream", *IN_BUCKET, "--every", "2"), *self.spark]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert process.stdout is not None
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        later = files[1::2]
        while left > 0:
            line = process.stdout.readline()
            self.assertTrue(line, "the stream ended")
            left -= int(line.split(": ")[1].split()[0].replace(",", "")) if " events" in line else 0
            self.put(later)
            later = []
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(TIMEOUT), 0)
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
