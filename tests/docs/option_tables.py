"""Tables of options in the documentation, made from the rows of the plugins; ``python -m tests.docs.option_tables``.

A table stands between ``<!-- options: PLUGIN [without OTHER] -->`` and ``<!-- end of options -->``.  With OTHER, the
table leaves out the options that OTHER has in the same form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dmsg.base.options import Flag, Option
from dmsg.tap import collector, discovery, messaging, rmb_peer, rmb_registry, rmb_relay, server
from dmsg.tap.options import EntityOptions

PLUGINS: dict[str, type[EntityOptions]] = {
    module.Options.plugin: module.Options
    for module in (collector, discovery, messaging, rmb_peer, rmb_registry, rmb_relay, server)
}
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / name for name in ("howto/operate.md", "howto/fleet.md", "rmb/operate.md")]
_BLOCK = re.compile(r"(<!-- options: (\S+)(?: without (\S+))? -->\n).*?(<!-- end of options -->)", re.DOTALL)


def table(rows: Sequence[Option]) -> str:
    """Return a table of options in Markdown."""
    reloads = any(row.reloads for row in rows)
    lines = [
        "| option | value | default | meaning |" + (" SIGHUP |" if reloads else ""),
        "|---|---|---|---|" + ("---|" if reloads else ""),
    ]
    for row in sorted(rows, key=lambda row: row.name):
        names = f"`--{row.name}`" + (f", `-{row.short}`" if row.short else "")
        value = "" if isinstance(row.kind, Flag) else row.kind.accepted_text
        cells = [names, value + (", mode 0600" if row.secret else ""), row.default_in_words, row.help]
        if reloads:
            cells.append("yes" if row.reloads else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines) + "\n"


def with_tables(text: str) -> str:
    """Return a page with its tables replaced by those that the rows give."""

    def made(match: re.Match[str]) -> str:
        known = {} if match[3] is None else {row.name: row for row in PLUGINS[match[3]].rows}
        rows = [row for row in PLUGINS[match[2]].rows if known.get(row.name) != row]
        return match[1] + table(rows) + match[4]

    return _BLOCK.sub(made, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
