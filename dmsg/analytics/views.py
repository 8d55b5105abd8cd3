"""Silver tables that are views. For most days, the rows of a view are computed from events when they are read. Rows are
stored only for days on which events arrived twice.

A view selects from one family of events. Spark computes it with :mod:`dmsg.analytics.silver`. Queries without Spark use
the SQL of this module, which is the same selection in the dialect of delta-rs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.analytics.schemas import SILVER

_AT = """arrow_cast(to_timestamp_millis(ts), 'Timestamp(Microsecond, Some("UTC"))')"""


@dataclass(frozen=True)
class View:
    """Selection from one family of events.

    :ivar changed: SQL expressions for the columns that events do not have, by column.
    :ivar where: SQL condition that the selected events meet.
    :ivar keys: columns by which events are grouped; the events of a group become one row. Empty if each event becomes a
        row.
    """

    family: str
    changed: dict[str, str]
    where: str = "true"
    keys: tuple[str, ...] = ()

    def sql(self, name: str) -> str:
        """Return an SQL query for all rows of the view. In the query, the table bronze has the name ``it``."""
        columns = ", ".join(
            f'{self.changed.get(column, chr(34) + column + chr(34))} AS "{column}"'
            for column in SILVER[name].schema.fieldNames()
        )
        grouped = f" GROUP BY {', '.join(self.keys)}" if self.keys else ""
        return f"SELECT {columns} FROM it WHERE family = '{self.family}' AND {self.where}{grouped}"  # noqa: S608


_DAY = "CAST(dt AS DATE)"
_HOUR = "CAST(floor(ts % 86400000 / 3600000.0) AS INT)"
VIEWS = {
    "transports": View(
        "transport",
        {"server": "producer", "at": _AT, "hour": _HOUR, "what": "split_part(type, '_', 2)", "dt": _DAY},
    ),
    "refusals": View(
        "refusal",
        {
            "at": _AT,
            "hour": _HOUR,
            "what": "CASE type WHEN 'handshake_fail' THEN 'handshake' WHEN 'transport_refuse' THEN 'request'"
            " WHEN 'entry_refuse' THEN 'entry' WHEN 'lookup_fail' THEN 'lookup' ELSE 'drop' END",
            "who": "coalesce(src, source)",
            "n": "coalesce(n, 1)",
            "targets": "coalesce(targets, 0)",
            "dt": _DAY,
        },
    ),
    "entries": View(
        "entry",
        {"at": _AT, "hour": _HOUR, "is_server": "coalesce(is_server, false)", "dt": _DAY},
    ),
    "receipts": View(
        "receipt",
        {
            "former": "coalesce(former, false)",
            "delivered_out": "min(delivered_out)",
            "delivered_in": "min(delivered_in)",
            "words": "count(*)",
            "peer": "min(peer)",
            "at": _AT.replace("(ts)", "(min(ts))"),
            "dt": "min(CAST(dt AS DATE))",
        },
        "reason IS NULL AND transport IS NOT NULL AND signer IS NOT NULL",
        ("server", "transport", "signer", "partner", "initiator", "coalesce(former, false)"),
    ),
}
"""Views, by the name of the silver table."""
