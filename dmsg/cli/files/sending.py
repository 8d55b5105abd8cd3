"""What runs ``dmsg send`` and ``dmsg receive``; progress of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from twisted.internet.protocol import Factory

from dmsg.base.units import human_size
from dmsg.cli.output import state, tell

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.internet.protocol import Protocol

    from dmsg.apps.transfer import ReceiveFile, Transferred


def transfer_progress() -> Progress:
    """A bar for each file, on standard error if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
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


def report(verb: str, done: Transferred, whom: str) -> None:
    """Say that a file has arrived, and how fast."""
    tell(
        f"{verb} {done.name} {whom}: {human_size(done.size)} in {done.seconds:.2f} s, "
        f"{human_size(done.rate)}/s, sha256 {done.sha256}",
        **{verb: done.name},
        peer=whom.rsplit(maxsplit=1)[-1],
        bytes=done.size,
        seconds=done.seconds,
        sha256=done.sha256,
    )


class Receiving(Factory):
    """Takes a file from each peer, and says what became of it."""

    noisy = False

    def __init__(self, make: Callable[[], ReceiveFile], ended: Callable[[Any, str], None]) -> None:
        self._make = make
        self._ended = ended

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        protocol = self._make()
        protocol.done.addBoth(self._ended, f"from {str(addr).removeprefix('dmsg:')}")
        return protocol
