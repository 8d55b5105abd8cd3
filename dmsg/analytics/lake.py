"""What Spark reads of the tables and writes to them.

What it writes goes to a directory of its own below the table, and counts from
the transaction on that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from secrets import token_hex

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dmsg.analytics.delta import APPLICATION, Delta, File, arrow_schema
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import QUARANTINE, write_options
from dmsg.analytics.store import BRONZE_KEY, Store, unrefined

_READ = {"__globPaths__": "false"}
"""Names of files are names, whatever characters are in them."""


def typed(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return the rows with the columns and types of a table."""
    # as text: a column or a type that is made in Python costs this process and Java dozens of calls each
    return rows.selectExpr(
        *[f"CAST(`{one.name}` AS {one.dataType.simpleString()}) AS `{one.name}`" for one in schema.fields]
    )


class Lake(Store):
    """The tables under one directory or URI, for Spark."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        """:raises LakeError: tables cannot be there."""
        super().__init__(out)
        self.spark = spark
        self.held: Claim | None = None
        """Claim of the run that writes; before each commit it is checked that no other run has taken over."""

    def write(
        self, rows: DataFrame, layer: str, name: str, run: int, days: Iterable[str] | None = None, *, more: bool = False
    ) -> None:
        """Write a table anew: those days of one that has days, else the whole.

        :param more: add to it instead.
        :raises LakeError: somebody else has written to it.
        """
        table = self.table(layer, name)
        replaces: Mapping[str, Iterable[str]] | None = None
        if not more:
            replaces = {"dt": days} if table.partitions and days is not None else {}
        self._commit(rows, table, str(run), run, replaces=replaces)

    def add_bronze(self, rows: DataFrame, origin: str, number: int, *, anew: bool = False) -> None:
        """Add a batch of lines, once: one that is there already is not written again.

        :param anew: it takes the place of one that is there already.
        """
        table = self.table("", "bronze")
        if anew or table.transaction(origin) < number:
            self._commit(rows, table, f"{origin}.{number}", number, application=origin)

    def _commit(
        self,
        rows: DataFrame,
        table: Delta,
        label: str,
        number: int,
        *,
        replaces: Mapping[str, Iterable[str]] | None = None,
        application: str = APPLICATION,
    ) -> None:
        again = f"run={label}."
        directory = again + token_hex(4)
        writer = typed(rows, table.schema).write.options(**write_options(table.schema))
        if table.partitions:
            writer = writer.partitionBy(*table.partitions)
        writer.parquet(f"{table.uri}/{directory}")
        if self.held is not None:
            self.held.check()
        table.commit(directory, number, application=application, replaces=replaces, again=again)

    def _rows(self, table: Delta, wanted: Callable[[File], bool], version: int | None = None) -> DataFrame:
        """The rows of some files of a table."""
        files = [file for file in table.files(version) if wanted(file)]
        names = [f"`{name}`" for name in table.schema.fieldNames()]
        found: DataFrame | None = None
        # Spark takes columns from paths, which have to be alike: what was merged lies one directory higher
        for own in (True, False):
            paths = [table.location(file) for file in files if file.path.startswith("run=") is own]
            if paths:
                reader = self.spark.read.options(**_READ, basePath=table.uri).schema(table.schema)
                rows = reader.parquet(*paths).selectExpr(*names)
                found = rows if found is None else found.unionByName(rows)
        if found is not None:
            return found
        # from Arrow: rows of Python's own would be unpacked by a Python of the workers, even if there are none
        return self.spark.createDataFrame(arrow_schema(table.schema).empty_table(), table.schema)

    def read(self, layer: str, name: str, state: State, days: Iterable[str] | None = None) -> DataFrame:
        """The rows of a table.

        :param days: only those.
        """
        chosen = None if days is None else set(days)
        table = self.table(layer, name)
        return self._rows(
            table,
            lambda file: chosen is None or not file.values or file.values["dt"] in chosen,
            state.versions.get(f"{layer}/{name}"),
        )

    def of_run(self, layer: str, name: str, run: int) -> DataFrame:
        """The rows that a run wrote."""
        return self._rows(self.table(layer, name), lambda file: file.path.startswith(f"run={run}."))

    def bronze(
        self, families: Iterable[str] | None = None, days: Iterable[str] | None = None, state: State | None = None
    ) -> DataFrame:
        """Lines that were read.

        :param families: only those.  :param days: only those.  :param state: as they were then.
        """
        some, of_days = (None if chosen is None else set(chosen) for chosen in (families, days))
        return self._rows(
            self.table("", "bronze"),
            lambda file: (
                (some is None or file.values["family"] in some) and (of_days is None or file.values["dt"] in of_days)
            ),
            None if state is None else state.versions.get(BRONZE_KEY),
        )

    def fresh(self, done: Mapping[str, int]) -> DataFrame:
        """Lines of batches that no run has refined.

        :param done: source -> its last batch that was.
        """
        return self._rows(self.table("", "bronze"), lambda file: bool(unrefined(file, done)))

    def unrefined(self, done: Mapping[str, int]) -> set[str]:
        """Sources of which there are lines that no run has refined."""
        return {origin for file in self.table("", "bronze").files() for origin in unrefined(file, done)}

    def batch(self, origin: str) -> int:
        """The last batch of a source that was read; -1 if none was."""
        return self.table("", "bronze").transaction(origin)

    def quarantine(self, state: State | None = None) -> DataFrame:
        """What is no event: problem, line, file, origin, batch, dt (the day it was read)."""
        return self.bronze([QUARANTINE], state=state).select("problem", "line", "file", "origin", "batch", "dt")
