"""Implementation of ``dmsg send`` and ``dmsg receive`` with a code instead of a key."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twisted.internet.defer import Deferred, TimeoutError, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from dmsg.apps.codes.rendezvous import CLOSE_TIMEOUT
from dmsg.apps.codes.stream import CodeAgreement
from dmsg.apps.codes.words import Code
from dmsg.apps.exposure import NEED_HIDDEN, has_dot
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import DIRECTORY
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import FilesSender, OldFileSender, ParcelSender, PipeSender, SentParcel, TextSender
from dmsg.apps.parcels.walk import WalkResult, walk
from dmsg.apps.sources import changed_text
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.base.printable import printable
from dmsg.base.units import human_size
from dmsg.cli.code_display import accept_code, offer_code
from dmsg.cli.files.send_by_key import SHOWN_THINGS, print_beside_bars, report, say_left_out, transfer_progress
from dmsg.cli.output import cannot_write, notice, say, state, tell
from dmsg.cli.prompts import ask, can_ask
from dmsg.cli.reconnect_notice import patience_of, watch_connection
from dmsg.net.streams.transports import transport_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from twisted.internet.interfaces import IProducer

    from dmsg.keys import PubKey
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


NAME_SHOWN = 255
"""Maximum number of characters of a pipe's name."""
OLD_RECEIVERS = ("file name is malformed", "does not speak dmsg's file transfer")
"""Texts of refusals that identify a receiver of dmsg before 0.2. Such a receiver takes one file at a time."""


# --- the side that makes the code ---


async def send_by_code(
    reactor: Reactor, client: Client, make: ParcelFactory, words: int, *, verify: bool, show_qr: bool
) -> None:
    """Make a code, wait for the peer who knows it, and send that peer what ``make`` makes."""
    agreed = await offer_code(reactor, client, words, make.type_there, verify=verify, show_qr=show_qr)
    try:
        sender = make()
        agreed.proceed(sender)
        with watch_connection(reactor, lambda: sender.transport, client.streams.resume_timeout, make.say):
            sent = await sender.done
        make.stop()
        make.report(sent)
    finally:
        make.stop()


async def send_to_key(reactor: Reactor, client: Client, make: ParcelFactory, key: PubKey, timeout: float) -> None:
    """Send what ``make`` makes to a key; a single file can also go to a program of dmsg 0.1.

    :param timeout: seconds that opening a stream may take.
    """
    try:
        await _give(reactor, client, make, make(), key, timeout)
    except TransferError as error:
        if not any(old in str(error) for old in OLD_RECEIVERS):
            raise
        sender = make.for_0_1()
        if sender is None:
            why = "the receiver runs an older dmsg, which accepts one file at a time; use a code to send several"
            raise TransferError(f"not sent to {key.short}: {why}") from None
        await _give(reactor, client, make, sender, key, timeout)


async def _give(
    reactor: Reactor, client: Client, make: ParcelFactory, sender: ParcelSender, key: PubKey, timeout: float
) -> None:
    factory = Factory.forProtocol(lambda: sender)
    factory.noisy = False
    try:
        await client.connect(key, factory, timeout=timeout)
        with watch_connection(reactor, lambda: sender.transport, patience_of(client), make.say):
            sent = await sender.done
    finally:
        make.stop()
    make.report(sent, key)


class ParcelFactory:
    """Factory of the parcel to send; builds the parcel when a receiver has connected.

    :ivar description: description of the parcel for people.
    :ivar fields: description of the parcel for ``--json``.
    :ivar type_there: command that receives the parcel, without the code.
    """

    description = ""
    type_there = "dmsg receive"
    size = 0
    fields: dict[str, Any]

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: TaskID | None = None

    def __call__(self) -> ParcelSender:
        raise NotImplementedError

    def for_0_1(self) -> ParcelSender | None:
        """Return the sender for a program of dmsg 0.1, or None if no such sender can send these files."""
        return None

    def _begin(self, name: str, size: int | None) -> None:
        self._bar = self._progress.add_task(printable(name), total=size)
        self._progress.start()

    def _on_progress(self, done: int) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, completed=done)

    def say(self, text: str) -> None:
        """Print a notice, above the progress bar if there is one."""
        print_beside_bars(self._progress, lambda: notice(text))

    def stop(self) -> None:
        """Remove the progress bar."""
        self._progress.stop()

    def report(self, sent: SentParcel, peer: PubKey | None = None) -> None:
        """Report that the parcel has arrived, after the progress bar is removed.

        :param peer: key of the receiver, if it was sent to a key.
        """
        if peer is not None and sent.sha256:
            report("sent", self.fields["sent"][0], sent, peer)
            say_changed(sent.changed)
            return
        fields = self.fields if peer is None else {**self.fields, "peer": str(peer)}
        to = "" if peer is None else f" to {peer.text}"
        text = (
            f"sent {self.description}{to}: {human_size(sent.size)} in {sent.seconds:.2f} s, {human_size(sent.rate)}/s"
        )
        text += _were_there(self.size - sent.size if self.size else 0)
        tell(text, bytes=sent.size, seconds=sent.seconds, **fields)
        say_changed(sent.changed)


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
    """Parcel of standard input or another pipe, up to its end."""

    def __init__(self, reactor: Reactor, progress: Progress, descriptor: int = 0, name: str = "standard input") -> None:
        super().__init__(progress)
        self._reactor = reactor
        self._descriptor = descriptor
        self.description, self.fields = printable(name), {"sent": name if descriptor else "-"}

    def __call__(self) -> ParcelSender:
        return PipeSender(
            self.description[:NAME_SHOWN],
            lambda pipe: _Input.read(self._reactor, pipe, self._descriptor),
            # At a terminal the progress bar would disturb the typing.
            on_accepted=lambda: None if os.isatty(self._descriptor) else self._begin(self.description, None),
            progress=self._on_progress,
        )


class _Input(Protocol):
    """Reader of a pipe, as fast as the other side takes the data."""

    def __init__(self, pipe: PipeSender) -> None:
        self._pipe = pipe

    @classmethod
    def read(cls, reactor: Reactor, pipe: PipeSender, descriptor: int) -> None:
        """Start reading."""
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
        """Handle the end of standard input."""
        transport_of(self._pipe).unregisterProducer()
        self._pipe.end()

    def writeConnectionLost(self) -> None:
        """Ignore that standard output is closed; reading continues."""

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        pass


async def files_to_send(paths: Sequence[Path], progress: Progress, *, hidden: bool) -> FilesToSend:
    """Return the parcel of files to send.

    :param hidden: whether to include names that begin with a dot.
    :raises TransferError: a file cannot be sent.
    """
    walked = await deferToThread(walk, paths, hidden=hidden)
    say_left_out(walked)
    return FilesToSend(progress, walked)


# --- the side that types it ---


async def receive_by_code(
    reactor: Reactor,
    client: Client,
    code: Code,
    directory: Path,
    *,
    overwrite: bool,
    hidden: bool,
    max_size: int | None,
    yes: bool,
    verify: bool,
    timeout: float,
) -> None:
    """Find the peer who made the code, prove that this side knows the code, and receive the parcel."""
    agreed = await accept_code(reactor, client, code, verify=verify, timeout=timeout)
    progress = transfer_progress()
    try:
        done = await _TransferDialogue(
            reactor,
            progress,
            client.streams.resume_timeout,
            Destination(directory, overwrite=overwrite, hidden=hidden),
            max_size,
            yes,
        ).take(agreed)
    finally:
        progress.stop()
    done()


class _TransferDialogue:
    """Dialogue with the person about one transfer: question, progress, result."""

    def __init__(
        self,
        reactor: Reactor,
        progress: Progress,
        patience: float,
        place: Destination,
        max_size: int | None,
        yes: bool,
    ) -> None:
        self._reactor = reactor
        self._progress = progress
        self._patience = patience
        self._place = place
        self._max_size = max_size
        self._yes = yes
        self._bar: TaskID | None = None
        self._output: _Output | None = None
        self._declined = False

    def _say(self, text: str) -> None:
        print_beside_bars(self._progress, lambda: notice(text))

    async def take(self, agreed: CodeAgreement) -> Callable[[], None]:
        """Receive the whole parcel.

        :returns: function that prints the result. The caller removes the progress bar before calling it.
        """
        receiver = ParcelReceiver(
            self._place,
            self._on_offer,
            progress=self._on_progress,
            pipe=self._write,
            limit=self._max_size,
        )
        self._receiver = receiver
        agreed.proceed(receiver)
        try:
            with watch_connection(self._reactor, lambda: receiver.transport, self._patience, self._say):
                taken = await receiver.done
        except TransferError as error:
            if self._declined:
                raise TransferRefused("you declined the offer") from None
            if str(error).endswith("exists already"):
                hint = "--overwrite replaces files, --dir puts it elsewhere; the code is used up: ask for a new one"
                raise TransferError(f"{error}: {hint}") from None
            if NEED_HIDDEN in str(error):
                raise TransferError(f"{error}; the code is used up: ask for a new one") from None
            raise
        finally:
            if self._output is not None:
                await self._output.close()
            with suppress(TimeoutError):
                # The other side must hear the result before this program ends.
                await receiver.closed.addTimeout(CLOSE_TIMEOUT, self._reactor)
        return lambda: self._report(taken)

    def _report(self, received: ReceivedParcel) -> None:
        offer = received.offer
        if offer.kind == "text":
            return  # The text was shown when it arrived.
        names = [str(path) for path in received.paths]
        what = list_names(names) if names else printable(offer.text)
        text = (
            f"received {what}: {human_size(received.size)} in {received.seconds:.2f} s, {human_size(received.rate)}/s"
        )
        text += _were_there(offer.size - received.size if names else 0)
        fields = {"bytes": received.size, "files": offer.files, "seconds": received.seconds}
        if offer.kind == "pipe":
            notice(text)  # Standard output has the received data, so the report goes to standard error.
        else:
            tell(text, received=names, **fields)
            say_changed(received.changed)

    def _on_offer(self, offer: Offer) -> Deferred[str | None]:
        if offer.kind == "text":
            if state.json:
                tell("", text=offer.text)
            else:
                say(offer.text, as_it_is=not sys.stdout.isatty())
            # The output is checked before the sender is told that the text has arrived.
            return succeed(None if state.status is None else "it could not be written")
        if offer.kind == "pipe" and sys.stdout.isatty():
            notice(f"{describe_offer(offer)}: say where to put it: dmsg receive CODE > FILE")
            return succeed("the receiver's standard output is a terminal")
        if self._max_size is not None and offer.size > self._max_size:
            return succeed(f"{human_size(offer.size)} is too much, the limit is {human_size(self._max_size)}")
        question = f"{describe_offer(offer)}, from a stranger; take it?"
        if self._yes:
            asked: Deferred[bool] = succeed(True)
        elif can_ask():
            asked = ask(self._reactor, question, default=True)
        else:
            notice(f"{question} Standard input is not a terminal, so nobody can answer: use --yes to accept")
            return succeed("there is nobody who could be asked")

        def answered(accepted: bool) -> str | None:
            if not accepted:
                self._declined = True
                return "the receiver does not want it"
            if offer.kind == "pipe":
                self._output = _Output(self._reactor, self._receiver)
            # The bar starts only now, because bars and questions would overwrite each other.
            self._bar = self._progress.add_task(describe_offer(offer), total=offer.size or None)
            self._progress.start()
            return None

        return asked.addCallback(answered)

    def _on_progress(self, done: int) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, completed=done)

    def _write(self, data: bytes) -> None:
        assert self._output is not None
        self._output.write(data)


class _Output(Protocol):
    """Standard output for a pipe; a slow reader slows down the sender."""

    def __init__(self, reactor: Reactor, receiver: ParcelReceiver) -> None:
        from twisted.internet.interfaces import IHalfCloseableProtocol
        from twisted.internet.stdio import StandardIO
        from zope.interface import directlyProvides

        self._receiver = receiver
        self._written: Deferred[None] = Deferred()
        directlyProvides(self, IHalfCloseableProtocol)
        self._console: Any = StandardIO(self, reactor=reactor)
        self._console.registerProducer(receiver.transport, True)

    def write(self, data: bytes) -> None:
        """Write more data."""
        self._console.write(data)

    def readConnectionLost(self) -> None:
        """Ignore the end of input, because nothing is read."""

    def writeConnectionLost(self) -> None:
        """Handle the loss of standard output."""
        self._ended()
        if not self._receiver.done.called:
            self._receiver.refuse("its standard output takes no more")
            self._receiver.done.errback(Failure(cannot_write()))

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._ended()

    def _ended(self) -> None:
        if not self._written.called:
            self._written.callback(None)

    def close(self) -> Deferred[None]:
        """Close standard output when all data is written."""
        self._console.unregisterProducer()
        self._console.loseConnection()
        return self._written


def describe_offer(offer: Offer) -> str:
    """Describe an offer to a person."""
    if offer.kind == "pipe":
        return f"a pipe ({printable(offer.text)}) to standard output, of a length that nobody knows"
    named = [
        f"{_quoted(name)}{'/' if kind == DIRECTORY else ''}"
        + (f" ({files:,} {'file' if files == 1 else 'files'})" if kind == DIRECTORY else "")
        # Hidden names come first, so that nobody overlooks them.
        for name, kind, _, files, _ in sorted(offer.things, key=lambda thing: thing[0][:1] != ".")[:SHOWN_THINGS]
    ]
    more = len(offer.things) - SHOWN_THINGS
    if more > 0:
        named.append(f"and {more} more")
    return f"{', '.join(named)}, {human_size(offer.size)}"


def _quoted(name: str) -> str:
    """Return a name in quotes if it could be taken for more than a name."""
    shown = printable(name)
    shown = shown.replace('"', '\\"')
    return f'"{shown}"' if re.search(r"[,;()?\"]|^\s|\s$|\s\s", shown) else shown


def say_changed(paths: Sequence[str]) -> None:
    """Report which files were written to during the transfer."""
    for path in paths:
        notice(printable(changed_text(path)))


def _were_there(size: int) -> str:
    return f"; {human_size(size)} had arrived before" if size > 0 else ""


def list_names(names: Sequence[str]) -> str:
    """Return names as one line, or the first ones if there are many."""
    more = len(names) - SHOWN_THINGS
    shown = ", ".join(_quoted(name) for name in names[:SHOWN_THINGS])
    return f"{shown} and {more} more" if more > 0 else shown
