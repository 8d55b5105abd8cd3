"""Reading and writing of the tables with Spark.

Spark writes new rows to files in a new directory below the table. The rows become part of the table with the
transaction that adds these files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from secrets import token_hex
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dmsg.analytics import functions as F, silver
from dmsg.analytics.affected_rows import with_columns
from dmsg.analytics.changes import rows_of_day
from dmsg.analytics.data_files import File, RowCount, run_directory
from dmsg.analytics.delta import Delta
from dmsg.analytics.delta_log import APPLICATION
from dmsg.analytics.memory_tables import OF_EVENTS
from dmsg.analytics.parquet import Part, arrow_schema, is_of_arrow, read_part, read_small, write_part
from dmsg.analytics.rewrites import Rewrite, in_files, kept_rows
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import REGISTER, write_options
from dmsg.analytics.session import Spark, session_of
from dmsg.analytics.store import BRONZE_KEY, FILES, Store, unrefined
from dmsg.analytics.views import VIEWS

MERGED_FILE = 128 * 1024 * 1024
"""Approximate maximum size in bytes of a file that Spark makes by merging small ones."""
HELD_ROWS = 50_000
"""Maximum number of rows that Arrow reads into this process. With more rows, Spark reads the files. Spark takes ten
times as much CPU to open a file, and a query of rows in memory needs no shuffle.
"""
HELD_BYTES = 64 * 1024 * 1024
"""Maximum size in bytes of the rows that Arrow reads into this process. :data:`HELD_ROWS` alone does not limit the
memory, because producers choose the lengths of texts."""
_READ = {"__globPaths__": "false"}
"""Reader options that turn off glob patterns, because a file name may contain characters such as ``*`` or ``[``."""


def with_types(rows: DataFrame, schema: StructType) -> DataFrame:
    """Convert rows to the columns and types of a table."""
    # The casts are SQL text, which needs one call to Java. A column or type made in Python needs dozens of calls.
    return rows.selectExpr(*columns_of(schema, schema.names))


def columns_of(schema: StructType, there: Container[str]) -> list[str]:
    """Return SQL expressions for the columns of a table, with their types. The expression of a missing column is NULL.

    :param there: names of the columns that are not missing.
    """
    return [
        f"CAST({f'`{one.name}`' if one.name in there else 'NULL'} AS {one.dataType.simpleString()}) AS `{one.name}`"
        for one in schema.fields
    ]


class Lake(Store):
    """Tables under one directory or URI, read and written by Spark."""

    def __init__(self, spark: Spark, out: str) -> None:
        """Open the tables under ``out``.

        :raises LakeError: the path cannot hold tables.
        """
        super().__init__(out)
        self._spark = spark
        self.held: Claim | None = None
        """Claim of the run that is writing, or None. Before each commit, its validity is checked."""

    @property
    def spark(self) -> SparkSession:
        """Spark session, which is started if necessary."""
        return session_of(self._spark)

    def write(
        self, rows: DataFrame, layer: str, name: str, run: int, days: Iterable[str] | None = None, *, more: bool = False
    ) -> None:
        """Replace rows of a table: those of ``days`` if the table is partitioned by day, otherwise all rows.

        :param run: number of the run.

        :param more: append the rows to the table instead.
        :raises LakeError: another run has written to the table.
        """
        table = self.table(layer, name)
        replaced: Mapping[str, Iterable[str]] | None = None
        if not more:
            replaced = {"dt": days} if table.partitions and days is not None else {}
        self._commit(rows, table, str(run), run, replaced=replaced)

    def put(
        self, rows: pa.Table, layer: str, name: str, run: int, days: Iterable[str] | None = None, *, more: bool = False
    ) -> None:
        """Write rows from memory, without Spark. Otherwise this method does the same as :meth:`write`.

        :param rows: rows with the columns and types of the table.
        """
        table = self.table(layer, name)
        replaced = None if more else {"dt": days} if table.partitions and days is not None else {}
        found = {"": [rows]}
        if table.partitions:
            found = {str(day): [rows_of_day(rows, str(day))] for day in pc.unique(rows["dt"]).to_pylist()}
        self._put_tables(table, found, run, replaced)

    def put_by_day(self, rows: Mapping[str, Iterable[pa.Table]], layer: str, name: str, run: int) -> None:
        """Replace the rows of some days, one part of the rows of a day at a time. Otherwise as :meth:`put`."""
        self._put_tables(self.table(layer, name), rows, run, {"dt": list(rows)})

    def replace_some(
        self, rows: pa.Table, rewrites: Sequence[Rewrite], layer: str, name: str, run: int, days: Iterable[str]
    ) -> None:
        """Add rows to a table with days, and rewrite those of its files that contain rows to replace.

        :param rows: as for :meth:`put`.
        :param rewrites: files to rewrite without the replaced rows. Files of days that are not in ``days`` are ignored.
        """
        table = self.table(layer, name)
        found, gone = {}, []
        for day in days:
            own = [one for one in rewrites if one.file.values["dt"] == day]
            found[day] = chain(kept_rows(table, own), [rows_of_day(rows, day)])
            gone += [one.file for one in own]
        self._put_tables(table, found, run, None, gone)

    def _put_tables(
        self,
        table: Delta,
        rows: Mapping[str, Iterable[pa.Table]],
        run: int,
        replaced: Mapping[str, Iterable[str]] | None,
        gone: Sequence[File] = (),
    ) -> None:
        """Write rows in one transaction.

        :param rows: rows by day. The key of a table without days is an empty text.
        :param replaced: as for :meth:`~dmsg.analytics.delta_log.DeltaLog.commit`.
        :param gone: files to remove from the table.
        """
        table.ensure()
        directory, files = run_directory(str(run)) + token_hex(4), table.storage()
        parts = []
        for day, tables in rows.items():
            for one in in_files(tables):
                values = {"dt": day} if day else {}
                parts.append(write_part(files, one.drop_columns(list(values)), directory, values))
        if self.held is not None:
            self.held.check()
        table.commit(None, run, replaced=replaced, earlier_attempt=str(run), parts=parts, gone=gone)

    def put_parts(
        self,
        parts: Sequence[Part],
        rows: pa.Table,
        more: DataFrame | None,
        layer: str,
        name: str,
        run: int,
        days: Iterable[str],
    ) -> None:
        """Replace the rows of a table with days by rows that tasks of Spark have computed.

        :param parts: files that the tasks have written.
        :param rows: further rows, in memory.
        :param more: further rows, which Spark has to compute; None if there are none.
        """
        table, chosen = self.table(layer, name), list(days)
        table.ensure()
        directory, files = run_directory(str(run)) + token_hex(4), table.storage()
        found = list(parts)
        for day in chosen:
            of_day = in_files([rows_of_day(rows, day)])
            found += [write_part(files, one.drop_columns(["dt"]), directory, {"dt": day}) for one in of_day]
        self._commit(more, table, str(run), run, replaced={"dt": chosen}, parts=found)

    def batch_directory(self, origin: str, number: int) -> str:
        """Return the path of a new directory below bronze for the files of a batch."""
        return run_directory(f"{origin}.{number}") + token_hex(4)

    def has_batch(self, origin: str, number: int) -> bool:
        """Whether bronze contains this batch of a source, or a later one."""
        return self.batch(origin) >= number

    def add_bronze(self, rows: DataFrame | None, origin: str, number: int, *, parts: Sequence[Part] = ()) -> None:
        """Append a batch of lines to bronze. If a killed run has written the batch before, replace it.

        :param rows: lines for Spark to write.
        :param origin: name of the source.
        :param number: number of the batch.
        :param parts: files that Arrow has written to a :meth:`batch_directory`.
        """
        table = self.table("", "bronze")
        self._commit(rows, table, f"{origin}.{number}", number, application=origin, parts=parts)

    def _commit(
        self,
        rows: DataFrame | None,
        table: Delta,
        label: str,
        number: int,
        *,
        replaced: Mapping[str, Iterable[str]] | None = None,
        application: str = APPLICATION,
        parts: Sequence[Part] = (),
    ) -> None:
        directory = None
        if rows is not None:
            directory = run_directory(label) + token_hex(4)
            self._write(rows, table, directory)
        if self.held is not None:
            self.held.check()
        table.commit(
            directory,
            number,
            application=application,
            replaced=replaced,
            earlier_attempt=label,
            parts=parts,
            count=partial(self._count, table),
        )

    @staticmethod
    def _write(rows: DataFrame, table: Delta, directory: str) -> None:
        writer = with_types(rows, table.schema).write.options(**write_options(table.schema))
        if table.partitions:
            writer = writer.partitionBy(*table.partitions)
        writer.parquet(f"{table.uri}/{directory}")

    def _count(self, table: Delta, directory: str) -> dict[str, RowCount]:
        """Count the rows of each file that Spark wrote to a directory. The keys of the result are paths below the
        table."""
        uri = f"{table.uri}/{directory}"
        times = [F.min("ts"), F.max("ts")] if "ts" in table.schema.fieldNames() else [F.lit(None), F.lit(None)]
        reader = self.spark.read.options(**_READ, basePath=uri).schema(table.schema)
        found = reader.parquet(uri).groupBy("_metadata.file_path").agg(F.count(F.lit(1)), *times).collect()
        return {directory + unquote(path).rpartition(directory)[2]: tuple(counts) for path, *counts in found}

    def _merge_small(self, table: Delta, least: int, is_mergeable: Callable[[File], bool]) -> None:
        table.merge_small(least, is_mergeable, partial(self._merge_files, table))

    def _merge_files(self, table: Delta, files: Sequence[File]) -> list[Part]:
        """Write the rows of small files to few files."""
        if self.held is not None:
            self.held.check()
        chosen = {file.path for file in files}
        # The name must not begin like the directory of a batch or a run. If a batch or run is repeated, files in such
        # directories are replaced.
        directory = f"run==merged-{token_hex(4)}"
        count = -(-sum(file.size for file in files) // MERGED_FILE)
        self._write(self._rows(table, lambda file: file.path in chosen).coalesce(count), table, directory)
        return table.written_files(directory, partial(self._count, table))

    def _rows(self, table: Delta, is_wanted: Callable[[File], bool], version: int | None = None) -> DataFrame:
        """Return the rows of those files of a table for which ``is_wanted`` returns true."""
        files = [file for file in table.files(version) if is_wanted(file)]
        if (held := self.hold(table, files)) is not None:
            return self._of_memory(table, held)
        names = [f"`{name}`" for name in table.schema.fieldNames()]
        found: DataFrame | None = None
        # Spark derives the partition columns from the paths, which must all have the same depth. Files that delta-rs
        # has merged are one directory higher than the others, so Spark reads the two kinds separately.
        for own in (True, False):
            paths = [table.location(file) for file in files if file.path.startswith("run=") is own]
            if paths:
                reader = self.spark.read.options(**_READ, basePath=table.uri).schema(table.schema)
                rows = reader.parquet(*paths).selectExpr(*names)
                found = rows if found is None else found.unionByName(rows)
        assert found is not None
        return found

    @staticmethod
    def hold(table: Delta, files: Sequence[File]) -> pa.Table | None:
        """Read these files into memory, without the columns that no file has. Return None if there are too many rows,
        or if a file is damaged; then the caller lets Spark read the files, and Spark's error names the damaged file.
        """
        if sum(HELD_ROWS + 1 if file.rows is None else file.rows for file in files) > HELD_ROWS:
            return None
        schema, left = arrow_schema(table.schema), HELD_BYTES
        parts = [schema.empty_table()] if not files else []
        for file in files:
            rows = read_small(table.storage(), file.path, left)
            if rows is None:
                return None
            parts.append(with_columns(rows, schema, file.values, lacking=False))
            left -= parts[-1].nbytes
        return pa.concat_tables(parts, promote_options="default")

    def _of_memory(self, table: Delta, rows: pa.Table) -> DataFrame:
        # ``hold`` has left out the table's columns that are in none of the files. Spark adds them here, with NULL in
        # all rows. A bronze table may have dozens of such columns, and Spark computes only those that a query uses.
        there = StructType([one for one in table.schema.fields if one.name in rows.column_names])
        held = self.frame(rows.select(there.names), there)
        return held.selectExpr(*columns_of(table.schema, there.names))

    def read(self, layer: str, name: str, state: State, days: Iterable[str] | None = None) -> DataFrame:
        """Return the rows of a table in the version that belongs to ``state``.

        :param days: keep only the rows of these days.
        """
        if layer == "silver" and name in VIEWS:
            return self._view(name, state, days, OF_EVENTS[name])
        chosen = None if days is None else set(days)
        table = self.table(layer, name)
        return self._rows(
            table,
            lambda file: chosen is None or not file.values or file.values["dt"] in chosen,
            state.versions.get(f"{layer}/{name}"),
        )

    def frame(self, rows: pa.Table, schema: StructType | None = None) -> DataFrame:
        """Convert rows in memory to a Spark DataFrame, with one partition if there are at most :data:`HELD_ROWS` rows.

        :param schema: columns of the DataFrame; None for those of the rows.
        """
        # The chunks of the Arrow table are combined, because Spark makes a partition of each chunk, and was observed to
        # lose all chunks after an empty one.
        found = self.spark.createDataFrame(rows.combine_chunks(), schema)
        # Spark does not know that there is only one partition. With coalesce(1) it knows, and aggregates and joins
        # without a shuffle.
        return found.coalesce(1) if rows.num_rows <= HELD_ROWS else found

    def stored(self, layer: str, name: str, state: State, days: Iterable[str] | None = None) -> pa.Table:
        """Read the rows of a small table into memory without Spark, with the table's columns and types."""
        table = self.table(layer, name)
        schema, chosen = arrow_schema(table.schema), None if days is None else set(days)
        store = table.reading_storage()
        found = [
            with_columns(read_part(store, file.path), schema, file.values)
            for file in table.files(state.versions.get(f"{layer}/{name}"))
            if chosen is None or not file.values or file.values["dt"] in chosen
        ]
        return pa.concat_tables([schema.empty_table(), *found])

    def is_as_left(self, state: State) -> bool:
        """Whether every table still has the version that a run's state names. If not, a later run has written to a
        table."""
        return all(
            self.table(layer, name).version() == state.versions.get(f"{layer}/{name}")
            for layer, name in self.names()
            if layer and name != FILES.name
        )

    def days_of_lives(self, done: Mapping[str, int]) -> set[str]:
        """Return the days on which processes started or stopped, by the events that no run has refined yet.

        :param done: number of the last refined batch of each source.
        """
        table = self.table("", "bronze")
        files = [file for file in self.fresh_files(done) if file.values["family"] == "life"]
        ends = pa.array(["segment_end"])
        return {
            file.values["dt"]
            for file in files
            if not pc.all(
                pc.is_in(read_part(table.storage(), file.path, ["type"])["type"].cast(pa.string()), ends)
            ).as_py()
        }

    def accepted_receipts(self, state: State, days: Iterable[str] | None = None) -> DataFrame:
        """Return the accepted receipts of silver. If one end of a transport sent several receipts, each of them has a
        row."""
        return self._view("receipts", state, days, silver.accepted_receipts)

    def _view(
        self, name: str, state: State, days: Iterable[str] | None, select: Callable[[DataFrame], DataFrame]
    ) -> DataFrame:
        """Return the rows of a view. For a day with stored rows, these rows are read from the table. For any other day,
        ``select`` computes the rows from events.
        """
        stored = self.stored_days(name, state)
        bronze, family = self.table("", "bronze"), VIEWS[name].family
        chosen = None if days is None else set(days)

        def wanted(file: File) -> bool:
            day = file.values["dt"]
            return file.values["family"] == family and day not in stored and (chosen is None or day in chosen)

        rows = select(self._rows(bronze, wanted, state.versions.get(BRONZE_KEY)))
        if stored and (chosen is None or not stored.isdisjoint(chosen)):
            rows = rows.unionByName(
                self._rows(
                    self.table("silver", name),
                    lambda file: chosen is None or file.values["dt"] in chosen,
                    state.versions.get(f"silver/{name}"),
                )
            )
        return rows

    def clear(self, name: str, run: int, days: Iterable[str]) -> None:
        """Remove the stored rows of a view on these days, so that its rows are computed from events."""
        table = self.table("silver", name)
        table.ensure()
        chosen = set(days)
        if any(file.values["dt"] in chosen for file in table.files()):
            table.commit(None, run, replaced={"dt": chosen}, earlier_attempt=str(run))

    def bronze(self, families: Iterable[str] | None = None, days: Iterable[str] | None = None) -> DataFrame:
        """Return the lines in bronze.

        :param families: keep only these families of events.
        :param days: keep only these days.
        """
        some, of_days = (None if chosen is None else set(chosen) for chosen in (families, days))
        return self._rows(
            self.table("", "bronze"),
            lambda file: (
                (some is None or file.values["family"] in some) and (of_days is None or file.values["dt"] in of_days)
            ),
        )

    def fresh_lines(self, done: Mapping[str, int]) -> DataFrame:
        """Return the lines of the batches that no run has refined yet, without the lines that Arrow has read.

        :param done: number of the last refined batch of each source.
        """
        return self._rows(
            self.table("", "bronze"), lambda file: bool(unrefined(file, done)) and not is_of_arrow(file.path)
        )

    def fresh_files(self, done: Mapping[str, int]) -> list[File]:
        """Return the Parquet files of the batches that no run has refined yet."""
        return [file for file in self.table("", "bronze").files() if unrefined(file, done)]

    def register(self, done: Mapping[str, int]) -> pa.Table:
        """Return a row for each sealed file that Arrow has read and that no run has refined yet, with the columns of
        the table ``files``."""
        table = self.table("", "bronze")
        files = [file.path for file in table.files() if file.values["family"] == REGISTER and unrefined(file, done)]
        schema = arrow_schema(FILES.schema)
        found = [with_columns(read_part(table.storage(), path), schema, {}) for path in files]
        return pa.concat_tables([schema.empty_table(), *found])

    def names_of_files(self, state: State) -> Iterator[pa.Array]:
        """Return the names of the sealed files that finished and killed runs have read, some at a time."""
        known = self.table("silver", FILES.name)
        if state.run > 0:  # If no run has finished, all records are those of a killed first run, and do not count.
            for file in known.files(state.versions.get(f"silver/{FILES.name}")):
                yield read_part(known.storage(), file.path, ["file"])["file"].combine_chunks().cast(pa.string())
        yield self.register(state.batches)["file"].combine_chunks()
        table = self.table("", "bronze")
        for file in self.fresh_files(state.batches):
            if not is_of_arrow(file.path):
                names = pc.unique(read_part(table.storage(), file.path, ["file"])["file"]).to_pylist()
                yield pa.array([re.sub("^file:/+", "file:/", name) for name in names], pa.string())

    def unrefined(self, done: Mapping[str, int]) -> set[str]:
        """Return the sources that have lines which no run has refined."""
        return {origin for file in self.table("", "bronze").files() for origin in unrefined(file, done)}

    def batch(self, origin: str) -> int:
        """Return the number of the last batch of a source in bronze; -1 if there is none."""
        return self.table("", "bronze").transaction(origin)
