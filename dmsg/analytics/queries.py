"""SQL queries of silver and gold tables by DuckDB, without Spark or Java.

DuckDB reads the Parquet files of the table versions that the newest run left. A query must be one SELECT or EXPLAIN.
DuckDB may open only the files of the tables that the query names.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

import duckdb

from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import GOLD, SILVER
from dmsg.analytics.store import BRONZE_KEY, INTERNAL, Store
from dmsg.analytics.table_queries import SQL_TYPES
from dmsg.analytics.views import VIEWS

MEMORY_LIMIT = "1GiB"
"""Maximum memory of a query. DuckDB writes larger intermediate results to a temporary directory."""
SPILL_LIMIT = "10GiB"
"""Maximum size of the temporary directory; a query that needs more fails."""
BATCH_ROWS = 1024
"""Number of rows to fetch from DuckDB at a time."""
REMOTE_LIMIT = 256 * 1024 * 1024
"""Maximum size in bytes of the files of one table in an object store, because these files are read into memory."""
_TABLES = {**dict.fromkeys(GOLD, "gold"), **dict.fromkeys({**SILVER, **INTERNAL}, "silver")}
_ALL = re.compile(r"(?i)\b(show|information_schema|duckdb_\w+)\b")
"""Regular expression for queries that may list the tables. Such a query needs the definitions of all tables."""
_TYPES = {**SQL_TYPES, "timestamp": "TIMESTAMPTZ"}


_Result = TypeVar("_Result")


class QueryError(LakeError):
    """Error: the query cannot be run. Its text says why."""


@dataclass(frozen=True)
class Answer:
    """Result of a query.

    :ivar names: names of the columns.
    :ivar rows: the first rows of the result, up to the requested number.
    :ivar more: whether the result has further rows.
    """

    names: list[str]
    rows: list[tuple[object, ...]]
    more: bool


def run_sql(store: Store, state: State, sql: str, rows: int) -> Answer:
    """Run an SQL query of the silver and gold tables that belong to ``state``.

    :param rows: maximum number of rows to return.
    :raises QueryError: the text is not one SELECT, or DuckDB cannot run it.
    """
    with tempfile.TemporaryDirectory(prefix="dmsg-sql-") as spill, duckdb.connect(":memory:") as connection:
        connection.execute(
            f"SET TimeZone = 'UTC'; SET memory_limit = '{MEMORY_LIMIT}'; SET max_temp_directory_size = '{SPILL_LIMIT}';"
            "SET autoinstall_known_extensions = false; SET autoload_known_extensions = false;"
            "SET python_enable_replacements = false"
        )
        connection.execute(f"SET temp_directory = {_quote(spill)}")
        with _errors():
            _check(connection, sql)
            named = set(re.findall(r"\w+", sql.lower()))
            wanted = [name for name in _TABLES if name in named or _ALL.search(sql)]
            paths = [path for name in wanted for path in _files(store, state, name)]
            connection.execute(f"SET allowed_paths = [{', '.join(map(_quote, paths))}]")
            connection.execute("SET enable_external_access = false")
            for name in wanted:
                _define(connection, store, state, name)
            connection.execute("SET lock_configuration = true")
            names, found = _interruptible(connection, lambda: _fetch_first(connection, sql, rows + 1))
    return Answer(names, found[:rows], len(found) > rows)


def _fetch_first(
    connection: duckdb.DuckDBPyConnection, sql: str, most: int
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Run the query, and return the names of the columns and at most ``most`` rows."""
    # The rows are fetched as Arrow tables, because DuckDB's own conversion of times needs the package pytz.
    reader = connection.sql(sql).to_arrow_reader(BATCH_ROWS)
    rows: list[tuple[object, ...]] = []
    for batch in reader:
        columns = (map(_plain, column.to_pylist()) for column in batch.slice(0, most - len(rows)).columns)
        rows += zip(*columns, strict=True)
        if len(rows) >= most:
            break
    return list(reader.schema.names), rows


def _plain(value: object) -> object:
    """Convert a Decimal to an int or float, because DuckDB returns sums of integers as Decimal."""
    if not isinstance(value, Decimal):
        return value
    return int(value) if value == value.to_integral_value() else float(value)


def _interruptible(connection: duckdb.DuckDBPyConnection, query: Callable[[], _Result]) -> _Result:
    """Run a query in a thread, so that Ctrl-C interrupts it at once. In the main thread, DuckDB would not return on
    Ctrl-C."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(query)
        try:
            return future.result()
        except BaseException:
            connection.interrupt()
            raise


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        text = str(error).partition("\n")[0]
        if isinstance(error, duckdb.CatalogException):
            text += " (dmsg analytics sql 'SHOW TABLES' lists the tables)"
        raise QueryError(text) from None


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Check that the text is a single SELECT or EXPLAIN.

    :raises QueryError: the text is something else.
    """
    statements = connection.extract_statements(sql)
    kinds = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in kinds:
        raise QueryError("the query must be one SELECT, because the tables are only read")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# --- the tables as DuckDB sees them ---


def _bronze(store: Store, state: State, name: str) -> tuple[Delta, Sequence[File]]:
    """Return the table bronze, and those of its files from which rows of a view are computed. These are the files of
    the days for which the view has no stored rows.
    """
    stored, family = store.stored_days(name, state), VIEWS[name].family
    table = store.table("", "bronze")
    files = table.files(state.versions.get(BRONZE_KEY))
    return table, [one for one in files if one.values["family"] == family and one.values["dt"] not in stored]


def _table_files(store: Store, state: State, name: str) -> tuple[Delta, Sequence[File]]:
    """Return a table, and the files of its version in ``state``."""
    layer = _TABLES[name]
    table = store.table(layer, name)
    version = state.versions.get(f"{layer}/{name}")
    return table, [] if version is None else table.files(version)


def _files(store: Store, state: State, name: str) -> list[str]:
    """Return the paths of all files from which DuckDB reads a table."""
    if not store.local:
        return []
    parts = [_table_files(store, state, name), *([_bronze(store, state, name)] if name in VIEWS else [])]
    return [table.location(file) for table, files in parts for file in files]


def _define(connection: duckdb.DuckDBPyConnection, store: Store, state: State, name: str) -> None:
    """Define a table in DuckDB, as a view of its files."""
    if store.local:
        rows = _select(*_table_files(store, state, name))
        if name in VIEWS:
            view = VIEWS[name].sql(name)
            # The SQL of the views is in the dialect of delta-rs. DuckDB lacks two functions of this dialect, so they
            # are defined as macros.
            connection.execute("CREATE OR REPLACE TEMP MACRO to_timestamp_millis(ms) AS make_timestamptz(1000 * ms)")
            connection.execute("CREATE OR REPLACE TEMP MACRO arrow_cast(value, kind) AS value")
            rows += f" UNION ALL BY NAME (WITH it AS ({_select(*_bronze(store, state, name))}) {view})"
        connection.execute(f'CREATE TEMP VIEW "{name}" AS {rows}')
        return
    table, files = _table_files(store, state, name)
    sources = [*files, *(_bronze(store, state, name)[1] if name in VIEWS else [])]
    if sum(file.size for file in sources) > REMOTE_LIMIT:
        raise QueryError(
            f"{name} has more than {REMOTE_LIMIT >> 20} MiB: copy the tables to a directory and query that"
        )
    found = table.read(state.versions.get(f"{_TABLES[name]}/{name}"))
    connection.register(f"{name} stored", found)
    rows = f'FROM "{name} stored"'
    if name in VIEWS:
        days = ", ".join(f"DATE '{day}'" for day in sorted(store.stored_days(name, state))) or "NULL"
        sql = f"SELECT * FROM ({VIEWS[name].sql(name)}) AS v WHERE dt NOT IN ({days})"  # noqa: S608
        if days == "NULL":
            sql = VIEWS[name].sql(name)
        seen = store.table("", "bronze").ask(sql, state.versions.get(BRONZE_KEY))
        if seen is not None:
            connection.register(f"{name} seen", seen)
            rows += f' UNION ALL BY NAME FROM "{name} seen"'
    connection.execute(f'CREATE TEMP VIEW "{name}" AS {rows}')


def _select(table: Delta, files: Iterable[File]) -> str:
    """Return a query for the rows of these files, with all columns of the table in their types."""
    types = {one.name: _TYPES[one.dataType.simpleString()] for one in table.schema.fields}
    # A file may lack columns: the partition columns, and those in which all of its rows have NULL.
    parts = ["SELECT " + ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in types.items()) + " WHERE false"]
    by_values: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for file in files:
        by_values.setdefault(tuple(sorted(file.values.items())), []).append(table.location(file))
    for values, paths in sorted(by_values.items()):
        fixed = "".join(f', {_quote(value)}::{types[name]} AS "{name}"' for name, value in values)
        listed = ", ".join(map(_quote, sorted(paths)))
        read = f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"
        parts.append(f"SELECT *{fixed} FROM {read}")  # noqa: S608
    columns = ", ".join(f'"{name}"::{kind} AS "{name}"' for name, kind in types.items())
    return f"SELECT {columns} FROM ({' UNION ALL BY NAME '.join(parts)})"  # noqa: S608
