"""What runs ``dmsg send`` and ``dmsg receive``; progress of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from twisted.internet.protocol import Factory

from dmsg.base.units import human_size
from dmsg.cli.output import state, tell
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.internet.protocol import Protocol

    from dmsg.apps.transfer import ReceiveFile, Transferred


MEDIUM, WIDE = 60, 90
"""Columns of a terminal from which on a bar is drawn, and from which on it has rate and time beside it."""


def transfer_progress() -> Progress:
    """A bar for each file, on standard error if that is a terminal."""
    console = Console(stderr=True)
    # a bar is one line: what has no place is left out, and a long name is cut
    name = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
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
        # elsewhere even an empty one leaves a blank line
        disable=state.quiet or not console.is_terminal or console.is_dumb_terminal,
    )


def beside(progress: Progress, tell_it: Callable[[], None]) -> None:
    """Print something while bars are shown: they make way for it."""
    shown = progress.live.is_started
    if shown:
        progress.stop()
    tell_it()
    if shown:
        progress.start()


def report(verb: str, done: Transferred, peer: PubKey) -> None:
    """Say that a file has arrived, and how fast."""
    whom = f"{'to' if verb == 'sent' else 'from'} {peer.text}"
    tell(
        f"{verb} {done.name} {whom}: {human_size(done.size)} in {done.seconds:.2f} s, "
        f"{human_size(done.rate)}/s, sha256 {done.sha256}",
        **{verb: done.name},
        peer=str(peer),
        bytes=done.size,
        seconds=done.seconds,
        sha256=done.sha256,
    )


class Receiving(Factory):
    """Takes a file from each peer, and says what became of it."""

    noisy = False

    def __init__(self, make: Callable[[], ReceiveFile], ended: Callable[[Any, PubKey], None]) -> None:
        self._make = make
        self._ended = ended

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        assert isinstance(addr, DmsgAddress)
        protocol = self._make()
        protocol.done.addBoth(self._ended, addr.public_key)
        return protocol
