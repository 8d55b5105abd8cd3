"""Groups of rows in memory: keys as numbers, aggregates, and the rows of a join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from dmsg.analytics.memory_columns import FALSE, NotInMemory, list_rows, of_one_form, plain

_SKIP = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
_COUNT = pc.CountOptions(mode="only_valid")
_PREFILTER_RATIO = 8
"""How many times as many rows the left side of a join must have for its rows to be filtered first."""
_MAX_NUMBERS = 2**62
"""Maximum number of combinations of the values of several columns that one 64-bit number represents."""


def key_numbers(columns: Sequence[pa.Array], *, nulls: bool) -> pa.Array:
    """Return a number for each row. Rows with the same values in all columns have the same number.

    Numbers begin at 0 and follow the order in which the values first occur.

    :param columns: columns. The dictionary of a dictionary-encoded column must contain each text only once.
    :param nulls: whether NULL counts as a value. If it does not, the number of a row with a NULL is NULL.
    """
    found, size = _column_numbers(columns[0], nulls=nulls)
    for column in columns[1:]:
        numbers, count = _column_numbers(column, nulls=nulls)
        if size * count > _MAX_NUMBERS:
            # The numbers found so far are replaced by consecutive ones, so that the product does not overflow.
            found = found.dictionary_encode()
            found, size = found.indices.cast(pa.int64()), max(1, len(found.dictionary))
        found = pc.add(pc.multiply(found, pa.scalar(count, pa.int64())), numbers)
        size *= count
    return found.dictionary_encode().indices.cast(pa.int64())


def _column_numbers(values: pa.Array, *, nulls: bool) -> tuple[pa.Array, int]:
    """Return a number for each row of a column, and a number above all of them. Rows with the same value have the same
    number.

    :param nulls: as for :func:`key_numbers`.
    """
    if not pa.types.is_dictionary(values.type):
        encoded = values.dictionary_encode(null_encoding="encode" if nulls else "mask")
        return encoded.indices.cast(pa.int64()), max(1, len(encoded.dictionary))
    # Rows with the same text have the same place in the dictionary, so the texts need not be compared.
    places, count = values.indices.cast(pa.int64()), max(1, len(values.dictionary))
    if nulls and places.null_count:
        return pc.fill_null(places, pa.scalar(count, pa.int64())), count + 1
    return places, count


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
        """Group rows by the values of columns. Without columns, there is one group of all rows, which may be empty.

        :param keys: the columns.
        :param rows: number of rows.
        """
        if not keys:
            return cls(pa.repeat(pa.scalar(0, pa.int64()), rows), pa.array([0], pa.int64()))
        number = key_numbers(keys, nulls=True)
        # Groups are numbered in the order of their first rows. So the first row of a group has a greater group number
        # than each row before it.
        before = pa.concat_arrays([pa.array([-1], pa.int64()), pc.cumulative_max(number)])
        return cls(number, pc.indices_nonzero(pc.greater(number, before.slice(0, rows))).cast(pa.int64()))

    @cached_property
    def count(self) -> int:
        """Number of groups."""
        return len(self.first)

    def _aggregate(self, columns: dict[str, pa.Array], wanted: list[tuple[str, str, object]]) -> pa.Table:
        table = pa.table({"group": self.number, **columns})
        found = table.group_by("group", use_threads=False).aggregate(wanted)
        # Arrow usually returns groups in the order of their first rows, which is the order of their numbers.
        number = found["group"].combine_chunks()
        return found if number.equals(pa.arange(0, len(number))) else found.sort_by("group")

    def _spread(self, group: pa.Array, values: pa.Array, other: object) -> pa.Array:
        """Return a value for each group.

        :param group: the groups that have a value, in ascending order.
        :param values: values of these groups.
        :param other: value of all other groups.
        """
        if len(group) == self.count:
            return values
        places = pc.index_in(pa.arange(0, self.count), group)
        found = values.take(places)
        return found if other is None else pc.fill_null(found, other)

    def standard(self, name: str, values: pa.Array, *, other: object = None) -> pa.Array:
        """Return for each group an aggregate of its values that are not NULL.

        :param name: Arrow's name of the aggregate.
        :param other: result for a group without such values.
        """
        return self.several([(name, values, other)])[0]

    def several(self, wanted: Sequence[tuple[str, pa.Array, object]]) -> list[pa.Array]:
        """Return the results of several calls of :meth:`standard`, but assign rows to groups only once.

        :param wanted: arguments of each call: ``name``, ``values`` and ``other``.
        """
        columns = {f"value{index}": values for index, (_, values, _) in enumerate(wanted)}
        options = [_COUNT if name == "count" else _SKIP for name, _, _ in wanted]
        names = [name for name, _, _ in wanted]
        found = self._aggregate(columns, list(zip(columns, names, options, strict=True)))
        group = found["group"].combine_chunks()
        return [
            self._spread(group, found[f"{column}_{name}"].combine_chunks(), other)
            for column, (name, _, other) in zip(columns, wanted, strict=True)
        ]

    def count_distinct(self, *columns: pa.Array) -> pa.Array:
        """Return for each group the number of different combinations of values. Combinations with NULL do not count."""
        numbers = key_numbers(columns, nulls=False)
        pairs = pa.table({"group": self.number, "value": numbers}).filter(pc.is_valid(numbers))
        found = pairs.group_by(["group", "value"], use_threads=False).aggregate([])
        found = found.group_by("group", use_threads=False).aggregate([("value", "count")]).sort_by("group")
        return self._spread(found["group"].combine_chunks(), found["value_count"].combine_chunks(), 0)

    def by(self, values: pa.Array, order: pa.Array, name: str) -> pa.Array:
        """Return for each group the value of the row in which ``order`` is greatest or smallest.

        :param name: ``max`` or ``min``.
        """
        best = self.standard(name, order)
        is_best = pc.fill_null(pc.equal(order, best.take(self.number)), False)
        place = pa.arange(0, len(values)).filter(is_best)
        found = pa.table({"group": self.number.filter(is_best), "place": place})
        found = found.group_by("group", use_threads=False).aggregate([("place", "min")]).sort_by("group")
        places = self._spread(found["group"].combine_chunks(), found["place_min"].combine_chunks(), None)
        return values.take(places)

    def lists(self, values: pa.Array, *, distinct: bool = False) -> pa.Array:
        """Return for each group the list of its values that are not NULL."""
        found: list[list[object]] = [[] for _ in range(self.count)]
        for group, value in zip(self.number.to_pylist(), values.to_pylist(), strict=True):
            if value is not None:
                found[group].append(value)
        rows = [list(dict.fromkeys(one)) for one in found] if distinct else found
        return pa.array(rows, pa.list_(values.type))

    def sum_lists(self, values: pa.Array, length: int) -> pa.Array:
        """Return for each group the element-wise sum of its lists; NULL for a group without lists.

        :param length: number of elements of each list.
        :raises NotInMemory: a list has another length.
        """
        there = pc.is_valid(values)
        lists, numbers = values.filter(there), self.number.filter(there)
        if any(one != length for one in pc.unique(pc.list_value_length(lists)).to_pylist()):
            raise NotInMemory("only Spark computes the sum of lists of different lengths")
        names = [f"value{index}" for index in range(length)]
        positions = (pa.scalar(index, pa.int64()) for index in range(length))
        columns = {
            name: pc.list_element(lists, position).cast(pa.int64())
            for name, position in zip(names, positions, strict=True)
        }
        table = pa.table({"group": numbers, **columns}).group_by("group", use_threads=False)
        found = table.aggregate([(name, "sum", _SKIP) for name in names])
        # ``found`` has a column of sums for each position in the lists. Each group gets a list of its sums again.
        count = found.num_rows
        sums = pa.chunked_array([chunk for name in names for chunk in found[f"{name}_sum"].chunks], pa.int64())
        places = pa.array([row + count * index for row in range(count) for index in range(length)], pa.int64())
        rows = pa.ListArray.from_arrays(
            pa.array(range(0, count * length + 1, length), pa.int32()), sums.combine_chunks().take(places)
        )
        return rows.take(pc.index_in(pa.arange(0, self.count), found["group"].combine_chunks()))

    def count_places(self, places: pa.Array, counts: pa.Array, length: int) -> pa.Array:
        """Return a list of sums for each group. Each row of the group adds its count to one sum of the list, at the
        index that ``places`` states.

        :param places: index in the list for each row, from 0; a row with NULL is ignored.
        :param length: number of sums in each list.
        """
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
    """Return the pairs of rows of a join: the numbers of the left rows, and those of the right rows.

    The number is NULL if a pair has no row on that side. A NULL in a key equals nothing.

    :param how: ``inner``, ``left``, ``full_outer``, ``left_semi`` or ``left_anti``; the last two return rows of the
        left side only.
    """
    if how in ("inner", "left_semi") and _PREFILTER_RATIO * len(right[0]) < len(left[0]):
        # Few rows of the left side have a partner. Only these rows are numbered and joined.
        places = pc.indices_nonzero(_may_match(left, right)).cast(pa.int64())
        if len(places) < len(left[0]):
            found, partners = joined_rows([one.take(places) for one in left], right, how)
            return places.take(found), partners
    pairs = [of_one_form([one, other]) for one, other in zip(left, right, strict=True)]
    kinds = [(one.type, other.type) for one, other in pairs]
    if any(one != other for one, other in kinds):
        raise NotInMemory(f"only Spark computes a join by keys of different types: {kinds}")
    both = [pa.concat_arrays(pair) for pair in pairs]
    numbers, rows = key_numbers(both, nulls=False), len(left[0])
    one = pa.table({"key": numbers.slice(0, rows), "left": pa.arange(0, rows)})
    other = pa.table({"key": numbers.slice(rows), "right": pa.arange(0, len(numbers) - rows)})
    kind = {"left": "left outer", "full_outer": "full outer"}.get(how, how.replace("_", " "))
    found = one.join(other, "key", join_type=kind, use_threads=False)
    order = [(name, "ascending") for name in ("left", "right") if name in found.column_names]
    found = found.sort_by(order)
    nothing = pa.nulls(found.num_rows, pa.int64())
    sides = [found[name].combine_chunks() if name in found.column_names else nothing for name in ("left", "right")]
    return sides[0], sides[1]


def _may_match(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> pa.Array:
    """Return for each left row whether each of its keys occurs on the right side, perhaps in different rows."""
    found = pa.repeat(pa.scalar(True, pa.bool_()), len(left[0]))
    for one, other in zip(left, right, strict=True):
        values = pc.unique(plain(other))
        encoded = pa.types.is_dictionary(one.type)
        column = one.dictionary if encoded else one
        if column.type != values.type:
            continue
        known = pc.is_in(column, value_set=values)
        found = pc.and_(found, pc.fill_null(known.take(one.indices), FALSE) if encoded else known)
    return found
