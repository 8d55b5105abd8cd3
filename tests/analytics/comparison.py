"""Comparison of the gold tables of a lake with DuckDB's answers to the same questions."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

from duckdb import DuckDBPyConnection

from dmsg.analytics.lake import Lake
from dmsg.analytics.schemas import DAY_MS, GOLD
from tests.analytics.oracle import connect, queries

KEYS = (
    "server",
    "producer",
    "boot",
    "dt",
    "hour",
    "what",
    "who",
    "kind",
    "names",
    "reason",
    "by",
    "src",
    "dst",
    "transport",
)


def differences(gold: list[dict[str, Any]], oracle: list[dict[str, Any]], keys: list[str]) -> list[str]:
    """Return the rows in which two answers to a question differ. Columns that only one answer has are ignored."""
    found: list[str] = []

    def keyed(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        result = {tuple(row[key] for key in keys): row for row in rows}
        if len(result) != len(rows):
            found.append("keys are not unique")
        return result

    one, other = keyed(gold), keyed(oracle)
    if one.keys() != other.keys():
        found.append(f"rows: {len(one)} and {len(other)}; {list(one.keys() ^ other.keys())[:3]}")
    for key in one.keys() & other.keys():
        for name in one[key].keys() & other[key].keys():
            mine, theirs = one[key][name], other[key][name]
            if mine is None or theirs is None or isinstance(mine, str):
                same = mine == theirs
            elif isinstance(mine, int | float):
                same = abs(float(mine) - float(theirs)) <= 1e-6 * max(1.0, abs(float(mine)))
            else:
                same = mine == theirs
            if not same:
                found.append(f"{key} {name}: {mine} and {theirs}")
    return found


def unlike(name: str, gold: list[dict[str, Any]], base: DuckDBPyConnection, today: date) -> list[str]:
    """Return the rows in which a gold table differs from DuckDB's answer."""
    cursor = base.execute(queries(today)[name])
    assert cursor.description is not None
    names = [column[0] for column in cursor.description]
    oracle: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    columns = GOLD[name].schema.fieldNames()
    keys = [key for key in KEYS if key in columns and key in names]
    if name == "network_day":
        keys = ["dt"]
        gold = [row for row in gold if row["servers"]]
    if name == "public_day":
        gold = [row for row in gold if row["dt"] in {one["dt"] for one in oracle}]
    return differences(gold, oracle, keys)


def until(today: date) -> int:
    """Return the end of a day, in ms since 1970; events after it count as events of the future."""
    return (today - date(1970, 1, 1)).days * DAY_MS + DAY_MS


def compare(lake: Lake, spool: Path, checked: Path, today: date) -> dict[str, list[str]]:
    """Compare all gold tables; return the differences by table."""
    base = connect(spool, checked, until=until(today))
    state = lake.state()
    found = {}
    for name in queries(today):
        gold = [
            {key: value.replace(tzinfo=None) if isinstance(value, datetime) else value for key, value in row.items()}
            for row in lake.stored("gold", name, state).to_pylist()
        ]
        found[name] = unlike(name, gold, base, today)
    base.close()
    return found
