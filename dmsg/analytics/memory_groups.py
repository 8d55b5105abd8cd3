"""Groups of rows in memory: keys as numbers, aggregates, and the rows of a join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from dmsg.analytics.memory_columns import NotInMemory, list_rows

_SKIP = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
_COUNT = pc.CountOptions(mode="only_valid")


def key_numbers(columns: Sequence[pa.Array], *, nulls: bool) -> pa.Array:
    """Return a number for each row: the same for rows with the same values in all columns, from 0 in the order in
    which the values first occur.

    :param nulls: whether NULL is a value; otherwise rows with a NULL have no number.
    """
    found: pa.Array | None = None
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode" if nulls else "mask")
        numbers = encoded.indices.cast(pa.int64())
        if found is not None:
            # The numbers are made dense again for each column, so that their product never overflows.
            numbers = pc.add(pc.multiply(found, max(1, len(encoded.dictionary))), numbers)
            numbers = numbers.dictionary_encode().indices.cast(pa.int64())
        found = numbers
    assert found is not None
    return found


@dataclass(frozen=True)
class Groups:
    """Groups of the rows of a table.

    :ivar number: number of each row's group, from 0.
    :ivar first: first row of each group.
    """

    number: pa.Array
    first: pa.Array

    @classmethod
    def of(cls, keys: Sequence[pa.Array], rows: int) -> Groups:
        """Group rows by these columns; without columns, all rows are one group, even if there are none."""
        if not keys:
            return cls(pa.repeat(pa.scalar(0, pa.int64()), rows), pa.array([0], pa.int64()))
        number = key_numbers(keys, nulls=True)
        place = pa.array(range(rows), pa.int64())
        first = pa.table({"group": number, "place": place}).group_by("group", use_threads=False)
        found = first.aggregate([("place", "min")]).sort_by("group")
        return cls(number, found["place_min"].combine_chunks())

    @cached_property
    def count(self) -> int:
        """Number of groups."""
        return len(self.first)

    def _aggregate(self, columns: dict[str, pa.Array], wanted: list[tuple[str, str, object]]) -> pa.Table:
        table = pa.table({"group": self.number, **columns})
        found = table.group_by("group", use_threads=False).aggregate(wanted)
        return found.sort_by("group")

    def _spread(self, group: pa.Array, values: pa.Array, other: object) -> pa.Array:
        """Return a value for each group; ``other`` for groups without one.

        :param group: the groups that have a value, in ascending order.
        """
        if len(group) == self.count:
            return values
        places = pc.index_in(pa.array(range(self.count), pa.int64()), group)
        found = values.take(places)
        return found if other is None else pc.fill_null(found, other)

    def standard(self, name: str, values: pa.Array, *, other: object = None) -> pa.Array:
        """Return an aggregate that Arrow has, of the values that are not NULL."""
        options = _COUNT if name == "count" else _SKIP
        found = self._aggregate({"value": values}, [("value", name, options)])
        return self._spread(found["group"].combine_chunks(), found[f"value_{name}"].combine_chunks(), other)

    def count_distinct(self, *columns: pa.Array) -> pa.Array:
        """Return the number of different rows in which no column is NULL."""
        numbers = key_numbers(columns, nulls=False)
        pairs = pa.table({"group": self.number, "value": numbers}).filter(pc.is_valid(numbers))
        found = pairs.group_by(["group", "value"], use_threads=False).aggregate([])
        found = found.group_by("group", use_threads=False).aggregate([("value", "count")]).sort_by("group")
        return self._spread(found["group"].combine_chunks(), found["value_count"].combine_chunks(), 0)

    def by(self, values: pa.Array, order: pa.Array, name: str) -> pa.Array:
        """Return the value of the row in which ``order`` is greatest (``max``) or smallest (``min``)."""
        best = self.standard(name, order)
        is_best = pc.fill_null(pc.equal(order, best.take(self.number)), False)
        place = pa.array(range(len(values)), pa.int64()).filter(is_best)
        found = pa.table({"group": self.number.filter(is_best), "place": place})
        found = found.group_by("group", use_threads=False).aggregate([("place", "min")]).sort_by("group")
        places = self._spread(found["group"].combine_chunks(), found["place_min"].combine_chunks(), None)
        return values.take(places)

    def lists(self, values: pa.Array, *, distinct: bool = False) -> pa.Array:
        """Return the list of the values that are not NULL."""
        found: list[list[object]] = [[] for _ in range(self.count)]
        for group, value in zip(self.number.to_pylist(), values.to_pylist(), strict=True):
            if value is not None:
                found[group].append(value)
        rows = [list(dict.fromkeys(one)) for one in found] if distinct else found
        return pa.array(rows, pa.list_(values.type))

    def sum_lists(self, values: pa.Array, length: int) -> pa.Array:
        """Return the sum of lists of that length, place by place; NULL if a group has none."""
        there = pc.is_valid(values)
        lists, numbers = values.filter(there), self.number.filter(there)
        if any(one != length for one in pc.unique(pc.list_value_length(lists)).to_pylist()):
            raise NotInMemory("lists of different lengths")
        parents, flat = pc.list_parent_indices(lists), lists.flatten().cast(pa.int64())
        place = pc.subtract(pa.array(range(len(flat)), pa.int64()), pc.multiply(parents.cast(pa.int64()), length))
        cell = pc.add(pc.multiply(numbers.take(parents), length), place)
        table = pa.table({"cell": cell, "value": flat}).group_by("cell", use_threads=False)
        found = table.aggregate([("value", "sum")])
        sums = dict(zip(found["cell"].to_pylist(), found["value_sum"].to_pylist(), strict=True))
        rows: list[list[int] | None] = [None] * self.count
        for group in pc.unique(numbers).to_pylist():
            rows[group] = [sums[group * length + index] for index in range(length)]
        return pa.array(rows, pa.list_(pa.int64()))

    def count_places(self, places: pa.Array, counts: pa.Array, length: int) -> pa.Array:
        """Return a list of that length: at each place the sum of the counts of the rows that name the place."""
        there = pc.is_valid(places)
        table = pa.table({"group": self.number, "place": places, "value": counts}).filter(there)
        found = table.group_by(["group", "place"], use_threads=False).aggregate([("value", "sum")])
        rows = [[0] * length for _ in range(self.count)]
        for group, place, count in zip(*(found[name].to_pylist() for name in found.column_names), strict=True):
            rows[group][place] = count
        return pa.array(rows, pa.list_(pa.int64()))


def map_lists(values: pa.Array, function: Callable[[list[int]], object], kind: pa.DataType) -> pa.Array:
    """Apply a function to each list of numbers that is not NULL."""
    there = pc.is_valid(values)
    found = iter([function(one) for one in list_rows(values.filter(there))])
    return pa.array([next(found) if one else None for one in there.to_pylist()], kind)


def joined_rows(left: Sequence[pa.Array], right: Sequence[pa.Array], how: str) -> tuple[pa.Array, pa.Array]:
    """Return the pairs of rows of a join, as numbers of rows on each side; NULL for a side without a row.

    A NULL equals nothing.

    :param how: ``inner``, ``left``, ``full_outer``, ``left_semi`` or ``left_anti``; the last two return rows of the
        left side only.
    """
    kinds = [(one.type, other.type) for one, other in zip(left, right, strict=True)]
    if any(one != other for one, other in kinds):
        raise NotInMemory(f"keys of different types: {kinds}")
    both = [pa.concat_arrays([one, other]) for one, other in zip(left, right, strict=True)]
    numbers, rows = key_numbers(both, nulls=False), len(left[0])
    place = pa.array(range(len(numbers)), pa.int64())
    one = pa.table({"key": numbers.slice(0, rows), "left": place.slice(0, rows)})
    other = pa.table({"key": numbers.slice(rows), "right": pc.subtract(place.slice(rows), rows)})
    kind = {"left": "left outer", "full_outer": "full outer"}.get(how, how.replace("_", " "))
    found = one.join(other, "key", join_type=kind, use_threads=False)
    order = [(name, "ascending") for name in ("left", "right") if name in found.column_names]
    found = found.sort_by(order)
    nothing = pa.nulls(found.num_rows, pa.int64())
    sides = [found[name].combine_chunks() if name in found.column_names else nothing for name in ("left", "right")]
    return sides[0], sides[1]
