"""Functions of columns, under the names that PySpark gives them; each returns an
:class:`~dmsg.analytics.expressions.Expression`.

As in PySpark, an argument that is a text names a column for most functions, and is a constant for the others. The rules
of the tables import this module instead of ``pyspark.sql.functions``, so that Arrow can compute tables without Spark.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import functions as spark_functions

from dmsg.analytics.expressions import Expression, WindowRows, as_column, as_value
from dmsg.analytics.memory_groups import key_numbers
from dmsg.analytics.memory_rows import MemoryRows

Frame = TypeVar("Frame")
_SECRET = secrets.randbits(62)
"""Number that is hashed together with values. It is the same in the whole process, so Spark compiles a query once."""


def broadcast(rows: Frame) -> Frame:
    """Mark rows for a broadcast join. Rows in memory are returned unchanged."""
    if isinstance(rows, MemoryRows):
        return rows
    return spark_functions.broadcast(rows)  # type: ignore[arg-type, return-value]


def col(name: str) -> Expression:
    """Return a column."""
    return as_column(name)


def lit(value: Any) -> Expression:
    """Return a constant."""
    return as_value(value)


def when(condition: Any, value: Any) -> Expression:
    """Return ``value`` where the condition is true; NULL elsewhere, unless ``when`` or ``otherwise`` follows."""
    return Expression("case", as_value(condition), as_value(value), None)


def expr(text: str, compute: str | Callable[..., Any], *columns: Any) -> Expression:
    """Return an expression that is defined separately for each engine.

    :param text: the expression in Spark's SQL.
    :param compute: function that computes the expression from the columns in memory, or the name of an aggregate of
        :mod:`dmsg.analytics.memory_aggregates`.
    """
    found = [as_column(one) for one in columns]
    if isinstance(compute, str):
        return Expression(compute, *found, text=text)
    return Expression("computed", compute, *found, text=text)


def _of_columns(op: str) -> Callable[..., Expression]:
    def function(*columns: Any) -> Expression:
        return Expression(op, *(as_column(one) for one in columns))

    function.__name__ = op
    function.__doc__ = f"Return Spark's ``{op}`` of these columns."
    return function


abs = _of_columns("abs")
array = _of_columns("array")
array_distinct = _of_columns("array_distinct")
array_max = _of_columns("array_max")
array_min = _of_columns("array_min")
bit_count = _of_columns("bit_count")
bit_or = _of_columns("bit_or")
bitmap_bit_position = _of_columns("bitmap_bit_position")
bitmap_construct_agg = _of_columns("bitmap_construct_agg")
bitmap_count = _of_columns("bitmap_count")
bool_or = _of_columns("bool_or")
ceil = _of_columns("ceil")
coalesce = _of_columns("coalesce")
collect_list = _of_columns("collect_list")
collect_set = _of_columns("collect_set")
count_if = _of_columns("count_if")
date_from_unix_date = _of_columns("date_from_unix_date")
explode = _of_columns("explode")
flatten = _of_columns("flatten")
floor = _of_columns("floor")
greatest = _of_columns("greatest")
hour = _of_columns("hour")
least = _of_columns("least")
max = _of_columns("max")
max_by = _of_columns("max_by")
min = _of_columns("min")
min_by = _of_columns("min_by")
nullif = _of_columns("nullif")
make_valid_utf8 = _of_columns("make_valid_utf8")
pow = _of_columns("power")
regr_intercept = _of_columns("regr_intercept")
regr_r2 = _of_columns("regr_r2")
regr_slope = _of_columns("regr_slope")
size = _of_columns("size")
struct = _of_columns("struct")
sum = _of_columns("sum")
avg = _of_columns("avg")
first = _of_columns("first")
timestamp_millis = _of_columns("timestamp_millis")
to_json = _of_columns("to_json")
to_date = _of_columns("to_date")
unix_date = _of_columns("unix_date")
unix_millis = _of_columns("unix_millis")
unix_seconds = _of_columns("unix_seconds")
xxhash64 = _of_columns("xxhash64")


def grouping_key(*columns: Any) -> Expression:
    """Return a number by which rows of one table can be grouped. It is the same for rows with the same values in these
    columns, and nearly always different for others. Numbers of different tables or processes must not be compared.

    Spark computes a hash of the values and of a secret, so that nobody can choose values to have the hash of others.
    Arrow numbers the different rows in memory instead, because a hash of each of them would take longer than all other
    work on the table.
    """
    found = [as_column(one) for one in columns]
    return expr(f"xxhash64({_SECRET}L, {', '.join(one.sql for one in found)})", _number_rows, *found)


def _number_rows(*columns: pa.Array) -> pa.Array:
    return key_numbers(columns, nulls=True)


def count(column: Any) -> Expression:
    """Return the number of rows in which the column is not NULL."""
    found = as_column(column)
    return Expression("count_all") if found.op == "literal" else Expression("count", found)


def count_distinct(*columns: Any) -> Expression:
    """Return the number of different combinations of values of the columns. Combinations with NULL do not count."""
    found = [as_column(one) for one in columns]
    return Expression("count_distinct", *found, text=f"count(DISTINCT {', '.join(one.sql for one in found)})")


def round(column: Any, scale: int = 0) -> Expression:
    """Return a number rounded to ``scale`` decimal places; halves are rounded away from zero."""
    return Expression("round", as_column(column), as_value(scale))


def date_add(column: Any, days: Any) -> Expression:
    """Return the date ``days`` days later."""
    return Expression("date_add", as_column(column), as_value(days))


def date_sub(column: Any, days: Any) -> Expression:
    """Return the date ``days`` days earlier."""
    return Expression("date_sub", as_column(column), as_value(days))


def sequence(start: Any, stop: Any, step: Any = None) -> Expression:
    """Return the array of all values from ``start`` to ``stop``."""
    found = [as_column(one) for one in (start, stop)]
    if step is None:
        return Expression("sequence", *found)
    return Expression("sequence", *found, as_column(step))


def one_day() -> Expression:
    """Return the interval of one day, which is the step of a :func:`sequence` of dates."""
    return Expression("one_day", text="INTERVAL 1 DAY")


def shiftleft(column: Any, bits: Any) -> Expression:
    """Return a number whose bits are moved to the left."""
    return Expression("shiftleft", as_column(column), as_column(bits))


def substring_index(column: Any, separator: str, count: int) -> Expression:
    """Return the part of a text before the first separator, or with the count -1 the part after the last separator."""
    return Expression("substring_index", as_column(column), as_value(separator), as_value(count))


def substring(column: Any, start: int, length: int) -> Expression:
    """Return ``length`` characters of a text from position ``start`` on; the first character has position 1."""
    return Expression("substring", as_column(column), as_value(start), as_value(length))


def regexp_replace(column: Any, pattern: str, replacement: str) -> Expression:
    """Return a text with all matches of a regular expression replaced."""
    return Expression("regexp_replace", as_column(column), as_value(pattern), as_value(replacement))


def format_string(pattern: str, *columns: Any) -> Expression:
    """Return a text in which the values of the columns replace ``%d`` and other placeholders."""
    return Expression("format_string", as_value(pattern), *(as_column(one) for one in columns))


def concat_ws(separator: str, *columns: Any) -> Expression:
    """Return the texts that are not NULL, with a separator between them."""
    return Expression("concat_ws", as_value(separator), *(as_column(one) for one in columns))


class Window:
    """Replacement for PySpark's class ``Window``, whose methods define windows of rows."""

    unboundedPreceding = None
    unboundedFollowing = None

    @staticmethod
    def partitionBy(*columns: Any) -> WindowRows:
        """Return the window of all rows with the same values in these columns."""
        return WindowRows(tuple(as_column(one) for one in columns))
