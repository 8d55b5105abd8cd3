"""Rows that the plans of a run read: with Spark, or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dmsg.analytics import bronze
from dmsg.analytics.broadcasts import Hint
from dmsg.analytics.copies import Copies
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_tables import MemoryTables, rows_of_table
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import GOLD, SILVER
from dmsg.analytics.store import NUMBERS, SUMS
from dmsg.analytics.table_plans import Read
from dmsg.analytics.table_writer import TableWriter


def schema_of(name: str) -> StructType:
    """Return the columns of a silver or gold table."""
    return {**SILVER, **GOLD, SUMS.name: SUMS, NUMBERS.name: NUMBERS}[name].schema


class RunRows:
    """Rows of the tables as a run sees them, with the rows that the run itself has written so far.

    :param state: state that the run will leave.
    :param hint: broadcast hint of the run's events.
    :ivar copies: copies of events, which the tables in memory leave out; None until the run has searched for them.
    :ivar in_memory: function that opens the tables of some days in memory. Its results are kept until :meth:`forget`.
    """

    def __init__(self, lake: Lake, state: State, writer: TableWriter, hint: Hint) -> None:
        self._lake = lake
        self._state = state
        self._writer = writer
        self._hint = hint
        self.copies: Copies | None = None
        self.in_memory = cache(self._open_in_memory)

    def leave_out(self, copies: Copies) -> None:
        """Leave out the copies of events in all tables that are opened in memory from now on."""
        self.copies = copies
        if copies.dropped:
            # Until now the events were read with their copies, because the counts of event numbers include the copies.
            self.forget()

    def forget(self) -> None:
        """Free the rows of the tables that were opened in memory."""
        self.in_memory.cache_clear()

    def events(self, family: str, days: Iterable[str], doubtful: DataFrame | None) -> DataFrame:
        """Return the events of a family on these days, each once.

        :param doubtful: rows of the table ``numbers`` of the buckets in which numbers occur twice; None if there are
            none.
        """
        rows = self._lake.bronze([family], days)
        return rows if doubtful is None else bronze.deduplicate(rows, doubtful, self._hint)

    def reader(self, days: Sequence[str] | None) -> Read:
        """Return a function that reads the tables with the rows that this run has written so far.

        :param days: limit the rows to these days; None for all.
        """

        # Opened tables are cached, because several queries read the same table, and Spark takes 0.1 s to open a table.
        @cache
        def read(name: str) -> DataFrame:
            if (collected := self._writer.collected_rows(name, days)) is not None:
                return self._lake.frame(collected, schema_of(name))
            return self._lake.read("gold" if name in GOLD else "silver", name, self._state, days)

        return read

    def _open_in_memory(self, days: tuple[str, ...] | None, wider_days: tuple[str, ...] = ()) -> MemoryTables:
        partial_days = set(wider_days).difference(days or ())
        dropped = None if self.copies is None else self.copies.dropped
        return MemoryTables(self._lake, self._state, wider_days or days, partial_days, dropped)

    def memory_reader(self, days: Sequence[str] | None, wider_days: Sequence[str] = ()) -> Read:
        """Return a function that reads tables into memory without Spark. The tables include the rows that this run has
        written so far. If there are too many rows, the function raises
        :class:`~dmsg.analytics.memory_columns.NotInMemory`.

        :param wider_days: the days, the day before each and the day after each; empty to read only the days themselves.
        """
        tables = self.in_memory(None if days is None else tuple(days), tuple(wider_days))

        @cache
        def read(name: str) -> DataFrame:
            if not wider_days and (collected := self._writer.collected_rows(name, days)) is not None:
                return rows_of_table(collected, schema_of(name))
            return tables.read(name)

        return read
