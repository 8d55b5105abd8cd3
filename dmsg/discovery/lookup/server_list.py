"""List of servers that a discovery offers: parses and verifies the entries, and counts the refused ones. No I/O."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from dmsg.base.printable import MAX_PEER_TEXT, shorten
from dmsg.discovery.entries.dialects import Dialect
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.recognition import is_version_1
from dmsg.errors import EntryError

MAX_LISTED = 128
"""Maximum number of servers that are taken from one answer, because each costs the verification of a signature."""
MAX_REASONS = 3
"""Maximum number of different reasons for refusals that are described; the most frequent ones are chosen."""
_FOREIGN = "it is of today's dmsg (version 1), whose network this program cannot join"


class ServerList(list[Entry]):
    """Verified entries of servers.

    :ivar refusal: line that names the discovery, and says how many of its entries were refused and why; empty if none
        was.
    """

    def __init__(self, entries: Iterable[Entry] = (), refusal: str = "") -> None:
        super().__init__(entries)
        self.refusal = refusal


def parse_server_list(listed: Sequence[object], source: str) -> ServerList:
    """Parse and verify the entries in the answer of a discovery.

    :param source: name of the discovery for the description of refused entries.
    """
    entries: list[Entry] = []
    reasons: Counter[str] = Counter()
    for one in listed[:MAX_LISTED]:
        try:
            body = json.dumps(one).encode()
            entry = Dialect.SEED.decode_signed(body)
        except RecursionError:
            reasons["JSON is nested too deeply"] += 1
        except EntryError as error:
            reasons[_FOREIGN if is_version_1(body) else shorten(str(error), MAX_PEER_TEXT)] += 1
        else:
            if entry.server is None:
                reasons["it is no server's"] += 1
            else:
                entries.append(entry)
    refusal = _describe(reasons, min(len(listed), MAX_LISTED))
    return ServerList(entries, refusal and f"{source}: {refusal}")


def _describe(reasons: Counter[str], listed: int) -> str:
    refused = reasons.total()
    if not refused:
        return ""
    shown = reasons.most_common(MAX_REASONS)
    why = ", ".join(reason if len(reasons) == 1 else f"{reason} ({number})" for reason, number in shown)
    if len(reasons) > MAX_REASONS:
        why += f", and other reasons ({refused - sum(number for _, number in shown)})"
    return f"{refused} of {listed} server entries are refused: {why}"
