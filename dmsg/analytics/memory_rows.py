"""Rows in memory with those methods of PySpark's ``DataFrame`` that the rules of the tables use.

Spark takes a third of a CPU second to plan a query, however few its rows are. :class:`MemoryRows` computes the same
rules with Arrow, and without a plan. A column is computed when it is first needed, so columns of a file that no rule
uses are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dmsg.analytics.expressions import Expression, as_column
from dmsg.analytics.memory_aggregates import AGGREGATES, STANDARD, over, standard_operand
from dmsg.analytics.memory_columns import (
    FALSE,
    NotInMemory,
    as_array,
    cast,
    evaluate,
    name_of,
    of_one_form,
    of_one_type,
    plain,
)
from dmsg.analytics.memory_groups import Groups, joined_rows
from dmsg.analytics.parquet import arrow_schema

Get = Callable[[], pa.Array]


class _Once:
    """Column that is computed when it is first needed. Texts may stay dictionary-encoded until an expression needs
    them: to group, filter or join rows by a text, its index in Arrow's dictionary is enough.

    :ivar kind: type of the column, if it is known before the column is computed.
    """

    def __init__(self, get: Get, kind: pa.DataType | None = None) -> None:
        self.kind = kind
        self._get: Get | None = get
        self._values: pa.Array | None = None
        self._plain: pa.Array | None = None

    def __call__(self) -> pa.Array:
        if self._plain is None:
            self._plain = plain(self.encoded())
        return self._plain

    def encoded(self) -> pa.Array:
        """Return the column as it was read or computed, possibly dictionary-encoded."""
        if self._values is None:
            get = self._get
            if get is not None:
                self._values = _without_rest(get())
                # The function refers to the columns from which it has computed this column. It is deleted, so that the
                # memory of these columns can be freed.
                self._get = None
        assert self._values is not None
        return self._values


def _without_rest(values: pa.Array) -> pa.Array:
    """Replace a dictionary-encoded column by plain texts if its dictionary has more texts than the column has rows.
    Otherwise a few rows would keep the large dictionary in memory."""
    if pa.types.is_dictionary(values.type) and len(values.dictionary) > len(values):
        return plain(values)
    return values


def _table_column(table: pa.Table, name: str) -> pa.Array:
    return plain(table[name].combine_chunks())


def _union_column(sides: Sequence[MemoryRows], name: str) -> _Once:
    def values() -> pa.Array:
        parts = [side.getters[name].encoded() if name in side.getters else pa.nulls(side.count_rows) for side in sides]
        return pa.concat_arrays(of_one_type(*of_one_form(parts)))

    kinds = [side.getters[name].kind if name in side.getters else None for side in sides]
    return _Once(values, kinds[0] if all(kind == kinds[0] for kind in kinds) else None)


def _part_of(get: _Once, part: Callable[[pa.Array], pa.Array], count: int) -> _Once:
    """Return a column with some of the rows of another column.

    :param part: returns these rows.
    :param count: number of these rows. If there are none and the type is known, the other column is not computed.
    """
    if not count and (kind := get.kind) is not None:
        return _Once(lambda: pa.array([], kind), kind)
    return _Once(lambda: part(get.encoded()), get.kind)


class MemoryRows:
    """Rows in memory.

    :param columns: functions that return the columns, by name.
    :param count: number of rows.
    :ivar getters: the same functions, each of which computes its column once.
    :ivar count_rows: number of rows.
    """

    def __init__(self, columns: Mapping[str, Get], count: int) -> None:
        self.getters = {name: get if isinstance(get, _Once) else _Once(get) for name, get in columns.items()}
        self.count_rows = count

    @classmethod
    def of(cls, table: pa.Table) -> MemoryRows:
        """Return the rows of a table of Arrow."""
        return cls({name: partial(_table_column, table, name) for name in table.column_names}, table.num_rows)

    @classmethod
    def with_types(cls, columns: Mapping[str, tuple[Get, pa.DataType]], count: int) -> MemoryRows:
        """Return rows with columns of known types.

        :param columns: function that returns the column, and the type of the column, by name.
        """
        return cls({name: _Once(get, kind) for name, (get, kind) in columns.items()}, count)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.getters)

    def column(self, name: str) -> pa.Array:
        """Return the values of a column, or with ``COLUMN.FIELD`` the values of a field of a structure.

        :raises NotInMemory: there is no such column.
        """
        if name in self.getters:
            return self.getters[name]()
        whole, dot, field = name.partition(".")
        if dot and whole in self.getters:
            return pc.struct_field(self.getters[whole](), field)
        raise NotInMemory(f"the rows have no column {name}")

    def key(self, column: Expression) -> pa.Array:
        """Return the values of an expression by which rows are grouped. Texts may be dictionary-encoded."""
        inner = column.args[0] if column.op == "alias" else column
        if inner.op == "column" and inner.args[0] in self.getters:
            return self.getters[inner.args[0]].encoded()
        return self.values(column)

    def table(self, schema: StructType) -> pa.Table:
        """Return the rows with the columns and types of a schema. A missing column is NULL in all rows."""
        fields = arrow_schema(schema)
        found = []
        for one in fields:
            if one.name not in self.getters:
                found.append(pa.nulls(self.count_rows, one.type))
                continue
            values = self.column(one.name)
            found.append(values if values.type == one.type else _as_type(values, one.type))
        return pa.table(found, schema=fields)

    def values(self, expression: Expression) -> pa.Array:
        """Return the values of an expression."""
        parts: dict[str, pa.Array] = {}

        def column(name: str) -> pa.Array:
            return parts[name] if name in parts else self.column(name)

        def windowed(one: Expression) -> pa.Array:
            return over(one, column, self.count_rows)

        inner = _replace(expression, {"over"}, parts, windowed)
        return as_array(evaluate(inner, column, self.count_rows), self.count_rows)

    def chosen(self, keep: pa.Array) -> MemoryRows:
        """Return some of the rows.

        :param keep: for each row, whether it is returned.
        """
        count = pc.sum(keep).as_py() or 0
        return MemoryRows(
            {name: _part_of(get, lambda values: values.filter(keep), count) for name, get in self.getters.items()},
            count,
        )

    # The names of the following methods are PySpark's.

    def select(self, *columns: Any) -> MemoryRows:
        """Return the same rows with only the given columns, which may be computed."""
        wanted: dict[str, Get] = {}
        exploded: tuple[str, Expression] | None = None
        for one in columns:
            if isinstance(one, str) and one.endswith(".*"):
                kind = self.column(one[:-2]).type
                for field in kind:
                    wanted[field.name] = self._getter(as_column(f"{one[:-2]}.{field.name}"))
            elif one == "*" if isinstance(one, str) else False:
                wanted |= self.getters
            else:
                column = as_column(one)
                inner = column.args[0] if column.op == "alias" else column
                if inner.op == "explode":
                    exploded = name_of(column), inner.args[0]
                    wanted[name_of(column)] = self._getter(inner.args[0])
                else:
                    wanted[name_of(column)] = self._getter(column)
        found = MemoryRows(wanted, self.count_rows)
        return found if exploded is None else found._explode(exploded[0])

    def _getter(self, column: Expression) -> Get:
        inner = column.args[0] if column.op == "alias" else column
        if inner.op == "column" and inner.args[0] in self.getters:
            return self.getters[inner.args[0]]
        return lambda: self.values(column)

    def _explode(self, name: str) -> MemoryRows:
        lists = self.column(name)
        parents = pc.list_parent_indices(lists)
        others = self._take(parents).getters
        return MemoryRows({**others, name: partial(pc.list_flatten, lists)}, len(parents))

    def _take(self, places: pa.Array) -> MemoryRows:
        count = len(places)
        return MemoryRows(
            {name: _part_of(get, lambda values: values.take(places), count) for name, get in self.getters.items()},
            count,
        )

    def where(self, condition: Expression | str) -> MemoryRows:
        """Return the rows for which a condition is true; a text is the name of a column."""
        return self.chosen(pc.fill_null(self.values(as_column(condition)).cast(pa.bool_()), FALSE))

    def withColumns(self, columns: Mapping[str, Expression]) -> MemoryRows:
        """Add or replace columns."""
        fresh = {name: self._getter(as_column(column)) for name, column in columns.items()}
        return MemoryRows({**self.getters, **fresh}, self.count_rows)

    def withColumn(self, name: str, column: Expression) -> MemoryRows:
        """Add or replace a column."""
        return self.withColumns({name: column})

    def withColumnRenamed(self, before: str, after: str) -> MemoryRows:
        """Rename a column."""
        return MemoryRows(
            {after if name == before else name: get for name, get in self.getters.items()}, self.count_rows
        )

    def isEmpty(self) -> bool:
        """Whether there are no rows."""
        return self.count_rows == 0

    def drop(self, *names: str) -> MemoryRows:
        """Remove columns."""
        return MemoryRows({name: get for name, get in self.getters.items() if name not in names}, self.count_rows)

    def fillna(self, value: object, names: Sequence[str]) -> MemoryRows:
        """Replace NULL in some columns."""
        return self.withColumns({name: Expression("coalesce", as_column(name), _literal(value)) for name in names})

    def distinct(self) -> MemoryRows:
        """Return each row once."""
        return self._take(Groups.of([get.encoded() for get in self.getters.values()], self.count_rows).first)

    def unionByName(self, *others: MemoryRows, allowMissingColumns: bool = False) -> MemoryRows:
        """Return the rows of all sides, which may be more than PySpark's two. A column that one side lacks is NULL in
        the rows of that side."""
        sides = (self, *others)
        names = list(dict.fromkeys(name for side in sides for name in side.columns))
        if not allowMissingColumns and len(names) > len(self.columns):
            raise NotInMemory("only Spark computes a union whose sides have different columns")
        return MemoryRows({name: _union_column(sides, name) for name in names}, sum(side.count_rows for side in sides))

    def groupBy(self, *columns: Any) -> _Grouped:
        """Group the rows."""
        return _Grouped(self, [as_column(one) for one in columns])

    def agg(self, *aggregates: Expression) -> MemoryRows:
        """Aggregate all rows to one."""
        return self.groupBy().agg(*aggregates)

    def join(self, other: MemoryRows, on: str | Sequence[str], how: str = "inner") -> MemoryRows:
        """Join by columns with the same names."""
        names = [on] if isinstance(on, str) else list(on)
        keys = [[rows.key(as_column(name)) for name in names] for rows in (self, other)]
        left, right = joined_rows(keys[0], keys[1], how)
        if how in ("left_semi", "left_anti"):
            return self._take(left)
        one, two = self._take(left), other._take(right)
        columns: dict[str, Get] = {name: one.getters[name] for name in names}
        if how == "full_outer":
            columns = {name: partial(_first_of, one, two, name) for name in names}
        for rows in (one, two):
            for name, get in rows.getters.items():
                if name not in names:
                    if name in columns:
                        raise NotInMemory(f"only Spark computes a join whose two sides both have a column {name}")
                    columns[name] = get
        return MemoryRows(columns, len(left))

    def crossJoin(self, other: MemoryRows) -> MemoryRows:
        """Return each row, combined with the only row of the other side.

        :raises NotInMemory: the other side does not have exactly one row.
        """
        if other.count_rows != 1:
            raise NotInMemory("only Spark computes a cross join unless one side has exactly one row")
        single = other._take(pa.repeat(pa.scalar(0, pa.int64()), self.count_rows))
        return MemoryRows({**self.getters, **single.getters}, self.count_rows)


class _Grouped:
    """Grouped rows, whose aggregates are not computed yet."""

    def __init__(self, rows: MemoryRows, keys: Sequence[Expression]) -> None:
        self._rows = rows
        self._keys = keys

    def agg(self, *aggregates: Expression) -> MemoryRows:
        rows = self._rows
        keys = {name_of(key): rows.key(key) for key in self._keys}
        groups = Groups.of(list(keys.values()), rows.count_rows)
        columns: dict[str, Get] = {name: partial(values.take, groups.first) for name, values in keys.items()}
        known: dict[str, pa.Array] = {}

        def compute_standard() -> None:
            """Compute all aggregates that Arrow can compute together."""
            found: dict[str, Expression] = {}
            for column in aggregates:
                _find(column, STANDARD, found)
            names = [STANDARD[one.op] for one in found.values()]
            operands = [
                standard_operand(groups, one.op, *(rows.values(operand) for operand in one.args))
                for one in found.values()
            ]
            wanted = [(name, values, other) for (name, other), values in zip(names, operands, strict=True)]
            known.update(zip(found, groups.several(wanted), strict=True))

        def aggregate(column: Expression) -> pa.Array:
            if column.sql not in known and column.op in STANDARD:
                compute_standard()
            if column.sql not in known:
                known[column.sql] = AGGREGATES[column.op](groups, *(rows.values(one) for one in column.args))
            return known[column.sql]

        def getter(column: Expression) -> Get:
            def values() -> pa.Array:
                parts: dict[str, pa.Array] = {}
                outer = _replace(column, AGGREGATES, parts, aggregate)
                return as_array(evaluate(outer, parts.__getitem__, groups.count), groups.count)

            return values

        for column in aggregates:
            columns[name_of(column)] = getter(column)
        return MemoryRows(columns, groups.count)


def _find(column: Expression, operations: Container[str], found: dict[str, Expression]) -> None:
    """Add each part of an expression whose operation is in ``operations`` to ``found``, under the part's SQL text."""
    if column.op in operations:
        found[column.sql] = column
        return
    for one in column.args:
        if isinstance(one, Expression):
            _find(one, operations, found)


def _replace(
    column: Expression,
    operations: Container[str],
    parts: dict[str, pa.Array],
    compute: Callable[[Expression], pa.Array],
) -> Expression:
    """Return a copy of an expression in which some operations are replaced by references to computed columns.

    :param column: the expression.

    :param operations: names of the operations to replace.
    :param parts: mapping to which the computed columns are added, by name.
    :param compute: function that computes the column of an operation.
    """
    if column.op in operations:
        parts[column.sql] = compute(column)
        return Expression("column", column.sql)
    if not any(isinstance(one, Expression) for one in column.args):
        return column
    args = [_replace(one, operations, parts, compute) if isinstance(one, Expression) else one for one in column.args]
    return Expression(column.op, *args, text=column.sql)


def _first_of(one: MemoryRows, other: MemoryRows, name: str) -> pa.Array:
    return pc.coalesce(one.column(name), other.column(name))


def _literal(value: object) -> Expression:
    return Expression("literal", value)


def _as_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_list(kind):
        return values.cast(kind)
    name = {pa.int32(): "int", pa.int64(): "long", pa.float64(): "double", pa.string(): "string"}.get(kind)
    found = values.cast(kind) if name is None else cast(values, name)
    return as_array(found, len(values))
