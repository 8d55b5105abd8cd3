"""Long tests of the pipeline: two million events compared with DuckDB, ten kills, a cluster, a stream (``make long
WHICH=pipeline``).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from random import Random
from threading import Event, Lock
from typing import Any

import pyspark
from pyspark.errors import StreamingQueryException
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import jobs
from dmsg.analytics.lake import Lake
from dmsg.analytics.listing import spool_source
from dmsg.analytics.parquet import is_of_arrow
from dmsg.analytics.runs import Claim
from dmsg.analytics.schemas import GOLD, QUARANTINE, REGISTER
from dmsg.analytics.session import SHUFFLE_PARTITIONS, find_java
from dmsg.keys import SecKey, sha256
from dmsg.telemetry.receipts import Receipt, Role
from dmsg.telemetry.verify import SMALL_BYTES
from tests.analytics.comparison import compare
from tests.analytics.support import DAY, S1, Boot, LakeCase, spark, write_file

TRANSPORTS = int(os.environ.get("TRANSPORTS", "1000000"))
"""Number of transports; each has two events."""
LAST_DAY = date.today() - timedelta(1)
TIMEOUT = 1800.0
SUBMITTED = """
from dmsg.analytics.session import make_session
session = make_session()
print(session.conf.get("spark.sql.shuffle.partitions"), session.conf.get("spark.sql.session.timeZone"))
"""
SHARDED = """
import sys
from dmsg.analytics import shards, table_writer
from dmsg.analytics.main import main
shards.LARGE_ROWS, shards.SHARD_ROWS, table_writer.COMPARED_ROWS = 1, 3000, 100
sys.exit(main(sys.argv[1:]))
"""
VERIFIED = """
import sys
from pathlib import Path
from dmsg.analytics.session import make_session
from dmsg.cli.pipeline.receipt_workers import spark_workers
from dmsg.telemetry.pseudonyms import Pseudonyms, read_secret
from dmsg.telemetry.verify import verify_spool
master, spool, out = sys.argv[1], *map(Path, sys.argv[2:])
found = verify_spool(spool, out, Pseudonyms(read_secret(out)), workers=spark_workers(make_session(master)))
print(found.believed, found.refused)
"""
"""Program that verifies receipts by a cluster; its arguments are the master, the spool, and the directory to write."""
DMSG = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()", "analytics")


def analytics(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    done = subprocess.run([*DMSG, *map(str, arguments)], text=True, capture_output=True, timeout=TIMEOUT, **options)
    if done.returncode:
        raise AssertionError(f"{arguments}: {done.stderr}")
    return done


def simulate(where: Path, transports: int, servers: int, clients: int, days: int) -> None:
    """A network's events."""
    analytics(
        *("simulate", "--out", where, "--transports", str(transports), "--servers", str(servers)),
        *("--clients", str(clients), "--days", str(days), "--last-day", str(LAST_DAY)),
    )


def gold(out: Path) -> dict[str, list[str]]:
    """Return all gold tables in a form that can be compared."""
    lake = Lake(spark(), str(out))
    state = lake.state()
    return {
        name: sorted(json.dumps(row.asDict(), default=str) for row in lake.read("gold", name, state).collect())
        for name in GOLD
    }


def rounded(tables: dict[str, list[str]]) -> dict[str, list[str]]:
    """The order of additions may change the last digits of doubles."""

    def number(text: str) -> float:
        return float(f"{float(text):.9g}")

    return {name: [json.dumps(json.loads(row, parse_float=number)) for row in rows] for name, rows in tables.items()}


def write_receipts(spool: Path, count: int) -> None:
    """Write six files of receipts.  Each has one receipt with a wrong signature in addition."""
    ends, server = [SecKey.from_seed(bytes([number])) for number in range(40)], SecKey.from_seed(b"server")
    for number in range(6):
        envelope = {"v": 1, "type": "receipt", "producer": server.public.hex(), "role": "server", "boot": f"b{number}"}
        ts = int(time.time() * 1000) - 86_400_000
        lines = []
        for seq in range(count // 6 + 1):
            one, two = ends[seq % 40], ends[(seq + 1) % 40]
            transport = sha256(b"%d %d" % (number, seq))[:16]
            receipt = Receipt(Role.INITIATOR, transport, server.public, one.public, two.public, seq, 7)
            signed = receipt.sign(two if seq == 0 else one).hex()
            lines.append(json.dumps(envelope | {"seq": seq, "ts": ts, "mono": seq, "receipt": signed}))
        (spool / f"receipts-{number}.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))


class LongCase(SynchronousTestCase):
    """A directory of its own, that is removed."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def run_arguments(self, out: Path) -> tuple[str | Path, ...]:
        return (
            "run",
            "--spool",
            self.root / "sim" / "spool",
            "--receipts",
            self.root / "sim" / "checked",
            "--out",
            out,
        )


class SizeTests(LongCase):
    """Spark and DuckDB give the same answers on two million events."""

    def test_gold_is_what_duckdb_computes(self) -> None:
        simulate(self.root / "sim", TRANSPORTS, 40, 20_000, 5)
        out = self.root / "out"
        said = analytics(*self.run_arguments(out)).stdout
        self.assertIn("events", said)
        found = compare(
            Lake(spark(), str(out)), self.root / "sim" / "spool", self.root / "sim" / "checked", date.today()
        )
        self.assertEqual(set(found), set(GOLD))
        self.assertEqual({name: what[:3] for name, what in found.items() if what}, {})


class KillTests(LongCase):
    """kill -9 at ten random points of a run, then again: the same tables."""

    def test_tables_are_the_same_after_ten_kills(self) -> None:
        simulate(self.root / "sim", 20_000, 6, 300, 2)
        started = time.monotonic()
        analytics(*self.run_arguments(self.root / "whole"))
        whole = time.monotonic() - started
        expected = rounded(gold(self.root / "whole"))
        random = Random(5)
        killed = 0
        out = self.root / "out"
        for _ in range(40):
            process = subprocess.Popen(
                [*DMSG, *map(str, self.run_arguments(out))],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.wait(whole * random.random())
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # The signal ends Python and Java.
                process.wait()
                killed += 1
            else:
                shutil.rmtree(out)  # The run ended before the signal, so there was nothing to kill.
            if killed == 10:
                break
        self.assertEqual(killed, 10)
        analytics(*self.run_arguments(out))
        self.assertEqual(rounded(gold(out)), expected)


class WritersTests(LongCase):
    """Two runs write to one place at once, by different spellings of its path. One of them is refused, and no row is
    stored twice.
    """

    def test_one_of_two_concurrent_runs_is_refused(self) -> None:
        simulate(self.root / "sim", 20_000, 6, 300, 2)
        analytics(*self.run_arguments(self.root / "whole"))
        out = self.root / "out"
        commands = [
            [*DMSG, *map(str, self.run_arguments(out))],
            [sys.executable, "-m", "dmsg.analytics", *map(str, self.run_arguments(out))],
        ]
        commands[1][-1] = f"file://{out}"
        environment = {**os.environ, "JAVA_HOME": str(find_java())}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        first = subprocess.Popen(commands[0], env=environment, **pipes)
        until = time.monotonic() + TIMEOUT
        while not any(out.rglob("*.parquet")) and time.monotonic() < until:
            time.sleep(0.005)
        # The first run writes. It is stopped, because otherwise it may end before the second one begins.
        first.send_signal(signal.SIGSTOP)
        try:
            second = subprocess.run(commands[1], env=environment, timeout=TIMEOUT, check=False, **pipes)
        finally:
            first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=TIMEOUT)
        # Which run is refused depends on whether the first one had already announced its transaction.
        ends = sorted(((first.returncode, said[1]), (second.returncode, second.stderr)))
        self.assertEqual([status for status, _ in ends], [0, 1], ends)
        self.assertIn("another run writes to", ends[1][1].splitlines()[-1])
        self.assertEqual(rounded(gold(out)), rounded(gold(self.root / "whole")))


class ProcessCase(LongCase):
    """Parts of Spark that run as processes on loopback."""

    def setUp(self) -> None:
        super().setUp()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.home = Path(pyspark.__file__).parent
        self.environment = {
            **os.environ,
            "SPARK_HOME": str(self.home),
            "JAVA_HOME": str(find_java()),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }

    def start(self, program: str, *arguments: str, wanted: str, within: Sequence[str] = ()) -> str:
        """Start one, by another command if need be; the line that shows that it is there."""
        log = self.root / f"{len(self.processes)}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*within, str(self.home / "bin" / program), *arguments],
                stdout=file,
                stderr=file,
                cwd=self.root,
                env=self.environment,
                start_new_session=True,
            )
        self.processes.append(process)
        self.addCleanup(self.end, process)
        until = time.monotonic() + 90
        while time.monotonic() < until:
            for line in log.read_text().splitlines():
                if wanted in line:
                    return line
            time.sleep(0.2)
        raise AssertionError(f"no {wanted!r} in {log.read_text()[-2000:]}")

    def cluster(self, within: Sequence[str] = ()) -> str:
        """A master and two workers of one core; the master's address.

        :param within: a command that starts the workers.
        """
        name, here = "org.apache.spark.deploy", ("--host", "127.0.0.1", "--webui-port", "0")
        line = self.start(
            *("spark-class", f"{name}.master.Master", *here, "--port", "0"), wanted="Starting Spark master at"
        )
        master = line.split()[-1]
        for _ in range(2):
            self.start(
                *("spark-class", f"{name}.worker.Worker", *here, "--cores", "1", "--memory", "1g"),
                *("--work-dir", str(self.root / "work"), master),
                wanted="Successfully registered with master",
                within=within,
            )
        return master

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ClusterTests(ProcessCase):
    """spark-submit to a master and two workers, each a process on loopback."""

    def test_the_same_jobs_on_a_cluster(self) -> None:
        simulate(self.root / "sim", 20_000, 6, 300, 2)
        analytics(*self.run_arguments(self.root / "local"))
        master = self.cluster()
        done = subprocess.run(
            [
                *(str(self.home / "bin" / "spark-submit"), "--master", master, "--driver-memory", "1g"),
                *(
                    "--conf",
                    "spark.executor.memory=900m",
                    str(Path(jobs.__file__).with_name("__main__.py")),
                ),
                *map(str, self.run_arguments(self.root / "cluster")),
            ],
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            env=self.environment,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual(json.loads(done.stdout.splitlines()[-1])["run"], 1)
        self.assertEqual(rounded(gold(self.root / "cluster")), rounded(gold(self.root / "local")))

    def test_a_cluster_computes_large_days_in_shards(self) -> None:
        """Each executor computes the tables of some servers, and writes their files."""
        simulate(self.root / "sim", 20_000, 6, 300, 2)
        analytics(*self.run_arguments(self.root / "local"))
        script = self.root / "script.py"
        script.write_text(SHARDED)
        done = subprocess.run(
            [
                *(str(self.home / "bin" / "spark-submit"), "--master", self.cluster(), "--driver-memory", "1g"),
                *("--conf", "spark.executor.memory=900m", str(script)),
                *map(str, self.run_arguments(self.root / "cluster")),
            ],
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            env=self.environment,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertNotIn("executors cannot", done.stderr)
        # Spark would write these files itself, with names that do not begin with Arrow's prefix.
        for table in ("silver/verdicts", "gold/pair_day"):
            names = [path.name for path in (self.root / "cluster" / table).rglob("*.parquet")]
            self.assertGreater(len(names), 4)
            self.assertEqual({is_of_arrow(name) for name in names}, {True})
        self.assertEqual(rounded(gold(self.root / "cluster")), rounded(gold(self.root / "local")))

    def test_executors_verify_receipts(self) -> None:
        """The checked files are those of ``verify`` on one machine with the same secret."""
        spool, local = self.root / "spool", self.root / "local"
        spool.mkdir()
        write_receipts(spool, 24_000)
        self.assertGreater(sum(path.stat().st_size for path in spool.iterdir()), SMALL_BYTES)
        said = analytics("verify", "--spool", spool, "--out", local)
        self.assertIn("24,000 receipts are valid, 6 are not", said.stdout)
        out = self.root / "out"
        out.mkdir()
        shutil.copy2(local / "secret", out)
        done = subprocess.run(
            [sys.executable, "-c", VERIFIED, self.cluster(), spool, out],
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            env=self.environment,
        )
        self.assertEqual((done.returncode, done.stdout), (0, "24000 6\n"), done.stderr[-2000:])
        self.assertNotIn("executors cannot", done.stderr)
        texts = [
            {path.name: gzip.decompress(path.read_bytes()) for path in directory.glob("receipts-*")}
            for directory in (local, out)
        ]
        self.assertEqual(len(texts[0]), 6)
        self.assertEqual(texts[0], texts[1])

    def test_properties_of_spark_submit_win(self) -> None:
        script = self.root / "script.py"
        script.write_text(SUBMITTED)
        done = subprocess.run(
            [
                *(str(self.home / "bin" / "spark-submit"), "--master", "local[1]", "--conf", "spark.ui.enabled=false"),
                *("--conf", f"{SHUFFLE_PARTITIONS}=7", "--conf", "spark.sql.session.timeZone=CET", str(script)),
            ],
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            env=self.environment,
        )
        self.assertEqual(done.stdout.splitlines()[-1:], ["7 CET"], done.stderr[-2000:])


class ConnectTests(ProcessCase):
    """The same by a Spark Connect server, which knows nothing of dmsg."""

    if importlib.util.find_spec("grpc") is None:
        skip = 'Spark Connect is not installed: pip install -e ".[spark-connect]"'

    def test_the_same_tables_by_spark_connect(self) -> None:
        simulate(self.root / "sim", 20_000, 6, 300, 2)
        spool, late = self.root / "sim" / "spool", self.root / "late"
        late.mkdir()
        files = sorted(spool.iterdir())
        for path in files[::2]:
            shutil.move(path, late)
        line = self.start(
            *("spark-submit", "--master", "local[2]", "--driver-memory", "1g"),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
            *("--conf", "spark.connect.grpc.binding.address=127.0.0.1"),
            *("--conf", "spark.connect.grpc.binding.port=0", "--conf", "spark.ui.enabled=false", "spark-internal"),
            wanted="Spark Connect server started at",
        )
        master = f"sc://127.0.0.1:{line.rpartition(':')[2].strip()}"
        out = self.root / "out"
        first = analytics(*self.run_arguments(out), "--master", master).stdout
        self.assertIn("run 1: ", first)
        for path in late.iterdir():
            shutil.move(path, spool)
        second = analytics(*self.run_arguments(out), "--master", master).stdout
        self.assertIn("run 2: ", second)
        self.assertNotIn("came twice", second)
        self.assertIn("nothing is new", analytics(*self.run_arguments(out), "--master", master).stdout)
        analytics(*self.run_arguments(self.root / "local"))
        self.assertEqual(rounded(gold(out)), rounded(gold(self.root / "local")))


class StreamTests(LongCase):
    """Files that come while the stream runs are in the tables, and it ends by Ctrl-C."""

    def test_what_comes_is_in_the_tables(self) -> None:
        simulate(self.root / "all", 5_000, 4, 100, 2)
        spool, out = self.root / "spool", self.root / "out"
        spool.mkdir()
        files = sorted((self.root / "all" / "spool").iterdir())
        for path in files[: len(files) // 2]:
            shutil.copy(path, spool)
        arguments = (
            "stream",
            "--spool",
            spool,
            "--receipts",
            self.root / "all" / "checked",
            "--out",
            out,
            "--every",
            "2",
        )
        process = subprocess.Popen([*DMSG, *map(str, arguments)], stdout=subprocess.PIPE, text=True, bufsize=1)
        assert process.stdout is not None
        self.addCleanup(process.kill)
        counted = 0

        def wait_for(events: int) -> None:
            nonlocal counted
            assert process.stdout is not None
            while counted < events:
                line = process.stdout.readline()
                self.assertTrue(line, "the stream ended")
                if "events" in line:
                    counted += int(line.split(": ")[1].split()[0].replace(",", ""))

        wait_for(1)
        for path in files[len(files) // 2 :]:
            fresh = spool / f".{path.name}"
            shutil.copy(path, fresh)
            fresh.rename(spool / path.name)
        shutil.copytree(self.root / "all", self.root / "sim")
        whole = analytics(*self.run_arguments(self.root / "whole")).stdout
        wait_for(int(whole.split(": ")[1].split()[0].replace(",", "")))
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(120), 0)
        process.stdout.close()
        self.assertEqual(rounded(gold(out)), rounded(gold(self.root / "whole")))


class TurnTests(LakeCase):
    """A stream and runs over the same tables."""

    def test_a_stream_and_runs_take_turns(self) -> None:
        """Files that one of them has read are not read by the other, and a batch that Spark repeats is not lost."""
        boot = Boot(S1, "boot-1")
        boot.event("start", DAY, "08:00:00", capacity=5)
        boot.beats(DAY, "08:00:30", 10, sessions=1, transports=0, capacity=5)
        first, second, third = boot.rows[:4], boot.rows[4:8], boot.rows[8:]
        source = spool_source(str(self.spool))
        lock = Lock()

        def stream(*, killed: bool = False) -> None:
            pipeline = self.pipeline()

            def refine(claim: Claim) -> None:
                if killed:
                    raise InterruptedError
                pipeline.refine(pipeline.lake.state(), claim, [])

            query = pipeline.follow(source, "1 second", refine, lock, Event())
            query.processAllAvailable()
            query.stop()

        def events() -> tuple[int, int]:
            rows = self.pipeline().lake.bronze().where(f"family <> '{REGISTER}'")
            return rows.count(), rows.where("type = 'heartbeat'").count()

        write_file(self.spool / "events-1.jsonl.gz", first)
        stream()
        self.assertEqual(events(), (5, 3))
        write_file(self.spool / "events-2.jsonl.gz", second)
        self.assertEqual(self.run_jobs().events, 5)
        for path in ("0", ".0.crc"):
            (self.out / "checkpoints" / "spool" / "commits" / path).unlink()
        write_file(self.spool / "events-3.jsonl.gz", [*third, {"v": 3}])
        stream()
        self.assertEqual(events(), (15, 10))
        self.assertEqual(self.run_jobs().events, 0)
        (day,) = self.table("uptime_day")
        self.assertEqual((day["alive_minutes"], day["starts"]), (11, 1))
        (quality,) = [row for row in self.table("quality_day") if row["producer"] == S1]
        self.assertEqual((quality["duplicates"], quality["missing"]), (0, 0))
        self.assertEqual(self.pipeline().lake.bronze([QUARANTINE]).count(), 1)
        # A run takes over the files that a killed stream has read. A stream with a new checkpoint leaves them alone.
        write_file(self.spool / "events-4.jsonl.gz", [], garbage=[b"hello"])
        self.assertRaises(StreamingQueryException, stream, killed=True)
        self.assertEqual(self.run_jobs().quarantined, 1)
        stream()
        shutil.rmtree(self.out / "checkpoints")
        write_file(self.spool / "events-5.jsonl.gz", [], garbage=[b"hello"])
        stream()
        self.assertEqual(self.pipeline().lake.bronze([QUARANTINE]).count(), 3)
        self.assertEqual(self.run_jobs().events, 0)
