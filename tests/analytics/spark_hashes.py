"""Hashes of texts: those of both engines are equal, and rows are grouped by numbers that nobody can choose."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import functions as F
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.xxhash import xxhash64, xxhash64_of_texts
from tests.analytics.spark_memory import in_dictionaries
from tests.analytics.support import spark


def text_with_hash(first: str, wanted: int) -> str:
    """Return a text of 16 ASCII characters so that :func:`~dmsg.analytics.xxhash.xxhash64` of two texts is ``wanted``.

    :param first: the first of the two texts.
    """
    bits = 2**64 - 1
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

    def turn(number: int, by: int) -> int:
        return (number << by | number >> (64 - by)) & bits

    def before(number: int, by: int, factor: int) -> int:
        """Undo ``(found ^ found >> by) * factor``."""
        multiplied = found = number * pow(factor, -1, 2**64) & bits
        for _ in range(64 // by):
            found = multiplied ^ (found >> by)
        return found

    last = wanted & bits
    last ^= last >> 32
    last = before(before(last, 29, p3), 33, p2)
    after = turn((last - p4) * pow(p1, -1, 2**64) & bits, 37)
    start = (xxhash64((first,)) + p5 + 16) & bits
    for number in range(100_000):
        word = b"%08d" % number
        mixed = turn(int.from_bytes(word, "little") * p2 & bits, 31) * p1 & bits
        state = (turn(start ^ mixed, 27) * p1 + p4) & bits
        other = turn((after ^ state) * pow(p1, -1, 2**64) & bits, 33) * pow(p2, -1, 2**64) & bits
        text = word + other.to_bytes(8, "little")
        if text.isascii():
            return text.decode()
    raise AssertionError("there is no such text")


class HashTests(SynchronousTestCase):
    """Each hash by both engines."""

    def test_hashes_of_texts_of_any_length(self) -> None:
        random = Random(4)
        texts = ["".join(random.choices("abcü€\U0001f600", k=length)) for length in range(90)]
        rows = pa.table({"t": texts, "u": texts[::-1]})
        wanted = [F.xxhash64("t").alias("one"), F.xxhash64("t", "u").alias("two")]
        of_spark = spark().createDataFrame(rows).coalesce(1).select(*wanted).toArrow()
        memory = MemoryRows.of(rows).select(*wanted)
        for name in memory.columns:
            self.assertEqual(memory.column(name).to_pylist(), of_spark[name].to_pylist(), name)

    def test_many_texts_of_one_length_have_the_hashes_of_single_texts(self) -> None:
        """Arrow hashes them together."""
        random = Random(6)
        for length in (0, 1, 3, 4, 7, 8, 9, 31, 32, 33, 63, 64, 66, 90):
            texts = ["".join(random.choices("0123456789abcdef", k=length)) for _ in range(100)]
            mixed = [*texts, None, "x", *texts[:30], "ü" * 20]
            # A slice of a column has an offset.
            for rows in (pa.array(mixed), pa.array(["y", *mixed]).slice(1)):
                self.assertEqual(xxhash64_of_texts(rows).to_pylist(), [xxhash64((text,)) for text in mixed], length)

    def test_rows_are_grouped_by_one_number_as_by_the_columns(self) -> None:
        """NULL is a value of its own, and columns do not run into each other."""
        texts = ["a", "ab", "", None, "b", "a", "ab", None]
        rows = pa.table({"t": texts, "u": ["b", "", "ab", "ab", None, "b", "", "ab"], "place": [*range(8)]})
        wanted = [F.min("place").alias("first"), F.count(F.lit(1)).alias("rows")]
        engines: tuple[Any, ...] = (spark().createDataFrame(rows), MemoryRows.of(rows), in_dictionaries(rows))
        for engine in engines:
            found = engine.withColumn("key", F.grouping_key("t", "u")).groupBy("key").agg(*wanted)
            if isinstance(found, MemoryRows):
                groups = pa.table({name: found.column(name) for name in ("first", "rows")})
            else:
                groups = found.select("first", "rows").toArrow()
            numbers = [tuple(row.values()) for row in groups.to_pylist()]
            self.assertEqual(sorted(numbers), [(0, 2), (1, 2), (2, 1), (3, 2), (4, 1)])

    def test_nobody_can_choose_values_to_have_the_number_of_others(self) -> None:
        """Spark's hash without a secret can be inverted. So a server could choose the name of a closed transport to
        hide a lost transport of another server.
        """
        text = text_with_hash("b", xxhash64(("a", "t")))
        self.assertEqual(xxhash64(("b", text)), xxhash64(("a", "t")))
        rows = pa.table({"server": ["a", "b"], "transport": ["t", text]})
        for engine in (spark().createDataFrame(rows), MemoryRows.of(rows)):
            found = (
                engine.withColumn("key", F.grouping_key("server", "transport")).groupBy("key").agg(F.count(F.lit(1)))
            )
            self.assertEqual(found.count_rows if isinstance(found, MemoryRows) else found.count(), 2)
