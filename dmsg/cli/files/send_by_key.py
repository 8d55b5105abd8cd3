"""Parts that ``dmsg send`` and ``dmsg receive`` share: progress bars, and reports about transfers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from dmsg.apps.sources import changed_text
from dmsg.base.printable import printable
from dmsg.base.units import human_size
from dmsg.cli.output import notice, state, tell
from dmsg.clients.address_book import AddressBook
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.apps.parcels.receiver import ReceivedParcel
    from dmsg.apps.parcels.sender import SentParcel
    from dmsg.apps.parcels.walk import WalkResult


SHOWN_THINGS = 20
"""Maximum number of names that are printed of an offer, or of the files left out.  Further names are only counted."""
MEDIUM, WIDE = 60, 90
"""Minimum widths of the terminal, in columns: ``MEDIUM`` for a bar, and ``WIDE`` for rate and remaining time."""
NUMBERS_WIDTH = 62
"""Width in columns that the bar, the bytes, the rate and the remaining time need on a wide terminal. The name gets the
rest."""


def transfer_progress(console: Console | None = None) -> Progress:
    """Return a display with one line per transfer.  It shows nothing if its output is not a terminal.

    :param console: where to show it; None for standard error.
    """
    console = console or Console(stderr=True)
    # Each transfer has one line, so a narrow terminal gets fewer columns, and a long name is cut.
    name = TextColumn(
        "{task.description}",
        markup=False,
        table_column=Column(
            no_wrap=True,
            overflow="ellipsis",
            ratio=1,
            # Without a maximum width, rich would cut the numbers in a wide terminal, and not the name.
            max_width=console.width - NUMBERS_WIDTH if console.width >= WIDE else None,
        ),
    )
    columns: list[ProgressColumn] = [name, TextColumn("{task.percentage:>3.0f}%")]
    if console.width >= MEDIUM:
        columns = [name, BarColumn(bar_width=20), DownloadColumn()]
    if console.width >= WIDE:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    return Progress(
        *columns,
        console=console,
        expand=console.width < WIDE,
        transient=True,
        # Without a terminal, even an empty display would print a blank line.
        disable=state.quiet or not console.is_terminal or console.is_dumb_terminal,
    )


def say_left_out(walked: WalkResult) -> None:
    """Print which files are not sent, and why."""
    reasons = (
        (walked.own, "it is dmsg's own, a secret key perhaps"),
        (walked.dotted, "its name begins with a dot (--hidden sends it)"),
        (walked.left_out, "it is a link to a path outside the sent directory, or a device, pipe or socket"),
    )
    for paths, why in reasons:
        for path in paths[:SHOWN_THINGS]:
            notice(f"not sent: {printable(path)}: {why}")
        if len(paths) > SHOWN_THINGS:
            notice(f"and {len(paths) - SHOWN_THINGS} more are not sent: {why}")


def print_beside_bars(progress: Progress, print_text: Callable[[], None]) -> None:
    """Print text while progress bars are shown.  The bars are removed before, and drawn again below the text."""
    shown = progress.live.is_started
    if shown:
        progress.stop()
    print_text()
    if shown:
        progress.start()


def report(verb: str, name: str, done: SentParcel | ReceivedParcel, peer: PubKey, path: str = "") -> None:
    """Print that a file has arrived, with its size, rate and hash.

    :param verb: ``sent`` or ``received``.
    :param path: path to print in place of the name.
    """
    whom = f"{'to' if verb == 'sent' else 'from'} {AddressBook().name_or_key(peer)}"
    tell(
        f"{verb} {printable(path or name)} {whom}: {human_size(done.size)} in {done.seconds:.2f} s, "
        f"{human_size(done.rate)}/s, sha256 {done.sha256}",
        **{verb: name},
        peer=str(peer),
        bytes=done.size,
        seconds=done.seconds,
        sha256=done.sha256,
    )


def list_names(names: Sequence[str]) -> str:
    """Return names joined by commas.  Of a long list, return the first names and the number of the others."""
    more = len(names) - SHOWN_THINGS
    shown = ", ".join(quote_name(name) for name in names[:SHOWN_THINGS])
    return f"{shown} and {more} more" if more > 0 else shown


def say_changed(paths: Sequence[str]) -> None:
    """Print a warning for each file that somebody changed at the sender while it was sent."""
    for path in paths:
        notice(printable(changed_text(path)))


def resumed_text(size: int) -> str:
    """Return text for the end of a report. It says how many bytes an earlier transfer had transferred; empty for 0."""
    return f"; {human_size(size)} had arrived before" if size > 0 else ""


def quote_name(name: str) -> str:
    """Return a name for a message.  It is quoted if it has characters that could be mistaken for the message's own."""
    shown = printable(name)
    shown = shown.replace('"', '\\"')
    return f'"{shown}"' if re.search(r"[,;()?\"]|^\s|\s$|\s\s", shown) else shown
