"""Commands ``dmsg analytics attention`` and ``watch``, which show what needs an operator's attention."""

from __future__ import annotations

import json
import re
import select
import time
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import click

from dmsg.base.printable import printable
from dmsg.cli import output
from dmsg.cli.options import command
from dmsg.cli.output import EXIT_PIPE
from dmsg.cli.params import Seconds
from dmsg.cli.pipeline.common import as_of_option, needs_tables, tables_option

if TYPE_CHECKING:
    from rich.console import Console, Group

    from dmsg.analytics.attention import Finding
    from dmsg.analytics.runs import State

KEY_PREFIX_LENGTH = 8
"""Number of characters of a key that are shown."""


@command()
@tables_option()
@as_of_option
@needs_tables
def attention(out: str, as_of: datetime | None) -> None:
    """List what needs attention, most urgent first; needs no Java."""
    from dmsg.cli.screen import screen

    state, found, at = _read_findings(out, as_of)
    if output.state.json:
        _say_findings(found)
        return
    screen(10_000).print(_render_findings(state, found, at))


@command()
@tables_option()
@click.option(
    "--every",
    default=10.0,
    show_default=True,
    type=Seconds(0.5, 3600),
    help="Seconds between two checks for a newer run.",
)
@needs_tables
def watch(out: str, every: float) -> None:
    """Show what needs attention until Ctrl-C, and refresh it after each run or batch."""
    from deltalake.exceptions import DeltaError
    from rich.live import Live

    from dmsg.analytics.lake_error import LakeError
    from dmsg.cli.screen import screen

    console = screen(10_000)
    state, found, at = _read_findings(out, None)
    if output.state.json:
        _say_each_run(out, every, state, found)
    shown = _fit_findings(console, state, found, at)
    # If the output is a file or a pipe, the findings of each run are printed once.
    with Live(shown, console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        if live is None:
            console.print(shown)
        while True:
            time.sleep(every)
            if live is None and _reader_is_gone():
                raise SystemExit(EXIT_PIPE)
            run, problem = state.run, ""
            try:
                state, found, at = _read_findings(out, None)
            # After an error, the last result stays on the screen, and the next check comes at its usual time.
            except (LakeError, DeltaError, OSError) as error:
                problem = str(error).partition("\n")[0]
            shown = _fit_findings(console, state, found, at, problem)
            if live is not None:
                live.update(shown, refresh=True)
            elif state.run != run:
                console.print(shown)


def _say_findings(findings: list[Finding]) -> None:
    """Print the findings as JSON, one object per line."""
    for one in findings:
        output.say(
            json.dumps(
                {
                    "urgency": one.urgency.word,
                    "kind": one.kind,
                    "about": one.about,
                    "text": one.text,
                    "place": one.place,
                }
            )
        )
    if output.state.status is not None:
        raise SystemExit(output.state.status)


def _say_each_run(out: str, every: float, state: State, findings: list[Finding]) -> NoReturn:
    """Print the findings of each run once, as JSON.  Ends only with the process."""
    from deltalake.exceptions import DeltaError

    from dmsg.analytics.lake_error import LakeError

    while True:
        _say_findings(findings)
        run = state.run
        while state.run == run:
            time.sleep(every)
            if _reader_is_gone():
                raise SystemExit(output.EXIT_PIPE)
            with suppress(LakeError, DeltaError, OSError):
                # After an error, the next check comes at its usual time.
                state, findings, _ = _read_findings(out, None)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _read_findings(out: str, as_of: datetime | None) -> tuple[State, list[Finding], datetime]:
    from dmsg.analytics.attention import needs_attention
    from dmsg.analytics.store import Store

    store = Store(out)
    state = store.computed_state(as_of)
    at = datetime.fromtimestamp(state.at / 1000, UTC)
    now = datetime.now(UTC)
    return state, needs_attention(store, state, now=now if as_of is None else at), now


def _short(name: str) -> str:
    """Return the beginning of a key or pseudonym; other names unchanged."""
    return name[:KEY_PREFIX_LENGTH] if re.fullmatch("[0-9a-f]{16,}", name) else printable(name)


def _fit_findings(
    console: Console, state: State, findings: list[Finding], read_at: datetime, problem: str = ""
) -> Group:
    """Return the most urgent findings, as many as the terminal has lines for, and the number of the others.

    :param read_at: time at which the tables were read.
    :param problem: error of the last attempt to read the tables; empty if there was none.
    """
    from dmsg.analytics.attention import shorten_findings

    lines = shorten_findings(findings)
    for count in range(len(lines), -1, -1):
        more = f"and {len(lines) - count} more: dmsg analytics attention" if count < len(lines) else ""
        shown = _render_findings(state, lines[:count], read_at, problem, more)
        if not console.is_terminal or len(console.render_lines(shown)) < console.height:
            break
    return shown


def _render_findings(
    state: State, findings: list[Finding], read_at: datetime, problem: str = "", more: str = ""
) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from dmsg.analytics.attention import Urgency, shorten_findings

    styles = {Urgency.NOW: "bold red", Urgency.SOON: "yellow", Urgency.NOTE: "dim"}
    findings = shorten_findings(findings)
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column()
    for one in findings:
        grid.add_row(Text(one.urgency.word, style=styles[one.urgency]), _short(one.about), Text(printable(one.text)))
    newest = max(state.days)
    computed = datetime.fromtimestamp(state.at / 1000, UTC)
    head = f"run {state.run} of {computed:%Y-%m-%d %H:%M} UTC, events until {newest}; looked at {read_at:%H:%M:%S}"
    parts = [Text(head, style="dim"), grid if findings or more else Text("nothing needs attention")]
    if more:
        parts.append(Text(more, style="dim"))
    if problem:
        parts.append(Text(printable(problem), style="bold red"))
    return Group(*parts)
