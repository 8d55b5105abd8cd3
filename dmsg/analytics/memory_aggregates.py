"""Aggregates of expressions over rows in memory: of groups, and of the rows of a window."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dmsg.analytics.expressions import Expression, WindowRows
from dmsg.analytics.memory_columns import Column, NotInMemory, as_array, evaluate
from dmsg.analytics.memory_groups import Groups
from dmsg.telemetry.schema import BUCKETS

Aggregate = Callable[..., pa.Array]


STANDARD: dict[str, tuple[str, object]] = {
    "count": ("count", 0),
    "sum": ("sum", None),
    "min": ("min", None),
    "max": ("max", None),
    "avg": ("mean", None),
    "bool_or": ("any", None),
    "count_all": ("count", 0),
    "count_if": ("count", 0),
}
"""Aggregates that Arrow computes: Arrow's name of each, and its result for a group without values. Arrow computes all
of them together, so that rows are assigned to groups only once."""


def standard_operand(groups: Groups, op: str, *operands: pa.Array) -> pa.Array:
    """Return the values that Arrow aggregates to compute one of :data:`STANDARD`."""
    if op == "count_all":
        return groups.number
    return (
        pc.if_else(*operands, pa.scalar(True, pa.bool_()), pa.scalar(None, pa.bool_()))
        if op == "count_if"
        else operands[0]
    )


def _standard(op: str) -> Aggregate:
    name, other = STANDARD[op]

    def aggregate(groups: Groups, *operands: pa.Array) -> pa.Array:
        return groups.standard(name, standard_operand(groups, op, *operands), other=other)

    return aggregate


def _bit_or(groups: Groups, values: pa.Array) -> pa.Array:
    found: list[int | None] = [None] * groups.count
    for group, value in zip(groups.number.to_pylist(), values.to_pylist(), strict=True):
        if value is not None:
            found[group] = (found[group] or 0) | value
    return pa.array(found, pa.int64())


def _regression(result: Callable[[float, float, float, float, float], float | None]) -> Aggregate:
    """Return an aggregate of a linear regression of its first operand over its second.

    :param result: function of both means, the two sums of squared deviations, and the sum of their products.
    """

    def aggregate(groups: Groups, values: pa.Array, places: pa.Array) -> pa.Array:
        pairs: list[list[tuple[float, float]]] = [[] for _ in range(groups.count)]
        for group, y, x in zip(groups.number.to_pylist(), values.to_pylist(), places.to_pylist(), strict=True):
            if y is not None and x is not None:
                pairs[group].append((float(y), float(x)))
        return pa.array([_regress(some, result) for some in pairs], pa.float64())

    return aggregate


def _regress(
    pairs: list[tuple[float, float]], result: Callable[[float, float, float, float, float], float | None]
) -> float | None:
    if not pairs:
        return None
    y_mean, x_mean = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    y_squares = sum((y - y_mean) ** 2 for y, _ in pairs)
    x_squares = sum((x - x_mean) ** 2 for _, x in pairs)
    products = sum((y - y_mean) * (x - x_mean) for y, x in pairs)
    return result(y_mean, x_mean, y_squares, x_squares, products) if x_squares else None


def _histograms(groups: Groups, values: pa.Array) -> pa.Array:
    return groups.sum_lists(values, BUCKETS)


AGGREGATES: dict[str, Aggregate] = {
    **{op: _standard(op) for op in STANDARD},
    "count_distinct": Groups.count_distinct,
    "bit_or": _bit_or,
    # Each number sets one bit of the bitmap, so the number of set bits is the number of different numbers.
    "bitmap_construct_agg": Groups.count_distinct,
    "regr_slope": _regression(lambda y, x, yy, xx, xy: xy / xx),
    "regr_intercept": _regression(lambda y, x, yy, xx, xy: y - xy / xx * x),
    "regr_r2": _regression(lambda y, x, yy, xx, xy: xy * xy / (xx * yy) if yy else 1.0),
    "collect_list": Groups.lists,
    "collect_set": lambda groups, values: groups.lists(values, distinct=True),
    "max_by": lambda groups, values, order: groups.by(values, order, "max"),
    "min_by": lambda groups, values, order: groups.by(values, order, "min"),
    "sum_histograms": _histograms,
    "count_buckets": lambda groups, bucket, counts: groups.count_places(bucket, counts, BUCKETS),
}
"""Function that computes each aggregate, by name. Its arguments are the groups and the operands; it returns a value for
each group."""


def _greatest(values: list[Any]) -> Any:
    return max((one for one in values if one is not None), default=None)


_OF_ROWS: dict[str, Callable[[list[Any]], Any]] = {
    "max": _greatest,
    "first": lambda values: values[0] if values else None,
}
"""Functions of the aggregates that can be computed over a window that is only a part of its group (in SQL: ``ROWS
BETWEEN``)."""


def over(expression: Expression, column: Column, rows: int) -> pa.Array:
    """Return the value of a window function for each row.

    :raises NotInMemory: only Spark can compute the function.
    """
    aggregate, window = expression.args
    assert isinstance(window, WindowRows)
    operands = [as_array(evaluate(one, column, rows), rows) for one in aggregate.args]
    groups = Groups.of([as_array(evaluate(one, column, rows), rows) for one in window.partition], rows)
    if (window.first, window.last) == (None, None) and aggregate.op in AGGREGATES:
        return AGGREGATES[aggregate.op](groups, *operands).take(groups.number)
    if aggregate.op not in _OF_ROWS:
        raise NotInMemory(f"only Spark computes the aggregate {aggregate.op} over a part of a group")
    return _framed(groups, operands[0], window, _OF_ROWS[aggregate.op], column, rows)


def _framed(
    groups: Groups,
    values: pa.Array,
    window: WindowRows,
    function: Callable[[list[Any]], Any],
    column: Column,
    rows: int,
) -> pa.Array:
    keys = {f"key{index}": as_array(evaluate(one, column, rows), rows) for index, (one, _) in enumerate(window.order)}
    directions = ["descending" if down else "ascending" for _, down in window.order]
    table = pa.table({"group": groups.number, **keys})
    order = pc.sort_indices(table, [("group", "ascending"), *zip(keys, directions, strict=True)]).to_pylist()
    numbers, given = groups.number.to_pylist(), values.to_pylist()
    found: list[Any] = [None] * rows
    for _, members in groupby(order, numbers.__getitem__):
        places = list(members)
        in_order = [given[place] for place in places]
        running: list[Any] = []
        for index, place in enumerate(places):
            last = len(places) - 1 if window.last is None else min(index + window.last, len(places) - 1)
            if window.first is None and window.last is not None:
                # Each result is computed from the previous result and the next row. So the time for a row does not
                # depend on the length of the window.
                while len(running) <= last:
                    running.append(function([*running[-1:], in_order[len(running)]]))
                found[place] = running[last] if last >= 0 else None
            else:
                first = 0 if window.first is None else max(index + window.first, 0)
                found[place] = function(in_order[first : last + 1]) if last >= first else None
    return pa.array(found, values.type)
