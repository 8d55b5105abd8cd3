"""Files that a search reads: what is known about their contents, and the columns of chosen rows."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import file_hashes, file_texts, functions as F
from dmsg.analytics.data_files import File
from dmsg.analytics.file_columns import Budget, FileColumns, Selection
from dmsg.analytics.file_hashes import FileHashes, short_hashes
from dmsg.analytics.file_texts import FileTexts
from dmsg.analytics.limited_cache import UNUSED_SECONDS, LimitedCache
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_rows import MemoryRows


class FileTextsTests(SynchronousTestCase):
    """Files with different servers, without Spark."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        for name, servers in (("one", ["a", "b", "a", None]), ("two", ["c"]), ("none", [None])):
            pq.write_table(pa.table({"server": pa.array(servers, pa.string())}), self.root / name, use_dictionary=True)
        pq.write_table(pa.table({"server": ["d", "e"]}), self.root / "plain", use_dictionary=False)
        self.texts = FileTexts(pafs.SubTreeFileSystem(str(self.root), pafs.LocalFileSystem()))

    def found(self, *texts: str, column: str = "server") -> list[str]:
        names = ("none", "one", "plain", "two")
        return [name for name in names if self.texts.can_contain(name, column, pa.array(texts, pa.string()))]

    def test_only_files_with_a_text_can_contain_it(self) -> None:
        for _ in range(2):
            self.assertEqual(self.found("a"), ["one"])
            self.assertEqual(self.found("b", "c"), ["one", "two"])
            self.assertEqual(self.found("e"), ["plain"])
            self.assertEqual(self.found("f"), [])
            self.assertEqual(self.found(), [])
            self.assertEqual(self.found("a", column="absent"), [])

    def test_a_file_is_read_once(self) -> None:
        with patch.object(pq.ParquetFile, "read", autospec=True, side_effect=pq.ParquetFile.read) as read:
            self.found("a")
            self.found("b")
            self.assertEqual(read.call_count, 4)

    def test_texts_in_memory_are_limited(self) -> None:
        """A file with too many texts can contain any; the texts of further files are read again each time."""
        with patch.object(file_texts, "MAX_TEXTS_OF_FILE", 1):
            self.assertEqual(self.found("c"), ["one", "plain", "two"])
        with patch.object(file_texts, "MAX_KEPT_TEXTS", 0):
            self.setUp()
            for _ in range(2):
                self.assertEqual(self.found("c"), ["two"])
            self.assertFalse(self.texts._kept)


class FileHashesTests(SynchronousTestCase):
    """Files with the names of different transports, without Spark."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.names = [f"{number:032x}" for number in range(300)]
        for place, name in enumerate(("one", "two")):
            pq.write_table(pa.table({"transport": [*self.names[place::2], None]}), self.root / name)
        pq.write_table(pa.table({"server": ["a"]}), self.root / "none")
        pq.write_table(pa.table({"transport": ["short", self.names[0]]}), self.root / "short")
        self.clock = 0.0
        storage = pafs.SubTreeFileSystem(str(self.root), pafs.LocalFileSystem())
        self.hashes = FileHashes(storage, lambda: self.clock)

    def found(self, *names: str) -> list[str]:
        wanted = short_hashes(pa.array(names, pa.string()))
        return [file for file in ("none", "one", "short", "two") if self.hashes.can_contain(file, "transport", wanted)]

    def reads(self, *names: str) -> tuple[list[str], int]:
        """Return what is found, and how many files were read."""
        with patch.object(pq.ParquetFile, "read", autospec=True, side_effect=pq.ParquetFile.read) as read:
            return self.found(*names), read.call_count

    def test_files_are_read_at_the_second_search_only(self) -> None:
        wanted = self.names[4]
        self.assertEqual(self.reads(wanted), (["none", "one", "short", "two"], 0))
        self.assertEqual(self.reads(wanted), (["one", "short"], 3))
        self.assertEqual(self.reads(wanted), (["one", "short"], 0))
        self.assertEqual(self.found(*self.names[3:5]), ["one", "short", "two"])
        self.assertEqual(self.found(), ["short"])

    def test_a_short_name_can_be_in_any_file(self) -> None:
        self.found()
        self.assertEqual(self.found("short", self.names[4]), ["none", "one", "short", "two"])

    def test_hashes_of_texts_of_several_lengths(self) -> None:
        texts = [name[:length] for name in self.names for length in (20, 23, 32)]
        # The first 20 bytes are the same in all names.
        hashes = short_hashes(pa.array([*texts, None, *texts]))
        assert hashes is not None
        self.assertEqual(len(hashes), 2 + 300)
        self.assertEqual(hashes.type, pa.int32())
        self.assertEqual(short_hashes(pa.array([*texts[1:], None])[1:]), short_hashes(pa.array(texts[2:])))

    def test_another_thread_can_remove_what_is_known(self) -> None:
        """The file is then read again, even if the value was there a moment before."""
        wanted = self.names[4]
        self.found(wanted)
        self.found(wanted)
        texts = FileTexts(pafs.SubTreeFileSystem(str(self.root), pafs.LocalFileSystem()))
        server = pa.array(["a"])
        self.assertTrue(texts.can_contain("none", "server", server))
        with patch.object(LimitedCache, "__getitem__", side_effect=KeyError):
            self.assertEqual(self.reads(wanted), (["one", "short"], 3))
            self.assertTrue(texts.can_contain("none", "server", server))

    def test_too_many_hashes_are_not_kept(self) -> None:
        with patch.object(file_hashes, "MAX_KEPT_HASHES", 160):
            self.setUp()
        self.found()
        wanted = self.names[4]
        self.assertEqual(self.reads(wanted), (["one", "short"], 3))
        self.assertEqual(self.reads(wanted), (["one", "short"], 1))
        # After a while, hashes that were not used make room.
        self.clock += UNUSED_SECONDS
        self.assertFalse(self.hashes.can_contain("two", "transport", short_hashes(pa.array([wanted]))))
        (self.root / "two").unlink()
        self.assertFalse(self.hashes.can_contain("two", "transport", short_hashes(pa.array([wanted]))))


class LimitedCacheTests(SynchronousTestCase):
    """Values with a limit for all of them together."""

    def setUp(self) -> None:
        self.clock = 0.0
        self.cache = LimitedCache[int](10, lambda: self.clock)

    def keys(self) -> list[str]:
        return [name for name in "abcd" if (name, "") in self.cache]

    def add(self, name: str, size: int) -> None:
        self.cache.add((name, ""), size, size)

    def test_values_in_use_stay(self) -> None:
        self.add("a", 6)
        self.add("b", 4)
        self.add("c", 1)
        self.assertEqual(self.keys(), ["a", "b"])
        self.assertEqual(self.cache["a", ""], 6)
        self.assertRaises(KeyError, self.cache.__getitem__, ("c", ""))

    def test_the_value_that_was_not_used_for_longest_makes_room(self) -> None:
        self.add("a", 5)
        self.add("b", 5)
        self.clock += UNUSED_SECONDS / 2
        self.cache["a", ""]
        self.clock += UNUSED_SECONDS / 2
        self.add("c", 5)
        self.assertEqual(self.keys(), ["a", "c"])
        self.add("d", 1)
        self.assertEqual(self.keys(), ["a", "c"])

    def test_a_value_is_replaced(self) -> None:
        self.add("a", 9)
        self.add("a", 4)
        self.add("b", 6)
        self.assertEqual((self.keys(), self.cache["a", ""]), (["a", "b"], 4))


class FileColumnsTests(SynchronousTestCase):
    """Columns of chosen rows of a file, without Spark."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        names = pa.array(["a", "b", "a", "c"])
        self.rows = pa.table({"name": names.dictionary_encode(), "number": pa.array([1, 2, 3, 4], pa.int64())})
        pq.write_table(self.rows, self.root / "one", row_group_size=2)

    def columns(self, selection: Selection, budget: int = 1000) -> MemoryRows:
        storage = pafs.SubTreeFileSystem(str(self.root), pafs.LocalFileSystem())
        found = FileColumns(storage, [File("one", 1, {}, 4)], Budget(budget), selections={"one": selection})
        return found.rows(pa.schema([("name", pa.string()), ("number", pa.int64()), ("absent", pa.bool_())]))

    def test_only_chosen_rows_are_returned(self) -> None:
        for groups, chosen, names, numbers in (
            (None, [True, False, False, True], ["a", "c"], [1, 4]),
            ([1], [False, True], ["c"], [4]),
            ([0, 1], [False, True, True, False], ["b", "a"], [2, 3]),
        ):
            rows = self.columns(Selection(groups, pa.array(chosen)))
            self.assertEqual((rows.column("name").to_pylist(), rows.column("number").to_pylist()), (names, numbers))
            self.assertEqual(rows.column("absent").to_pylist(), [None] * len(names))

    def test_only_row_groups_with_chosen_rows_are_read(self) -> None:
        original = pq.ParquetFile.read_row_groups
        with patch.object(pq.ParquetFile, "read_row_groups", autospec=True, side_effect=original) as read:
            self.columns(Selection([1], pa.array([False, True]))).column("number")
        self.assertEqual(read.call_args.args[1], [1])

    def test_known_columns_are_not_read_again(self) -> None:
        rows = self.columns(Selection([1], pa.array([False, True]), {"name": pa.array(["known"])}))
        self.assertEqual(rows.column("name").to_pylist(), ["known"])
        self.assertEqual(rows.column("number").to_pylist(), [4])

    def test_chosen_rows_count_in_the_budget(self) -> None:
        chosen = pa.array([True, False, False, False])
        self.assertEqual(self.columns(Selection(None, chosen), budget=16).column("number").to_pylist(), [1])
        self.assertRaises(NotInMemory, self.columns(Selection(None, chosen), budget=7).column, "number")
        known = Selection(None, chosen, {"name": pa.array(["a long name"])})
        self.assertRaises(NotInMemory, self.columns(known, budget=7).column, "name")

    def test_a_column_of_no_rows_is_not_read(self) -> None:
        """A join that leaves no rows has typed columns, as if they had been read."""
        rows = self.columns(Selection(None, pa.array([True] * 4)))
        (self.root / "one").unlink()
        nothing = MemoryRows.of(pa.table({"key": pa.array([], pa.int64())}))
        left = (
            rows.withColumn("key", F.lit(1).cast("long"))
            .join(nothing, "key")
            .unionByName(rows.withColumn("key", F.lit(1).cast("long")).join(nothing, "key"))
        )
        self.assertEqual(left.column("number"), pa.array([], pa.int64()))
        self.assertEqual(left.where(F.col("name") == "a").column("name"), pa.array([], pa.string()))
