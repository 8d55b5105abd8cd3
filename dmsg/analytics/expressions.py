"""Column expressions for two engines: Spark gets their SQL text, and Arrow computes them for rows in memory.

PySpark accepts an :class:`Expression` wherever it accepts a column. An expression is a tree in Python, and passes one
SQL text to Spark, because a column that PySpark builds takes a call to Java for each of its parts. The module
:mod:`dmsg.analytics.memory_columns` evaluates the same tree in memory. The module :mod:`dmsg.analytics.functions`
builds expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

from pyspark.sql import Column, functions
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.utils import is_remote

_BINARY = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "modulo": "%",
    "equal": "=",
    "not_equal": "<>",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "and": "AND",
    "or": "OR",
}
_INT = 2**31


def literal_sql(value: object) -> str:
    """Return a Python value as a literal of Spark's SQL, of the type that PySpark's ``lit`` gives it."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"({value})" if value < 0 else str(value)
    if isinstance(value, float):
        return f"{value!r}D"
    if isinstance(value, date):
        return f"DATE'{value.isoformat()}'"
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{text}'"
    raise TypeError(f"a value of the type {type(value).__name__} cannot be a literal of Spark's SQL")


@dataclass(frozen=True)
class WindowRows:
    """Window of SQL (``OVER (...)``): the rows over which a window function is computed for the current row. They have
    the same values as the current row in some columns, and are sorted.

    :ivar partition: the columns whose values are the same.
    :ivar order: columns by which the rows are sorted, and whether each is in descending order.
    :ivar first: offset of the window's first row from the current row; None for the first row of the partition.
    :ivar last: offset of the window's last row from the current row; None for the last row of the partition.
    """

    partition: tuple[Expression, ...] = ()
    order: tuple[tuple[Expression, bool], ...] = ()
    first: int | None = None
    last: int | None = None

    def orderBy(self, *columns: Column | str) -> WindowRows:
        """Return the window with its rows in the order of these columns."""
        return replace(self, order=tuple(_in_order(one) for one in columns))

    def rowsBetween(self, first: int | None, last: int | None) -> WindowRows:
        """Return the window with the rows from ``first`` to ``last``, relative to the current row."""
        return replace(self, first=first, last=last)

    @property
    def sql(self) -> str:
        """The window in Spark's SQL: the text between the parentheses of ``OVER (...)``."""
        parts = []
        if self.partition:
            parts.append("PARTITION BY " + ", ".join(one.sql for one in self.partition))
        if self.order:
            parts.append("ORDER BY " + ", ".join(one.sql + (" DESC" if down else "") for one, down in self.order))
            parts.append(f"ROWS BETWEEN {_bound(self.first, 'PRECEDING')} AND {_bound(self.last, 'FOLLOWING')}")
        return " ".join(parts)


def _in_order(column: Column | str) -> tuple[Expression, bool]:
    found = as_column(column)
    return (found.args[0], True) if found.op == "desc" else (found, False)


def _bound(rows: int | None, side: str) -> str:
    if rows is None:
        return f"UNBOUNDED {side}"
    if rows == 0:
        return "CURRENT ROW"
    return f"{abs(rows)} {'PRECEDING' if rows < 0 else 'FOLLOWING'}"


class Expression(ClassicColumn):
    """Column expression: a tree of operations and their operands.

    :ivar op: name of the operation, for most operations the name of Spark's function.
    :ivar args: operands, which are expressions, or Python values if the operation takes such values.
    """

    op: str
    args: tuple[Any, ...]

    def __new__(cls, *args: Any, **more: Any) -> Expression:
        """Make an instance of this class. PySpark's own ``__new__`` would make one of another class of PySpark."""
        return object.__new__(cls)

    def __init__(self, op: str, *args: Any, text: str | None = None) -> None:
        """Make an expression.

        :param text: SQL text of the expression; None to derive the text from ``op`` and ``args``.
        """
        self.op = op
        # The name of an operand has no meaning inside an expression, so it is removed. Only a structure keeps the names
        # of its operands, because they are the names of its fields.
        self.args = args if op == "struct" else tuple(_without_name(one) for one in args)
        self._text = text

    # --- Spark ---

    @cached_property
    def sql(self) -> str:
        """Text of the expression in Spark's SQL."""
        if self._text is not None:
            return self._text
        op, args = self.op, self.args
        if op in _BINARY:
            return f"({args[0].sql} {_BINARY[op]} {args[1].sql})"
        if op in _SPECIAL:
            return _SPECIAL[op](*args)
        return f"{op}({', '.join(one.sql for one in args)})"

    def _of_spark(self) -> Column:
        if is_remote():
            from pyspark.sql.connect import functions as remote

            return remote.expr(self.sql)
        return functions.expr(self.sql)

    @property
    def _jc(self) -> Any:
        """Column as an object of Java. PySpark reads this attribute of a column."""
        return self._of_spark()._jc  # noqa: SLF001  # PySpark has no other name for it

    @property
    def _expr(self) -> Any:
        """Column as an object of Spark Connect. PySpark reads this attribute of a column."""
        return self._of_spark()._expr  # noqa: SLF001

    def to_plan(self, session: Any) -> Any:
        """Return the column as a part of a plan. Spark Connect calls this method."""
        return self._expr.to_plan(session)

    def __getattr__(self, item: Any) -> Any:
        """Raise an error for an unknown attribute. PySpark's columns return a field of a structure instead."""
        raise AttributeError(item)

    def __repr__(self) -> str:
        """Return the SQL text."""
        return f"Expression<{self.sql}>"

    # --- operators ---

    def _with(self, op: str, other: Any, *, swapped: bool = False) -> Expression:
        one, two = (as_value(other), self) if swapped else (self, as_value(other))
        return Expression(op, one, two)

    def __add__(self, other: Any) -> Expression:
        return self._with("add", other)

    def __radd__(self, other: Any) -> Expression:
        return self._with("add", other, swapped=True)

    def __sub__(self, other: Any) -> Expression:
        return self._with("subtract", other)

    def __rsub__(self, other: Any) -> Expression:
        return self._with("subtract", other, swapped=True)

    def __mul__(self, other: Any) -> Expression:
        return self._with("multiply", other)

    def __rmul__(self, other: Any) -> Expression:
        return self._with("multiply", other, swapped=True)

    def __truediv__(self, other: Any) -> Expression:
        return self._with("divide", other)

    def __rtruediv__(self, other: Any) -> Expression:
        return self._with("divide", other, swapped=True)

    def __mod__(self, other: Any) -> Expression:
        return self._with("modulo", other)

    def __eq__(self, other: Any) -> Expression:  # type: ignore[override]
        return self._with("equal", other)

    def __ne__(self, other: Any) -> Expression:  # type: ignore[override]
        return self._with("not_equal", other)

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Expression:
        return self._with("less", other)

    def __le__(self, other: Any) -> Expression:
        return self._with("less_equal", other)

    def __gt__(self, other: Any) -> Expression:
        return self._with("greater", other)

    def __ge__(self, other: Any) -> Expression:
        return self._with("greater_equal", other)

    def __and__(self, other: Any) -> Expression:
        return self._with("and", other)

    def __or__(self, other: Any) -> Expression:
        return self._with("or", other)

    def __invert__(self) -> Expression:
        return Expression("not", self)

    # The names of the following methods are PySpark's.

    def alias(self, *alias: str, **kwargs: Any) -> Expression:
        """Return the expression under another name."""
        return Expression("alias", self, alias[0])

    def cast(self, dataType: Any) -> Expression:
        """Convert the value to another type, which is named as in Spark's SQL."""
        return Expression("cast", self, str(dataType))

    def isin(self, *cols: Any) -> Expression:
        """Return whether the value is one of several, which are the arguments or the items of a single list."""
        values = cols[0] if len(cols) == 1 and isinstance(cols[0], Sequence) and not isinstance(cols[0], str) else cols
        # SQL has no empty list. A list with only NULL replaces it, because a comparison with NULL is never true.
        return Expression("in", self, *(as_value(one) for one in values or [None]))

    def isNull(self) -> Expression:
        """Return whether the value is NULL."""
        return Expression("isnull", self)

    def isNotNull(self) -> Expression:
        """Return whether the value is not NULL."""
        return Expression("isnotnull", self)

    def contains(self, other: Any) -> Expression:
        """Return whether a text contains another."""
        return self._with("contains", other)

    def rlike(self, other: str) -> Expression:
        """Return whether a text contains a match of a regular expression."""
        return self._with("rlike", other)

    def bitwiseAND(self, other: Any) -> Expression:
        """Return the bitwise AND of two numbers."""
        return self._with("bitwise_and", other)

    def desc(self) -> Expression:
        """Return the column for a descending order."""
        return Expression("desc", self)

    def when(self, condition: Column, value: Any) -> Expression:
        """Add a case to an expression of ``functions.when``."""
        assert self.op == "case" and self.args[-1] is None
        return Expression("case", *self.args[:-1], as_value(condition), as_value(value), None)

    def otherwise(self, value: Any) -> Expression:
        """Add the value for all other cases."""
        assert self.op == "case" and self.args[-1] is None
        return Expression("case", *self.args[:-1], as_value(value))

    def over(self, window: Any) -> Expression:
        """Return an aggregate over the rows of a window."""
        return Expression("over", self, window)


def _without_name(value: Any) -> Any:
    return value.args[0] if isinstance(value, Expression) and value.op == "alias" else value


def _case_sql(*parts: Expression | None) -> str:
    *branches, last = parts
    texts = [one.sql for one in branches if one is not None]
    whens = " ".join(f"WHEN {texts[index]} THEN {texts[index + 1]}" for index in range(0, len(texts), 2))
    return f"CASE {whens}{'' if last is None else f' ELSE {last.sql}'} END"


_SPECIAL: dict[str, Callable[..., str]] = {
    "column": lambda name: ".".join(f"`{part}`" for part in name.split(".")),
    "literal": literal_sql,
    "alias": lambda value, name: f"{value.sql} AS `{name}`",
    "cast": lambda value, kind: f"CAST({value.sql} AS {kind})",
    "case": _case_sql,
    "not": lambda value: f"(NOT {value.sql})",
    "in": lambda value, *among: f"({value.sql} IN ({', '.join(one.sql for one in among)}))",
    "over": lambda value, window: f"({value.sql} OVER ({window.sql}))",
    "rlike": lambda value, pattern: f"({value.sql} RLIKE {pattern.sql})",
    "bitwise_and": lambda one, other: f"({one.sql} & {other.sql})",
    "count_all": lambda: "count(1)",
}
"""Functions that return the SQL text of an operation, by the name of the operation. Operations that are not in this
table are written ``NAME(OPERANDS)``.
"""


def as_value(value: Any) -> Expression:
    """Return an expression as it is, and any other value as a literal."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, Column):
        raise TypeError("columns of PySpark's functions cannot be part of an expression: use dmsg.analytics.functions")
    return Expression("literal", value)


def as_column(column: Any) -> Expression:
    """Return an expression as it is, and a text as the column of that name."""
    return Expression("column", column) if isinstance(column, str) else as_value(column)
