"""Files and tables in object stores, read and written by tasks with delta-rs. The store of these tests is delta-rs's
own for local files; ``s3_run`` has the same with S3.
"""

from __future__ import annotations

import pickle
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import object_stores
from dmsg.analytics.intake import Converted, LeftToSpark, convert_files
from dmsg.analytics.object_stores import (
    MAX_REASON,
    PREFIXES,
    StoreError,
    StoreReader,
    StoreSettings,
    one_line,
    store_of,
)
from dmsg.analytics.parquet import Part, read_part
from dmsg.analytics.sealed_files import Sealed, Target
from tests.analytics.support import DAY, NOW, S1, Boot, write_file

NOW_MS = int(NOW.timestamp() * 1000)
KEYS = {"AWS_ACCESS_KEY_ID": "key-4711", "AWS_SECRET_ACCESS_KEY": "secret-4711"}


def no_spark() -> Any:
    """Fail, because a test here starts no Spark."""
    raise AssertionError("Spark is not needed")


class StoreCase(SynchronousTestCase):
    """Test case with a directory that delta-rs takes for an object store."""

    def setUp(self) -> None:
        changed = patch.dict(PREFIXES, {"file": "AWS_"})
        changed.start()
        self.addCleanup(changed.stop)
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir(parents=True)
        self.settings = StoreSettings(KEYS)

    def uri(self, name: str) -> str:
        return f"file://{self.root}/{name}"


class SettingsTests(StoreCase):
    """Settings that Spark sends to tasks."""

    def test_tasks_get_the_variables_of_stores_only(self) -> None:
        others = {"HOME": "/", "GOOGLE_SERVICE_ACCOUNT_KEY": "g", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
        others["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = "http://169.254.170.2/"
        settings = pickle.loads(pickle.dumps(StoreSettings(KEYS | others)))
        given: list[tuple[str, dict[str, str]]] = []

        class Handler:
            def __init__(self, uri: str, options: dict[str, str]) -> None:
                given.append((uri, options))

        with patch("deltalake.fs.DeltaStorageHandler", Handler), patch("pyarrow.fs.PyFileSystem"):
            settings.file_system("s3a://bucket/tables")
            settings.file_system("gs://bucket")
        self.assertEqual(
            given,
            [
                ("s3a://bucket/tables", KEYS | object_stores.RETRIES),
                ("gs://bucket", {"GOOGLE_SERVICE_ACCOUNT_KEY": "g"} | object_stores.RETRIES),
            ],
        )

    def test_keys_are_not_printed(self) -> None:
        target = Target("/out", "run==spool.0.x", "spool", 0, NOW_MS, False, self.settings)
        for text in (str(self.settings), repr(self.settings), repr(target), repr(StoreReader(self.settings))):
            self.assertNotIn("4711", text)

    def test_stores_that_only_spark_can_access(self) -> None:
        self.assertIsNone(self.settings.lack("s3a://bucket/file"))
        self.assertIn("AZURE_", self.settings.lack("abfss://container@account/file") or "")
        self.assertIn("AWS_", StoreSettings({}).lack("s3a://bucket/file") or "")
        for uri in ("hdfs://host/file", "ftp://host/file", "://", "unknown"):
            self.assertIn("only Spark", self.settings.lack(uri) or "", uri)
        self.assertEqual(store_of("abfss://container@account/a/b://c"), "abfss://container@account")


class ReaderTests(StoreCase):
    """Whole files of a store."""

    def setUp(self) -> None:
        super().setUp()
        (self.root / "file").write_bytes(b"hello")
        self.reader = StoreReader(self.settings)

    def refusal(self, name: str, limit: int = 5) -> str:
        return str(self.assertRaises(StoreError, self.reader.read, self.uri(name), limit))

    def test_files_that_cannot_be_read_do_not_hide_others(self) -> None:
        self.assertEqual(self.reader.read(self.uri("file"), 5), b"hello")
        self.assertIn("too large", self.refusal("file", 4))
        self.assertIn("not found", self.refusal("absent"))
        self.assertEqual(self.reader.failures, {})
        self.assertEqual(self.reader.read(self.uri("file"), 5), b"hello")

    def test_names_that_delta_rs_would_change(self) -> None:
        """It escapes some characters, and would read another file."""
        (self.root / "a%25").write_bytes(b"other")
        for name in (
            "a%",
            "a?",
            "a*",
            "a[1]",
            "a|b",
            "a~b",
            "a#b",
            "a\nb",
            "a//b",
            "./file",
            "../file",
            "a/",
            "{x}",
            "\u00fc",
        ):
            self.assertIn("such a name", self.refusal(name), name)
        for name in ("sp ace/x=1/.a", "a..b", "...", "a:b,c@d+e"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(name.encode())
            self.assertEqual(self.reader.read(self.uri(name), 20), name.encode())

    def test_a_store_that_does_not_answer_is_tried_once(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{closed.getsockname()[1]}"
            settings = StoreSettings({**KEYS, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"})
            with patch.dict(object_stores.RETRIES, {"max_retries": "0"}):
                reader = StoreReader(settings)
                with patch.object(settings, "file_system", wraps=settings.file_system) as opened:
                    for name in ("a", "b"):
                        self.assertRaises(StoreError, reader.read, f"s3a://bucket/{name}", 5)
                self.assertEqual(opened.call_count, 1)
        (failure,) = reader.failures.values()
        self.assertEqual(failure.store, "s3a://bucket")
        self.assertRegex(failure.reason, r"Generic S3 error.*/bucket/a .*refused")
        self.assertNotIn("\x1b", failure.reason)
        self.assertNotIn("4711", failure.reason)

    def test_machines_without_deltalake_leave_files_to_spark(self) -> None:
        with patch.dict(sys.modules, {"deltalake.fs": None}):
            self.assertIn("deltalake", self.refusal("file"))
        self.assertEqual(set(self.reader.failures), {"file://"})

    def test_reasons_have_no_queries_and_one_line(self) -> None:
        error = OSError(
            "Generic error\n   \x1b[31m\u21b3\x1b[0m HEAD https://host/x?sig=4711&se=1 failed\n\n" + "x" * 999
        )
        text = one_line(error)
        self.assertTrue(text.startswith("Generic error: HEAD https://host/x failed xxx"), text)
        self.assertEqual(len(text), MAX_REASON)


class ConversionTests(StoreCase):
    """Conversion of files by this process, as by a task."""

    def setUp(self) -> None:
        super().setUp()
        boot = Boot(S1, "b")
        boot.beats(DAY, "10:00:00", 5, sessions=1)
        (self.root / "out").mkdir()
        for number, garbage in enumerate(([], [b"hello"], [])):
            write_file(self.root / f"events-{number}.jsonl.gz", boot.rows, garbage=garbage)

    def convert(self, files: str, out: str, left: LeftToSpark | None = None) -> Converted:
        names = [f"events-{number}.jsonl.gz" for number in range(4)]
        sealed = [(Sealed(f"name:{name}", f"{files}/{name}"), 100) for name in names]
        target = Target(out, "run==spool.0.x", "spool", 0, NOW_MS, False, self.settings)
        return convert_files(no_spark, sealed, target, here=True, left=left)

    def rows(self, part: Part) -> Any:
        return read_part(StoreSettings(KEYS).file_system(self.uri("out")), part.path).to_pylist()

    def test_files_and_tables_in_stores_have_the_rows_of_local_ones(self) -> None:
        with patch("os.cpu_count", return_value=1):
            local = self.convert(str(self.root), str(self.root / "out"))
            self.assertEqual(
                [(dict(one.values)["family"], one.rows) for one in local.parts],
                [("beat", 10), ("life", 2), ("file", 2)],
            )
            refused = ["name:events-1.jsonl.gz", "name:events-3.jsonl.gz"]
            self.assertEqual([one.uri for one in local.refused], refused)
            for files, out in (
                (self.uri("")[:-1], str(self.root / "out")),
                (str(self.root), self.uri("out")),
                (self.uri("")[:-1], self.uri("out")),
            ):
                found = self.convert(files, out)
                self.assertEqual([one.uri for one in found.refused], refused)
                self.assertEqual(len(found.parts), len(local.parts))
                for one, other in zip(found.parts, local.parts, strict=True):
                    self.assertNotEqual(one.path, other.path)
                    self.assertEqual((one.rows, one.values), (other.rows, other.values))
                    self.assertEqual((one.first, one.last, one.size), (other.first, other.last, other.size))
                    self.assertEqual(self.rows(one), self.rows(other))

    def test_a_store_is_left_to_spark_with_one_line(self) -> None:
        left = LeftToSpark()
        out = str(self.root / "out")
        with self.assertLogs("dmsg.analytics.intake", "WARNING") as said:
            self.settings = StoreSettings({})
            for _ in range(2):
                found = self.convert(self.uri("")[:-1], out, left)
                self.assertEqual((found.parts, len(found.refused)), ([], 4))
            self.assertEqual(self.convert(str(self.root), self.uri("out"), left).parts, [])
        self.assertEqual(len(said.output), 1, said.output)
        self.assertIn("Spark reads the files of file://, because Arrow cannot access it: no", said.output[0])
        # The store of the files has no influence on files in a directory.
        self.assertEqual(len(self.convert(str(self.root), out, left).parts), 3)

    def test_a_store_that_fails_is_left_to_spark_from_then_on(self) -> None:
        left = LeftToSpark()
        error = PermissionError("403 Forbidden")
        with patch.object(StoreSettings, "file_system", side_effect=error) as opened:
            with self.assertLogs("dmsg.analytics.intake", "WARNING") as said:
                for _ in range(3):
                    found = self.convert(self.uri("")[:-1], str(self.root / "out"), left)
                    self.assertEqual((found.parts, len(found.refused)), ([], 4))
        self.assertEqual(len(said.output), 1, said.output)
        self.assertIn("403 Forbidden", said.output[0])
        self.assertLessEqual(opened.call_count, 4)

    def test_one_failure_does_not_leave_a_store_to_spark(self) -> None:
        """Other files of the store were read."""
        left = LeftToSpark()
        calls = [0]
        real = StoreReader.read

        def read(reader: StoreReader, uri: str, limit: int) -> bytes:
            calls[0] += 1
            if calls[0] == 2:
                with patch.object(StoreSettings, "file_system", side_effect=OSError("503 Slow Down")):
                    reader._systems.clear()
                    return real(reader, uri, limit)
            return real(reader, uri, limit)

        with patch("os.cpu_count", return_value=1), patch.object(StoreReader, "read", read):
            found = self.convert(self.uri("")[:-1], str(self.root / "out"), left)
        self.assertEqual([one.uri[-10] for one in found.refused], ["1", "2", "3"])
        self.assertNotIn("file://", left)
        self.assertEqual(len(self.convert(self.uri("")[:-1], str(self.root / "out"), left).refused), 2)
