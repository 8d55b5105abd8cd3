"""Files of events: rotation, kills, full disks, room."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from unittest import mock

from hypothesis import given, strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError
from dmsg.keys import SecKey
from dmsg.telemetry import recorder as recorder_module, service as service_module
from dmsg.telemetry.pseudonyms import Pseudonyms, load_or_create_secret
from dmsg.telemetry.recorder import Recorder
from dmsg.telemetry.schema import EVENT, RECEIPTS_PREFIX, columns, markdown
from dmsg.telemetry.service import Telemetry
from dmsg.telemetry.settings import TelemetrySettings
from dmsg.telemetry.spool import compress, recover
from tests.support import some

SECRET = bytes(32)


def rows(directory: Path) -> list[dict[str, Any]]:
    """Return all events of sealed files, in order."""
    found = []
    for path in sorted(directory.glob("*.jsonl.gz")):
        found += [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return found


def rows_there(directory: Path) -> list[Path]:
    """Sealed files that are more than a name."""
    return [path for path in directory.glob("*.jsonl.gz") if path.exists()]


class SpoolCase(SynchronousTestCase):
    """A directory and a clock."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.now = 1_800_000_000.0

    def recorder(self, **options: Any) -> Recorder:
        options = {"rotate_seconds": 300, "wall": lambda: self.now, "monotonic": lambda: self.now, **options}
        return Recorder(self.directory, "02" * 33, "server", Pseudonyms(SECRET), **options)


class RecorderTests(SpoolCase):
    """Events from record() to a sealed file."""

    def test_recorded_events_are_in_the_file(self) -> None:
        recorder = self.recorder()
        recorder.record("session_open", {"peer": b"\2" * 33, "session": 1, "handshake_ms": 5})
        self.now += 2
        recorder.record("stop", {})
        recorder.flush(last=True)
        first, second, end = rows(self.directory)
        tag = Pseudonyms(SECRET).client(b"\2" * 33)
        self.assertEqual(
            first,
            {
                "v": 1,
                "type": "session_open",
                "producer": "02" * 33,
                "role": "server",
                "boot": recorder.boot,
                "seq": 0,
                "ts": 1_800_000_000_000,
                "mono": 0,
                "peer": tag,
                "session": 1,
                "handshake_ms": 5,
            },
        )
        self.assertEqual((second["type"], second["seq"], second["mono"]), ("stop", 1, 2000))
        self.assertEqual((end["type"], end["seq"], end["lines"], end["recovered"]), ("segment_end", 2, 2, False))
        text = gzip.decompress(next(self.directory.glob("*.gz")).read_bytes())
        self.assertEqual(end["sha256"], hashlib.sha256(b"".join(text.splitlines(True)[:2])).hexdigest())
        self.assertEqual(list(self.directory.glob(".*")), [])

    def test_files_are_sealed_by_time_and_by_size(self) -> None:
        recorder = self.recorder()
        recorder.record("stop", {})
        recorder.flush()
        self.assertEqual(rows(self.directory), [])
        self.now += 300
        recorder.flush()
        self.assertEqual(len(list(self.directory.glob("*.gz"))), 1)
        recorder.spool._rotate_bytes = 1000
        for _ in range(20):
            recorder.record("stop", {})
            recorder.flush()
        recorder.flush(last=True)
        self.assertGreater(len(list(self.directory.glob("*.gz"))), 3)
        self.assertEqual(sorted(row["seq"] for row in rows(self.directory)), list(range(len(rows(self.directory)))))

    def test_a_full_queue_loses_events_and_their_numbers(self) -> None:
        self.patch(recorder_module, "QUEUE_LIMIT", 3)
        recorder = self.recorder()
        for _ in range(5):
            recorder.record("stop", {})
        recorder.flush()
        recorder.record("stop", {})
        recorder.flush(last=True)
        self.assertEqual([row["seq"] for row in rows(self.directory)], [0, 1, 2, 5, 6])
        self.assertEqual((recorder.lost_events, recorder.written), (2, 4))

    def test_a_full_disk_loses_only_events(self) -> None:
        recorder = self.recorder()
        recorder.record("stop", {})
        recorder.flush()
        spool = recorder.spool
        real = spool._file
        assert real is not None

        class Full:
            name = some(real).name

            def write(self, data: bytes) -> int:
                some(real).write(data[:7])  # A nearly full disk writes a part like this.
                return 7

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        spool._file = Full()  # type: ignore[assignment]
        recorder.record("stop", {})
        recorder.flush()
        self.assertEqual(recorder.lost_events, 1)
        spool._file = real
        recorder.record("stop", {})
        recorder.flush(last=True)
        self.assertEqual([row["seq"] for row in rows(self.directory)], [0, 2, 3])
        self.assertEqual(rows(self.directory)[-1]["lines"], 2)

    def test_sealing_without_room_is_tried_again(self) -> None:
        recorder = self.recorder()
        recorder.record("stop", {})
        with mock.patch("dmsg.telemetry.spool.os.fsync", side_effect=OSError(28, "No space left on device")):
            recorder.flush(last=True)
        self.assertEqual(rows(self.directory), [])
        self.assertEqual(len(list(self.directory.glob(".*.part"))), 0)
        recorder.record("stop", {})
        recorder.flush(last=True)
        self.assertEqual(len(list(self.directory.glob("*.gz"))), 2)

    def test_files_that_cannot_be_sealed_are_so_many(self) -> None:
        """A disk that stays full loses the oldest, and they are counted."""
        recorder = self.recorder()
        full = mock.patch("dmsg.telemetry.spool.os.fsync", side_effect=OSError(28, "No space left on device"))
        with full, mock.patch("dmsg.telemetry.spool.UNSEALED_LIMIT", 3):
            for _ in range(5):
                recorder.record("stop", {})
                recorder.flush(last=True)
        names = [path.name[-11:] for path in sorted(self.directory.glob(".*.open"))]
        self.assertEqual((names, recorder.spool.removed), (["000003.open", "000004.open", "000005.open"], 2))

    def test_no_room_for_the_last_line(self) -> None:
        """The file is sealed without it, and says so of itself; nothing torn is in it."""
        recorder = self.recorder()
        recorder.record("stop", {})
        recorder.flush()
        spool = recorder.spool
        for whole in (False, True):
            file = mock.Mock(wraps=spool._file)
            file.name = spool._file.name  # type: ignore[union-attr]

            def write(data: bytes, whole: bool = whole, real: Any = spool._file) -> int:
                if whole:
                    raise OSError(28, "No space left on device")
                return int(real.write(data[:7]))

            file.write = write
            spool._file = file
            spool.seal()
            recorder.record("stop", {})
            recorder.flush()
        recorder.flush(last=True)
        self.assertEqual([row["type"] for row in rows(self.directory)], ["stop", "stop", "stop", "segment_end"])

    def test_a_deleted_open_file_is_replaced(self) -> None:
        """A user has emptied the directory: events that were not sealed are lost."""
        recorder = self.recorder()
        full = mock.patch("dmsg.telemetry.spool.os.fsync", side_effect=OSError(28, "No space left on device"))
        with full, mock.patch("dmsg.telemetry.spool.UNSEALED_LIMIT", 1):
            recorder.record("stop", {})
            recorder.flush(last=True)
            for path in self.directory.glob(".*.open"):
                path.unlink()
            recorder.record("stop", {})
            recorder.flush(last=True)
        self.assertEqual(recorder.spool.removed, 1)
        missing = self.directory / ".events-xx-000001.open"
        with self.assertRaises(FileNotFoundError) as caught:
            compress(missing)
        self.assertEqual(caught.exception.filename, str(missing))

    def test_files_removed_by_another_process_are_skipped(self) -> None:
        recorder = self.recorder(limit=0)
        for name in ("events-000-gone.jsonl.gz", "events-zzz-gone.jsonl.gz"):
            (self.directory / name).symlink_to("nowhere")
        recorder.record("stop", {})
        recorder.flush(last=True)
        self.assertEqual(rows_there(self.directory), [])
        self.assertEqual(recorder.spool.removed, 1)
        gone = (self.directory / "events-gone.jsonl.gz", mock.Mock(st_mtime_ns=1, st_size=5))
        with mock.patch("dmsg.telemetry.spool._stats", lambda paths: [gone]):
            recorder.spool._make_room()
        self.assertEqual(recorder.spool.removed, 2)

    def test_the_oldest_files_make_room(self) -> None:
        recorder = self.recorder(limit=1000)
        for number in range(10):
            recorder.record("session_open", {"peer": bytes([2, number] * 16 + [1])})
            recorder.flush(last=True)
        kept = sorted(self.directory.glob("*.gz"))
        self.assertLessEqual(sum(path.stat().st_size for path in kept), 1000)
        self.assertEqual(kept[-1].name, f"events-{recorder.boot}-000010.jsonl.gz")
        self.assertEqual(recorder.spool.removed, 10 - len(kept))

    def test_so_many_of_the_oldest(self) -> None:
        """As few files as necessary are removed, the oldest first."""
        recorder = self.recorder(limit=10**6)
        for number in range(5):
            recorder.record("session_open", {"peer": bytes([2, number] * 16 + [1])})
            recorder.flush(last=True)
        paths = sorted(self.directory.glob("*.gz"))
        for age, path in zip((3, 1, 2, 0, 4), paths, strict=True):
            os.utime(path, (age, age))
        sizes = [path.stat().st_size for path in paths]
        recorder.spool._limit = sum(sizes) - sizes[3] - 1
        recorder.spool._make_room()
        self.assertEqual(sorted(self.directory.glob("*.gz")), [paths[0], paths[2], paths[4]])
        self.assertEqual(recorder.spool.removed, 2)
        recorder.spool._limit = sum(path.stat().st_size for path in self.directory.glob("*.gz"))
        recorder.spool._make_room()
        self.assertEqual(recorder.spool.removed, 2)

    def test_events_are_written_to_disk_immediately(self) -> None:
        """Events that a killed process had written are kept. The file is sealed after its time, not before."""
        recorder = self.recorder(rotate_seconds=100)
        self.now = 50.0
        recorder.record("stop", {})
        recorder.flush()
        (path,) = self.directory.glob(".*.open")
        size = path.stat().st_size
        self.assertGreater(size, 0)
        self.now = 149.0
        recorder.record("stop", {})
        recorder.flush()
        self.assertGreater(path.stat().st_size, size)
        self.assertEqual(list(self.directory.glob("*.gz")), [])
        self.now = 150.0
        recorder.flush()
        self.assertEqual(len(list(self.directory.glob("*.gz"))), 1)
        # An empty file is not sealed.
        self.now = 1000.0
        recorder.flush()
        self.assertEqual(len(list(self.directory.glob("*.gz"))), 1)

    def test_receipts_push_no_events_out(self) -> None:
        """Events and receipts have separate limits."""
        events = self.recorder(limit=100_000)
        events.record("stop", {})
        events.flush(last=True)
        receipts = self.recorder(limit=500, prefix=RECEIPTS_PREFIX)
        for number in range(10):
            receipts.record("receipt", {"receipt": f"{number:04}" * 100})
            receipts.flush(last=True)
        self.assertEqual(len(list(self.directory.glob("events-*.gz"))), 1)
        left = list(self.directory.glob("receipts-*.gz"))
        self.assertEqual(receipts.spool.removed, 10 - len(left))
        self.assertTrue(0 < len(left) < 10)


class RecoverTests(SpoolCase):
    """Recovery of the files of a killed process."""

    def leave(self, data: bytes, name: str = ".events-aa-000001.open") -> Path:
        path = self.directory / name
        path.write_bytes(data)
        return path

    def line(self, seq: int) -> bytes:
        row = {"v": 1, "type": "stop", "producer": "p", "role": "server", "boot": "aa", "seq": seq, "ts": 5, "mono": 1}
        return json.dumps(row).encode() + b"\n"

    @given(st.integers(0, 5), st.integers(0, 40))
    def test_recovery_preserves_whole_lines(self, count: int, torn: int) -> None:
        self.setUp()
        self.leave(b"".join(map(self.line, range(count))) + self.line(count)[:torn])
        self.assertEqual(recover(self.directory), int(count > 0))
        self.assertEqual(list(self.directory.glob(".*")), [])
        found = rows(self.directory)
        self.assertEqual([row["seq"] for row in found], list(range(count + 1)) if count else [])
        if count:
            self.assertEqual((found[-1]["type"], found[-1]["recovered"]), ("segment_end", True))

    def test_recovery_preserves_foreign_files(self) -> None:
        self.leave(b"hello\nworld\n")
        self.assertEqual(recover(self.directory), 1)
        (path,) = self.directory.glob("*.gz")
        self.assertEqual(gzip.decompress(path.read_bytes()), b"hello\nworld\n")

    def test_parts_of_the_dead_are_removed(self) -> None:
        """Files of a running process, and files that are still to be sealed, stay."""
        dead = self.directory / ".events-dead-000001.jsonl.gz.part"
        alive = self.directory / ".events-aa-000001.jsonl.gz.part"
        for path in (dead, alive):
            path.write_bytes(b"x")
        path = self.leave(self.line(0), ".events-aa-000002.open")
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual(recover(self.directory), 0)
            self.assertEqual((dead.exists(), alive.exists()), (False, True))
        self.assertEqual(recover(self.directory), 1)
        self.assertFalse(alive.exists())

    def test_a_living_process_is_left_alone(self) -> None:
        path = self.leave(self.line(0))
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual(recover(self.directory), 0)
        self.assertEqual(recover(self.directory), 1)

    def test_a_crash_between_sealing_and_removing(self) -> None:
        """The file is there twice: sealing it again makes the same one."""
        self.leave(self.line(0))
        recover(self.directory)
        (before,) = (path.read_bytes() for path in self.directory.glob("*.gz"))
        self.leave(gzip.decompress(before))
        recover(self.directory)
        self.assertEqual([path.read_bytes() for path in self.directory.glob("*.gz")], [before])
        # The program was killed earlier: the last line is there, and no further line is written.
        for path in self.directory.glob("*.gz"):
            path.unlink()
        self.leave(gzip.decompress(before))
        self.assertEqual(recover(self.directory), 1)
        self.assertEqual([path.read_bytes() for path in self.directory.glob("*.gz")], [before])
        self.assertEqual(list(self.directory.glob(".*")), [])

    def test_recovery_visits_every_directory(self) -> None:
        alive = self.leave(self.line(0), ".events-aa-000001.open")
        (self.directory / ".events-bb-000001.open").symlink_to("nowhere")
        self.leave(b"torn", ".events-cc-000001.open")
        self.leave(self.line(0) + self.line(1) + b"torn", ".events-dd-000001.open")
        with open(alive, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual(recover(self.directory), 1)
        found = rows(self.directory)
        digest = hashlib.sha256(self.line(0) + self.line(1)).hexdigest()
        self.assertEqual((found[-1]["lines"], found[-1]["sha256"], found[-1]["seq"]), (2, digest, 2))
        self.assertEqual(len(found), 3)

    def test_kill_9_while_writing(self) -> None:
        """The next start finds all lines that were flushed."""
        script = (
            "import sys; from pathlib import Path\n"
            "from dmsg.telemetry.recorder import Recorder\n"
            "from dmsg.telemetry.pseudonyms import Pseudonyms\n"
            "recorder = Recorder(Path(sys.argv[1]), 'p', 'server', Pseudonyms(bytes(32)), rotate_seconds=300)\n"
            "number = 0\n"
            "while True:\n"
            "    for _ in range(50): recorder.record('session_open', {'session': number}); number += 1\n"
            "    recorder.flush()\n"
            "    print(number, flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(self.directory)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(20):
            flushed = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        self.assertEqual(recover(self.directory), 1)
        found = [row["session"] for row in rows(self.directory)[:-1]]
        self.assertGreaterEqual(len(found), flushed)
        self.assertEqual(found, list(range(len(found))))


class SecretTests(SpoolCase):
    """Pseudonyms and what they are keyed with."""

    def test_only_this_user_can_read_a_new_directory(self) -> None:
        """Receipts name the two clients of each transport."""
        self.addCleanup(os.umask, os.umask(0o022))
        new = self.directory / "new"
        TelemetrySettings(new).prepare()
        self.assertEqual(stat.S_IMODE(new.stat().st_mode), 0o700)

    def test_the_secret_is_private_and_stays(self) -> None:
        first = load_or_create_secret(self.directory)
        self.assertEqual(load_or_create_secret(self.directory), first)
        self.assertEqual(stat.S_IMODE(os.stat(self.directory / "secret").st_mode), 0o600)
        self.assertEqual([path.name for path in self.directory.iterdir()], ["secret"])
        (self.directory / "secret").write_bytes(b"short")
        self.assertRaises(DmsgError, load_or_create_secret, self.directory)

    def test_tags_depend_on_key_and_secret(self) -> None:
        one, other = Pseudonyms(SECRET), Pseudonyms(b"\1" * 32)
        key = b"\2" * 33
        self.assertEqual(len(one.client(key)), 16)
        self.assertEqual(one.client(key), one.client(key))
        self.assertNotEqual(one.client(key), other.client(key))
        self.assertEqual(Pseudonyms(SECRET, clear=True).client(key), key.hex())
        self.assertEqual(one.network("10.1.2.3", 1), one.network("10.1.2.250", 1))
        self.assertEqual(one.network("::ffff:10.1.2.3", 1), one.network("10.1.2.4", 1))
        self.assertEqual(one.network("2001:db8:1::1", 1), one.network("2001:db8:1:ffff::2", 1))
        self.assertNotEqual(one.network("10.1.2.3", 1), one.network("10.1.2.3", 2))
        self.assertNotEqual(one.network("10.1.2.3", 1), one.network("10.1.3.3", 1))
        self.assertIsNone(one.network("unix", 1))

    def test_the_cache_is_bounded(self) -> None:
        self.patch(service_module, "REPEATS_LIMIT", 2)
        names = Pseudonyms(SECRET)
        for number in range(5000):
            names.client(number.to_bytes(33, "big"))
        self.assertLessEqual(len(names._tags), 4096)


class TelemetryTests(SpoolCase):
    """Heartbeats, what repeats, the end."""

    def start(self, **settings: Any) -> tuple[Telemetry, Clock]:
        clock = Clock()
        telemetry = Telemetry(
            clock, TelemetrySettings(self.directory, **settings), "server", SecKey.from_seed(b"server")
        )
        telemetry.start()
        return telemetry, clock

    def pass_time(self, clock: Clock, seconds: int) -> None:
        clock.pump([1] * seconds)

    def test_servers_of_one_operator(self) -> None:
        """The servers give a client the same pseudonym, and say so in their events; discoveries use pseudonyms of
        their own.
        """
        secret = self.directory / "fleet"
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)
        told = []
        for number, options in enumerate(
            ({"secret": secret}, {"secret": secret}, {}, {"secret": secret, "clear": True})
        ):
            directory = self.directory / str(number)
            telemetry = Telemetry(Clock(), TelemetrySettings(directory, **cast(Any, options)), "discovery")
            telemetry.start()
            telemetry.record("entry", {"subject": b"\2" * 33})
            self.successResultOf(telemetry.stop())
            found = {row["type"]: row for row in rows(directory)}
            told.append((found["start"]["names"], found["entry"]["subject"], found["start"]["producer"]))
        spaces, subjects, producers = zip(*told, strict=True)
        self.assertEqual((spaces[0], subjects[0]), (spaces[1], subjects[1]))
        self.assertEqual((len(set(spaces)), len(set(subjects)), len(set(producers))), (3, 3, 4))
        self.assertEqual((spaces[3], subjects[3]), ("clear", "02" * 33))

    def test_a_secret_that_others_may_read(self) -> None:
        secret = self.directory / "fleet"
        secret.write_bytes(bytes(32))
        for mode, size, text in ((0o640, 32, "chmod 600"), (0o600, 31, "not 31"), (0o600, 33, "not more")):
            secret.write_bytes(bytes(size))
            secret.chmod(mode)
            error = self.assertRaises(DmsgError, TelemetrySettings(self.directory / "t", secret=secret).prepare)
            self.assertIn(text, str(error))

    def test_a_heartbeat_each_minute_and_a_last_one(self) -> None:
        telemetry, clock = self.start()
        telemetry.loads.append(lambda: {"sessions": 3})
        self.pass_time(clock, 130)
        self.successResultOf(telemetry.stop())
        beats = [row for row in rows(self.directory) if row["type"] == "heartbeat"]
        self.assertEqual([beat["interval_ms"] for beat in beats], [60_000, 60_000, 10_000])
        self.assertEqual({beat["sessions"] for beat in beats}, {3})
        self.assertEqual({beat["lost"] for beat in beats}, {0})
        self.assertEqual([row["type"] for row in rows(self.directory)][0::6], ["start", "segment_end"][:1])
        self.assertFalse(clock.getDelayedCalls())

    def test_lag_is_how_late_a_timer_was(self) -> None:
        telemetry, clock = self.start()
        clock.advance(1)
        clock.advance(4)  # A reactor turn took three seconds too long.
        telemetry.write_heartbeat()
        self.successResultOf(telemetry.stop())
        self.assertEqual([row["lag_ms"] for row in rows(self.directory) if row["type"] == "heartbeat"], [3000, 0])

    def test_repeated_events_are_summed_per_minute(self) -> None:
        telemetry, clock = self.start()
        for number in range(1000):
            telemetry.record_repeated("transport_refuse", ("a", "x"), {"reason": "x"}, bytes([number % 7]))
        telemetry.record_repeated("transport_refuse", ("b", "x"), {"reason": "x"})
        self.pass_time(clock, 61)
        self.successResultOf(telemetry.stop())
        refused = [row for row in rows(self.directory) if row["type"] == "transport_refuse"]
        self.assertEqual([row["n"] for row in refused], [1, 1, 999])
        self.assertEqual(refused[2]["targets"], 7)

    def test_kinds_of_repeated_events_are_bounded(self) -> None:
        self.patch(service_module, "REPEATS_LIMIT", 10)
        telemetry, _ = self.start()
        for number in range(100):
            for _ in range(3):
                telemetry.record_repeated("handshake_fail", (number,), {"reason": "x"})
        self.assertEqual(len(telemetry._repeated), 10)
        self.successResultOf(telemetry.stop())
        self.assertEqual(sum(row["n"] for row in rows(self.directory) if row["type"] == "handshake_fail"), 300)

    def test_a_directory_that_cannot_be_used(self) -> None:
        (self.directory / "file").write_text("")
        settings = TelemetrySettings(self.directory / "file")
        self.assertRaises(DmsgError, Telemetry, Clock(), settings, "server")


class SchemaTests(SynchronousTestCase):
    """The contract and its page."""

    def test_the_page_shows_the_schema(self) -> None:
        page = Path(__file__).parents[2] / "docs" / "pipeline" / "events.md"
        self.assertIn(markdown(), page.read_text())

    def test_every_type_of_event_is_known_once(self) -> None:
        self.assertEqual(len(EVENT), len({event for event in EVENT}))
        names = [field.name for field in columns()]
        self.assertEqual(len(names), len(set(names)))
