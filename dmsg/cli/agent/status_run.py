"""Implementation of ``dmsg status``: prints the agent's key, servers, services and streams."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dmsg.base.units import human_size, human_time, milliseconds
from dmsg.cli.carrier_text import describe_carrier
from dmsg.cli.output import columns, say
from dmsg.clients.address_book import AddressBook
from dmsg.errors import CloseReason, DmsgError, close_reason_text
from dmsg.keys import PubKey
from dmsg.net.carriers.names import PLAIN

if TYPE_CHECKING:
    from dmsg.agent.wire import Answer


SHOWN_ALLOWED = 3
"""Maximum number of allowed peers that are printed for a service.  Further peers are only counted."""


def show(answer: Answer) -> None:
    """Print the agent's answer to ``status`` for people."""
    names = AddressBook()
    key = str(answer["key"])
    name, text = _name(names, key), PubKey.from_hex(key).text
    if name == text:
        say(text)
    else:
        say(f"{name}  {text}" if len(name) + 2 + len(text) <= columns() else f"{name}\n{text}")
    uptime = _uptime(answer)
    say(f"the agent is {answer['state']}, process {answer['pid']}, up for {uptime}")
    servers = answer["servers"]
    say()
    _table(
        f"{len(servers)} server{'' if len(servers) == 1 else 's'}",
        [
            (
                _name(names, one["key"]),
                "?" if one["round_trip"] is None else milliseconds(one["round_trip"]),
                # Agents of earlier versions do not report carriers.
                describe_carrier(one.get("carrier", PLAIN), one.get("carriers_failed", {})),
            )
            for one in servers
        ],
    )
    _table(
        "services",
        [
            (
                f"port {one['port']}",
                f"{one['program']} (process {one['pid']})",
                one.get("offers", ""),
                _open_to(names, one),
                f"{one['taken']} accepted" + (f", {one['refused']} refused" if one["refused"] else ""),
            )
            for one in answer["services"]
        ],
    )
    _table(
        "streams",
        [
            (
                f"{'from' if one['incoming'] else 'to'} {_name(names, one['peer'])}:{one['port']}",
                _path_text(names, one),
                f"in {human_size(one['rate_in'])}/s",
                f"out {human_size(one['rate_out'])}/s",
                f"{human_size(one['bytes_in'])} and {human_size(one['bytes_out'])} in {human_time(one['seconds'])}",
            )
            for one in answer["streams"]
        ],
    )
    more = answer["streams_in_all"] - len(answer["streams"])
    if more > 0:
        say(f"  and {more} more streams are open")
    refused = {name: number for name, number in answer["refused"].items() if number}
    _table("refused to others", [(_reason(name), str(number)) for name, number in sorted(refused.items())])


def _reason(name: str) -> str:
    """Return a text for the reason why the agent's client refused requests."""
    if name == "handshakes":
        return "too many handshakes at a time"
    try:
        return close_reason_text(CloseReason[name.upper()])
    except KeyError:
        return name.replace("_", " ")


def _table(title: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows as a table, or on a narrow terminal each cell on a line of its own.  Print nothing if there are no
    rows.
    """
    rows = list(rows)
    if not rows:
        return
    say(title)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if 2 * len(widths) + sum(widths) > columns():
        for row in rows:
            say(f"  {row[0]}")
            for cell in row[1:]:
                say(f"    {cell}")
        return
    for row in rows:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _path_text(names: AddressBook, stream: Answer) -> str:
    if stream["away"] is not None:
        return f"no transport for {human_time(stream['away'])}"
    kind = f", {stream.get('cipher', 'encrypted')}" if stream["secure"] else ", not encrypted"
    return f"by {_name(names, stream['server'])}{kind}" if stream["server"] else "?"


def _open_to(names: AddressBook, stream: Answer) -> str:
    """Return a text that says which peers may connect to a service."""
    if stream.get("anyone") is None:
        return "its program decides who may connect"
    if stream["anyone"]:
        return "open to anyone who knows the key"
    shown = [_name(names, key) for key in stream["allow"][:SHOWN_ALLOWED]]
    more = stream["allowed"] - len(shown)
    return f"open to {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")


def _name(names: AddressBook, key: str) -> str:
    try:
        public = PubKey.from_hex(key)
    except DmsgError:
        return key
    return names.name_or_key(public)


def _uptime(answer: Answer) -> str:
    """Return the time for which the agent has run, as text.  Agents of earlier versions report only when they
    started.
    """
    return human_time(answer.get("up_seconds", max(0.0, time.time() - answer["since"])))
