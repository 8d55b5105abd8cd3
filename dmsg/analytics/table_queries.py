"""SQL queries of single tables, which delta-rs executes without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from dmsg.analytics.lake_error import LakeError

SQL_TYPES = {
    "string": "VARCHAR",
    "int": "INT",
    "bigint": "BIGINT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "array<int>": "INT[]",
    "array<bigint>": "BIGINT[]",
}
"""SQL types of the columns, by the names of Spark's types."""


def run_query(table: DeltaTable, sql: str) -> pa.Table:
    """Run an SQL query of a table; in the query the table's name is ``it``.

    The query is executed by delta-rs, and not by Arrow. Arrow would open the files in Python code, called from its own
    threads. Such a thread aborts the process if it still runs when the program ends.

    :param sql: text of the query. The caller must quote values that come from strangers.
    :raises LakeError: a file cannot be read, or has been removed.
    """
    try:
        batches = QueryBuilder().register("it", table).execute(sql).read_all()
    except Exception as error:  # Exception is caught, because delta-rs raises no more specific class.
        raise LakeError(f"{table.table_uri} cannot be read: {str(error).splitlines()[0]}") from None
    found = pa.table(batches)
    views = {pa.string_view(): pa.string()}
    return found.cast(pa.schema([pa.field(one.name, views.get(one.type, one.type)) for one in found.schema]))


def rows_of(table: DeltaTable, condition: str = "true") -> pa.Table:
    """Return the rows of a table, in no particular order.

    :param condition: SQL condition that the rows meet.
    :raises LakeError: as :func:`run_query`.
    """
    return run_query(table, f"SELECT * FROM it WHERE {condition}")  # noqa: S608


def days_condition(since: str | None, until: str | None, where: Mapping[str, str] | None = None) -> str:
    """Return an SQL condition that selects the rows from one day to another.

    :param since: first day, as ``2026-01-31``.
    :param until: last day, included.
    :param where: mapping from text columns to values; only the rows with these values are selected.
    """
    wanted = [f"{column} = '{text.replace(chr(39), chr(39) * 2)}'" for column, text in (where or {}).items()]
    for day, compare in ((since, ">="), (until, "<=")):
        if day is not None:
            wanted.append(f"dt {compare} DATE '{date.fromisoformat(day)}'")
    return " AND ".join(wanted) or "true"
