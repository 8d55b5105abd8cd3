"""Evaluation of expressions over columns in memory, by Arrow, with the results that Spark gives.

:data:`OPERATIONS` contains a function for each operation. An expression with any other operation raises
:class:`NotInMemory`, and the caller then lets Spark compute the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from math import fmod, isfinite
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dmsg.analytics.expressions import Expression
from dmsg.analytics.xxhash import xxhash64, xxhash64_of_texts

Values: TypeAlias = Any
"""Column in memory: an array of Arrow, or a scalar, which stands for the same value in every row."""
Column = Callable[[str], pa.Array]
"""Function that returns a column by its name."""

TYPES: dict[str, pa.DataType] = {
    "int": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_TIME = TYPES["timestamp"]
# Here and elsewhere, constants have types. To find out the type of a value, Arrow searches for optional packages each
# time, which takes 0.1 to 0.2 ms.
_ZERO = pa.scalar(0, pa.int64())
FALSE = pa.scalar(False, pa.bool_())
_NULL = pa.scalar(None, pa.null())
_ZERO = pa.scalar(0, pa.int64())

_FORMAT = re.compile(r"%(?:\.(\d))?[dfs]")


class NotInMemory(Exception):
    """Error: rows or values cannot be computed in memory, so Spark has to compute them."""


def as_array(values: Values, rows: int) -> pa.Array:
    """Return the values as an array, one for each row; a scalar is repeated."""
    if isinstance(values, pa.Scalar):
        return pa.nulls(rows, values.type) if not values.is_valid else pa.repeat(values, rows)
    return values


def plain(values: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding; a column that has none is returned unchanged."""
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def of_one_form(columns: Sequence[pa.Array]) -> Sequence[pa.Array]:
    """Return columns in a form in which they can be concatenated: dictionary-encoded if all of them are, else plain."""
    if all(pa.types.is_dictionary(one.type) for one in columns):
        return columns
    return [plain(one) for one in columns]


def evaluate(expression: Expression, column: Column, rows: int) -> Values:
    """Return the values of an expression.

    :param column: function that returns the columns that the expression names.
    :param rows: number of rows.
    :raises NotInMemory: only Spark can compute this expression.
    """
    op, args = expression.op, expression.args
    if op == "column":
        return column(args[0])
    if op == "literal":
        return _literal(args[0])
    values = [evaluate(one, column, rows) if isinstance(one, Expression) else one for one in args]
    if op in _OF_ARRAYS:
        values = [as_array(one, rows) for one in values]
    elif op in _OF_ARRAYS_BUT_FIRST:
        values[1:] = [as_array(one, rows) for one in values[1:]]
    if op == "struct":
        return pa.StructArray.from_arrays(values, [name_of(one) for one in args])
    if op not in OPERATIONS:
        raise NotInMemory(op)
    return OPERATIONS[op](*values)


def name_of(column: Expression) -> str:
    """Return the name of a column: its alias, its own name, or else its text."""
    if column.op == "alias":
        return str(column.args[1])
    return str(column.args[0]).rpartition(".")[2] if column.op == "column" else column.sql


def _literal(value: Hashable) -> pa.Scalar:
    return _typed_scalar(type(value), value)


@lru_cache(maxsize=4096)
def _typed_scalar(kind: type, value: Hashable) -> pa.Scalar:
    """Return a constant. The cache saves the time in which Arrow finds out the type of the value.

    :param kind: type of the value, which separates values such as True and 1 in the cache.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return pa.scalar(value, pa.int32() if -(2**31) <= value < 2**31 else pa.int64())
    return pa.scalar(value)


def cast(values: Values, name: str) -> Values:
    """Return the values as another type, with the results of Spark's ``CAST``."""
    kind = TYPES[name]
    if pa.types.is_floating(values.type) and pa.types.is_integer(kind):
        values = pc.trunc(values)
    return values.cast(kind, safe=False)


def of_one_type(*values: Values) -> list[Values]:
    """Convert the values to one type that can represent all of them.

    :raises NotInMemory: there is no such type.
    """
    kinds = {one.type for one in values if not pa.types.is_null(one.type)}
    if len(kinds) <= 1:
        kind = next(iter(kinds), pa.null())
    elif all(pa.types.is_integer(one) for one in kinds):
        kind = pa.int64()
    elif all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in kinds):
        kind = pa.float64()
    else:
        raise NotInMemory(f"the values have no common type: {kinds}")
    return [one if one.type == kind else one.cast(kind) for one in values]


def _numbers(function: Callable[..., Values]) -> Callable[..., Values]:
    def applied(*values: Values) -> Values:
        return function(*of_one_type(*values))

    return applied


def _divide(one: Values, other: Values) -> Values:
    zero = pc.equal(other, _ZERO)
    return pc.divide(one.cast(pa.float64()), pc.if_else(zero, pa.scalar(None, pa.float64()), other.cast(pa.float64())))


def _modulo(one: Values, other: Values) -> Values:
    one, other = of_one_type(one, other)
    if pa.types.is_integer(one.type):
        return pc.subtract(one, pc.multiply(pc.divide(one, other), other))
    # fmod() is exact. Subtracting a product, as for integers, would add rounding errors.
    divisor = other.as_py()
    return pa.array([None if value is None else fmod(value, divisor) for value in one.to_pylist()], one.type)


def _case(*parts: Values) -> Values:
    *branches, last = (_NULL if one is None else one for one in parts)
    values = of_one_type(*branches[1::2], last)
    found = values[-1]
    for condition, value in zip(reversed(branches[::2]), reversed(values[:-1]), strict=True):
        if pa.types.is_null(value.type):
            return _NULL
        found = pc.if_else(pc.fill_null(condition.cast(pa.bool_()), FALSE), value, found)
    return found


def _is_in(value: Values, *among: Values) -> Values:
    """Return whether the value is one of several. As in SQL, the result is NULL if it depends on a NULL."""
    among = tuple(of_one_type(value, *among)[1:])
    found = [pc.equal(value, one) for one in among]
    return reduce(pc.or_kleene, found)


def _coalesce(*values: Values) -> Values:
    return pc.coalesce(*of_one_type(*values))


def round_half_up(value: float, scale: int) -> Decimal:
    """Return a number rounded to ``scale`` decimal places, as Java rounds: halves away from zero, in decimal
    notation."""
    return Decimal(repr(value)).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)


def _round(values: Values, scale: pa.Scalar) -> Values:
    """Round halves away from zero, in decimal notation, as Spark does."""

    def rounded(value: float | None) -> float | None:
        if value is None or not isfinite(value):
            return value
        return float(round_half_up(value, scale.as_py()))

    return _map(values, rounded, values.type)


def _map(values: Values, function: Callable[[Any], Any], kind: pa.DataType) -> Values:
    """Apply a function once to each distinct value of a column."""
    if isinstance(values, pa.Scalar):
        return pa.scalar(function(values.as_py()), kind)
    encoded = values.dictionary_encode(null_encoding="encode")
    return pa.array([function(one) for one in encoded.dictionary.to_pylist()], kind).take(encoded.indices)


def _whole(function: Callable[[Values], Values]) -> Callable[[Values], Values]:
    def applied(values: Values) -> Values:
        if pa.types.is_integer(values.type):
            return values.cast(pa.int64())
        return function(values).cast(pa.int64(), safe=False)

    return applied


def _nullif(one: Values, other: Values) -> Values:
    return pc.if_else(pc.fill_null(pc.equal(*of_one_type(one, other)), False), pa.scalar(None, one.type), one)


def _floor_divide(values: Values, by: int) -> Values:
    number, divisor = values.cast(pa.int64()), pa.scalar(by, pa.int64())
    quotient = pc.divide(number, divisor)
    below = pc.and_(pc.less(number, _ZERO), pc.not_equal(pc.multiply(quotient, divisor), number))
    return pc.subtract(quotient, below.cast(pa.int64()))


def _days_later(sign: int) -> Callable[[Values, Values], Values]:
    def applied(day: Values, days: Values) -> Values:
        number = day.cast(pa.date32()).cast(pa.int32())
        moved = pc.multiply(days.cast(pa.int32()), pa.scalar(sign, pa.int32()))
        return pc.add(number, moved).cast(pa.date32())

    return applied


def _bits(function: Callable[..., int]) -> Callable[..., pa.Array]:
    def applied(*values: pa.Array) -> pa.Array:
        rows = zip(*(one.to_pylist() for one in values), strict=True)
        return pa.array([None if None in row else function(*row) for row in rows], pa.int64())

    return applied


def _hash(*values: pa.Array) -> pa.Array:
    if len(values) == 1:
        encoded = values[0].dictionary_encode(null_encoding="encode")
        return xxhash64_of_texts(encoded.dictionary).take(encoded.indices)
    rows = list(zip(*(one.to_pylist() for one in values), strict=True))
    known = {row: xxhash64(row) for row in set(rows)}
    return pa.array([known[row] for row in rows], pa.int64())


def _format(pattern: pa.Scalar, *values: pa.Array) -> pa.Array:
    text = _FORMAT.sub("%s", pattern.as_py())
    places = [None if not found else int(found) for found in _FORMAT.findall(pattern.as_py())]

    def written(value: object, scale: int | None) -> str:
        if value is None:
            return "null"[:scale]
        # Java rounds halves away from zero, in decimal notation; Python rounds the exact binary number.
        return str(value) if scale is None else str(round_half_up(float(str(value)), scale))

    rows = zip(*(one.to_pylist() for one in values), strict=True)
    return pa.array([text % tuple(map(written, row, places)) for row in rows], pa.string())


def _substring_index(texts: Values, separator: pa.Scalar, count: pa.Scalar) -> Values:
    mark: str = separator.as_py()
    parts: int = count.as_py()

    def part(text: str | None) -> str | None:
        if text is None:
            return None
        found = text.split(mark)
        return mark.join(found[:parts] if parts > 0 else found[parts:])

    return _map(texts, part, pa.string())


def _concat(separator: pa.Scalar, *texts: pa.Array) -> pa.Array:
    # Arrow's own function is not used, because it returned too few rows for some columns of NULL.
    rows = zip(*(one.to_pylist() for one in texts), strict=True)
    return pa.array([separator.as_py().join(one for one in row if one is not None) for row in rows], pa.string())


def _array(*items: pa.Array) -> pa.Array:
    """Return a list of these items for each row."""
    rows = len(items[0])
    kinds = {one.type for one in items}
    if len(kinds) > 1:
        raise NotInMemory("only Spark computes an array whose items have different types")
    places = pa.array([row + rows * item for row in range(rows) for item in range(len(items))], pa.int64())
    offsets = pa.array(range(0, rows * len(items) + 1, len(items)), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.concat_arrays(items).take(places))


def _sequence(start: pa.Array, stop: pa.Array, *step: object) -> pa.Array:
    kind = start.type
    one, other = (values.cast(pa.int32() if kind == pa.date32() else kind) for values in (start, stop))
    rows = [
        None if first is None or last is None else list(range(first, last + 1) if first <= last else [])
        for first, last in zip(one.to_pylist(), other.to_pylist(), strict=True)
    ]
    if any(row == [] for row in rows):
        raise NotInMemory("only Spark computes a sequence that descends")
    return pa.array(rows, pa.list_(one.type)).cast(pa.list_(kind))


def _size(values: pa.Array) -> Values:
    return pc.coalesce(pc.list_value_length(values), -1)


def _distinct(values: pa.Array) -> pa.Array:
    return pa.array([None if one is None else list(dict.fromkeys(one)) for one in values.to_pylist()], values.type)


def _flatten(values: pa.Array) -> pa.Array:
    rows = [None if row is None else [value for one in row for value in one] for row in values.to_pylist()]
    return pa.array(rows, values.type.value_type)


def list_rows(values: pa.Array) -> list[list[int]]:
    """Return the list of numbers in each row of a column. No row may be NULL."""
    numbers = values.flatten().to_pylist()
    ends = [0, *accumulate(pc.list_value_length(values).to_pylist())]
    return [numbers[first:last] for first, last in pairwise(ends)]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "alias": lambda values, name: values,
    "cast": cast,
    "computed": lambda compute, *columns: compute(*columns),
    "case": _case,
    "not": pc.invert,
    "and": pc.and_kleene,
    "or": pc.or_kleene,
    "isnull": pc.is_null,
    "isnotnull": pc.is_valid,
    "in": _is_in,
    **{name: _numbers(getattr(pc, name)) for name in ("add", "subtract", "multiply")},
    **{
        name: _numbers(getattr(pc, name))
        for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    },
    "divide": _divide,
    "modulo": _modulo,
    "abs": pc.abs,
    "coalesce": _coalesce,
    "greatest": _numbers(pc.max_element_wise),
    "least": _numbers(pc.min_element_wise),
    "nullif": _nullif,
    "round": _round,
    "floor": _whole(pc.floor),
    "ceil": _whole(pc.ceil),
    "power": lambda one, other: pc.power(one.cast(pa.float64()), other.cast(pa.float64())),
    "shiftleft": lambda one, by: pc.shift_left(one, by.cast(one.type)),
    "bitwise_and": lambda one, other: pc.bit_wise_and(*of_one_type(one, other)),
    "bit_count": _bits(lambda number: (number & (2**64 - 1)).bit_count()),
    "xxhash64": _hash,
    "contains": lambda text, part: pc.match_substring(text, part.as_py()),
    "substring_index": _substring_index,
    "format_string": _format,
    "concat_ws": _concat,
    "timestamp_millis": lambda ms: pc.multiply(ms.cast(pa.int64()), pa.scalar(1000, pa.int64())).cast(_TIME),
    "unix_millis": lambda time: _floor_divide(time, 1_000),
    "unix_seconds": lambda time: _floor_divide(time, 1_000_000),
    "unix_date": lambda day: day.cast(pa.int32()),
    "date_from_unix_date": lambda days: days.cast(pa.int32()).cast(pa.date32()),
    "to_date": lambda time: time.cast(pa.date32(), safe=False),
    "date_add": _days_later(1),
    "date_sub": _days_later(-1),
    "hour": lambda time: pc.hour(time).cast(pa.int32()),
    "bitmap_bit_position": lambda number: number,
    "bitmap_count": lambda number: number,
    "array": _array,
    "sequence": _sequence,
    "one_day": lambda: pa.scalar(1),
    "size": _size,
    "array_distinct": _distinct,
    "flatten": _flatten,
}
"""Functions that compute the operations of expressions, by the name of the operation."""
_OF_ARRAYS = {"bit_count", "xxhash64", "array", "sequence", "size", "array_distinct", "flatten", "struct"}
"""Operations whose operands must be arrays, with a value for each row."""
_OF_ARRAYS_BUT_FIRST = {"computed", "concat_ws", "format_string"}
"""Operations whose operands must be arrays, except the first."""
