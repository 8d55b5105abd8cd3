"""Factories of the parcels of ``dmsg send``: files and directories, a text, or a pipe."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from dmsg.apps.exposure import has_dot
from dmsg.apps.parcels.sender import FilesSender, OldFileSender, ParcelSender, PipeSender, SentParcel, TextSender
from dmsg.apps.parcels.walk import WalkResult, walk
from dmsg.base.printable import printable
from dmsg.base.units import human_size
from dmsg.cli.files.send_by_key import list_names, print_beside_bars, report, resumed_text, say_changed, say_left_out
from dmsg.cli.output import describe, notice, tell
from dmsg.clients.address_book import AddressBook
from dmsg.net.streams.transports import transport_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from twisted.internet.interfaces import IProducer

    from dmsg.keys import PubKey
    from dmsg.net.reactor import Reactor


NAME_SHOWN = 255
"""Maximum number of characters of a pipe's name that are sent."""


class ParcelFactory:
    """Factory of the senders of one parcel: creates a sender for each receiver, and reports the results.

    :ivar receiver: name of the receiver in messages, if there are several; else empty.
    :ivar description: description of the parcel in messages.
    :ivar type_there: command with which a receiver gets the parcel, without the code.
    :ivar size: number of bytes of the parcel; 0 if unknown.
    :ivar fields: description of the parcel for ``--json``.
    """

    receiver = ""
    description = ""
    type_there = "dmsg receive"
    size = 0
    fields: dict[str, Any]

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: TaskID | None = None

    def __call__(self) -> ParcelSender:
        raise NotImplementedError

    def for_receiver(self, receiver: str) -> Self:
        """Return a copy of this factory for one of several receivers.  The copy has a progress bar of its own.

        :param receiver: name of the receiver in messages.
        """
        one = copy.copy(self)
        one.receiver = receiver
        return one

    def for_0_1(self) -> ParcelSender | None:
        """Return a sender for a receiver that runs dmsg 0.1; None if the parcel is not a single file."""
        return None

    def _begin(self, name: str, size: int | None) -> None:
        label = f"{self.receiver}: {name}" if self.receiver else name
        self._bar = self._progress.add_task(printable(label), total=size)
        self._progress.start()

    def _on_progress(self, done: int) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, completed=done)

    def say(self, text: str) -> None:
        """Print a notice, above the progress bar if there is one."""
        label = f"{self.receiver}: " if self.receiver else ""
        print_beside_bars(self._progress, lambda: notice(label + text))

    def stop(self) -> None:
        """Remove the progress bar of this receiver.  Bars of other receivers stay."""
        if not self.receiver:
            self._progress.stop()
        elif self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None

    def report(self, parcel: SentParcel, peer: PubKey | None = None) -> None:
        """Print that the parcel has arrived.  With a single receiver, the caller removes the bar before this call.

        :param parcel: result of the transfer.
        :param peer: key of the receiver, if the parcel was sent to a key.
        """
        if self.receiver:
            print_beside_bars(self._progress, lambda: self._report_one(parcel, peer))
            return
        if peer is not None and parcel.sha256:
            report("sent", self.fields["sent"][0], parcel, peer)
            say_changed(parcel.changed)
            return
        fields = self.fields if peer is None else {**self.fields, "peer": str(peer)}
        to = "" if peer is None else f" to {AddressBook().name_or_key(peer)}"
        size, rate = human_size(parcel.size), human_size(parcel.rate)
        text = f"sent {self.description}{to}: {size} in {parcel.seconds:.2f} s, {rate}/s"
        text += resumed_text(self.size - parcel.size if self.size else 0)
        tell(text, bytes=parcel.size, seconds=parcel.seconds, **fields)
        say_changed(parcel.changed)

    def _report_one(self, parcel: SentParcel, peer: PubKey | None) -> None:
        """Print that the parcel has arrived at one of several receivers."""
        fields = {**self.fields, "receiver": self.receiver, **({} if peer is None else {"peer": str(peer)})}
        size, rate = human_size(parcel.size), human_size(parcel.rate)
        text = f"sent {self.description} to {self.receiver}: {size} in {parcel.seconds:.2f} s, {rate}/s"
        text += resumed_text(self.size - parcel.size if self.size else 0)
        tell(text, bytes=parcel.size, seconds=parcel.seconds, **fields)
        say_changed(parcel.changed)

    def report_failure(self, error: BaseException, peer: PubKey | None = None) -> None:
        """Print that the parcel has not arrived at one of several receivers."""
        why = describe(error)
        fields = {} if peer is None else {"peer": str(peer)}
        print_beside_bars(
            self._progress,
            lambda: tell(f"not sent to {self.receiver}: {why}", receiver=self.receiver, failed=why, **fields),
        )


class FilesToSend(ParcelFactory):
    """Parcel of files and directories."""

    def __init__(self, progress: Progress, walked: WalkResult) -> None:
        super().__init__(progress)
        self._walked = walked
        names = [entry.path for entry in walked.checked.entries if "/" not in entry.path]
        self.description, self.fields = list_names(names), {"sent": names, "files": walked.checked.files}
        self.size = walked.checked.size
        if any(has_dot(entry.path.rpartition("/")[2]) for entry in walked.checked.entries):
            self.type_there = "dmsg receive --hidden"

    def __call__(self) -> ParcelSender:
        return self._sender(FilesSender)

    def for_0_1(self) -> ParcelSender | None:
        return self._sender(OldFileSender) if len(self._walked.checked.entries) == 1 else None

    def _sender(self, kind: type[FilesSender]) -> ParcelSender:
        return kind(
            self._walked, on_accepted=lambda: self._begin(self.description, self.size), progress=self._on_progress
        )


class TextToSend(ParcelFactory):
    """Parcel of a text."""

    def __init__(self, progress: Progress, text: str) -> None:
        super().__init__(progress)
        self._text = text
        self.description, self.fields = "the text", {"sent": "text"}

    def __call__(self) -> ParcelSender:
        return TextSender(self._text)


class InputToSend(ParcelFactory):
    """Parcel of all data that standard input or another pipe contains."""

    def __init__(self, reactor: Reactor, progress: Progress, descriptor: int = 0, name: str = "standard input") -> None:
        super().__init__(progress)
        self._reactor = reactor
        self._descriptor = descriptor
        self.description, self.fields = printable(name), {"sent": name if descriptor else "-"}

    def __call__(self) -> ParcelSender:
        return PipeSender(
            self.description[:NAME_SHOWN],
            lambda pipe: _Input.read(self._reactor, pipe, self._descriptor),
            # If a person types the input at a terminal, a progress bar would disturb the typing.
            on_accepted=lambda: None if os.isatty(self._descriptor) else self._begin(self.description, None),
            progress=self._on_progress,
        )


class _Input(Protocol):
    """Protocol that reads a pipe and writes to the sender.  It pauses while the stream's send buffer is full."""

    def __init__(self, pipe: PipeSender) -> None:
        self._pipe = pipe

    @classmethod
    def read(cls, reactor: Reactor, pipe: PipeSender, descriptor: int) -> None:
        """Start reading the pipe with this descriptor."""
        from twisted.internet.interfaces import IHalfCloseableProtocol
        from twisted.internet.stdio import StandardIO
        from zope.interface import directlyProvides

        console = cls(pipe)
        directlyProvides(console, IHalfCloseableProtocol)
        console_of: Any = StandardIO
        console_of(console, stdin=descriptor, reactor=reactor)

    def connectionMade(self) -> None:
        transport_of(self._pipe).registerProducer(cast("IProducer", self.transport), True)

    def dataReceived(self, data: bytes) -> None:
        if not self._pipe.done.called:
            self._pipe.write(data)

    def readConnectionLost(self) -> None:
        """Handle the end of the pipe."""
        transport_of(self._pipe).unregisterProducer()
        self._pipe.end()

    def writeConnectionLost(self) -> None:
        """Do nothing: standard output is closed, but nothing is written there."""

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        pass


async def files_to_send(paths: Sequence[Path], progress: Progress, *, hidden: bool) -> FilesToSend:
    """Return the parcel of these files and directories, and print which files are left out.

    :param hidden: whether to include names that begin with a dot.
    :raises TransferError: a file cannot be sent.
    """
    walked = await deferToThread(walk, paths, hidden=hidden)
    say_left_out(walked)
    return FilesToSend(progress, walked)
