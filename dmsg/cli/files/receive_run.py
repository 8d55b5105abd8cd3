"""Implementation of ``dmsg receive --listen``: files, directories and texts that peers send to a key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from dmsg.apps.intake import OfferRefused
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.transfer import TransferError
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.printable import printable, shorten
from dmsg.base.units import human_size
from dmsg.cli.client_run import listening_at
from dmsg.cli.files.send_by_key import list_names, print_beside_bars, report, say_changed, transfer_progress
from dmsg.cli.output import columns, indent_text, say, tell
from dmsg.clients.address_book import AddressBook
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from twisted.internet.interfaces import IAddress
    from twisted.internet.protocol import Protocol

    from dmsg.apps.intake import Intake, Reservation
    from dmsg.apps.parcels.offers import Offer
    from dmsg.cli.access import Access
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


LAST_MESSAGE_DELAY = 0.2
"""Seconds to wait before the command ends, so that its last message reaches the sender."""


async def receive_at_key(
    reactor: Reactor,
    client: Client,
    access: Access,
    directory: Path,
    *,
    overwrite: bool,
    hidden: bool,
    max_size: int | None,
    intake: Intake | None,
    once: bool,
) -> None:
    """Receive files, directories and texts from peers until the command is cancelled.

    :param access: peers that may send.
    :param directory: directory for the received files.
    :param max_size: maximum bytes of a parcel; None for no limit.
    :param intake: limit on all that peers leave in the directory; None for no limit.
    :param once: whether to end after the first transfer, successful or not.
    """
    finished: Deferred[Failure | None] = Deferred()

    def finish(failure: Failure | None) -> None:
        if not finished.called:
            finished.callback(failure)

    def ended(failure: Failure | None) -> None:
        if once and not finished.called:
            reactor.callLater(LAST_MESSAGE_DELAY, finish, failure)

    with transfer_progress() as progress:
        lines = LogThrottle(reactor.seconds)
        factory = _Inbox(progress, access, directory, overwrite, hidden, max_size, intake, lines, ended)
        if intake is not None:
            intake.start()
        offers = f"receives files into {directory.absolute()}"
        port = await listening_at(client, factory, access=access, offers=offers)
        key = str(client.public_key)
        tell(f"receiving at {client.public_key.text}", receiving=key, **access.fields)
        access.show()
        try:
            await finished
        except TransferError:
            raise SystemExit(1) from None
        finally:
            await maybeDeferred(port.stopListening)
            if intake is not None:
                intake.stop()


class _Inbox(Factory):
    """Factory of the receiving sides of transfers.  It refuses peers that are not allowed."""

    noisy = False

    def __init__(
        self,
        progress: Progress,
        access: Access,
        directory: Path,
        overwrite: bool,
        hidden: bool,
        max_size: int | None,
        intake: Intake | None,
        lines: LogThrottle,
        on_ended: Callable[[Failure | None], None],
    ) -> None:
        self._progress = progress
        self._access = access
        self._directory = directory
        self._overwrite = overwrite
        self._hidden = hidden
        self._max_size = max_size
        self._intake = intake
        self._lines = lines
        self._on_ended = on_ended

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        if addr is None or not self._access(addr):
            return None
        assert isinstance(addr, DmsgAddress)
        lines = None if self._access.is_known(addr.public_key) else self._lines
        one = _IncomingTransfer(self._progress, addr.public_key, self._directory, self._max_size, self._intake, lines)
        incoming = ParcelReceiver(
            Destination(self._directory, overwrite=self._overwrite, hidden=self._hidden),
            one.asked,
            progress=one.on_progress,
            limit=self._max_size,
        )
        incoming.done.addBoth(one.finish).addBoth(self._on_ended)
        return incoming


class _IncomingTransfer:
    """Progress bar and messages of one transfer from a peer.

    :param lines: throttle of the messages about failed transfers of strangers; None if the peer is known.
    """

    def __init__(
        self,
        progress: Progress,
        sender: PubKey,
        directory: Path,
        max_size: int | None,
        intake: Intake | None,
        lines: LogThrottle | None,
    ) -> None:
        self._lines = lines
        self._progress = progress
        self._sender = sender
        self._name = AddressBook().name_or_key(sender)
        self._directory = directory
        self._max_size = max_size
        self._intake = intake
        self._reservation: Reservation | None = None
        self._refusal: OfferRefused | None = None
        self._bar: TaskID | None = None

    def started(self, name: str, size: int) -> Callable[[int], None]:
        """Show a progress bar, and return the callback for the number of bytes received."""
        self._bar = self._progress.add_task(printable(name), total=size)
        return self.on_progress

    def on_progress(self, done: int) -> None:
        """Update the progress bar.

        :param done: number of bytes received so far.
        """
        if self._bar is not None:
            self._progress.update(self._bar, completed=done)

    def asked(self, offer: Offer) -> str | None:
        """Decide about an offer; see :data:`~dmsg.apps.parcels.receiver.Asked`."""
        if offer.kind == "pipe":
            return "a pipe can only be received by a code, or with dmsg nc -l"
        if self._max_size is not None and offer.size > self._max_size:
            return f"{human_size(offer.size)} is too much, the limit is {human_size(self._max_size)}"
        if self._intake is not None:
            try:
                if offer.kind == "files":
                    self._reservation = self._intake.reserve(self._directory.resolve(), offer.things, self._sender)
                else:
                    self._intake.add_text(offer.text, self._sender)
            except OfferRefused as error:
                self._refusal = error
                return str(error)
        if offer.kind == "files":
            self.started(list_names([name for name, *_ in offer.things]), offer.size)
        return None

    def finish(self, result: ReceivedParcel | Failure) -> Failure | None:
        """Remove the progress bar, and print the result of the transfer."""
        bar, self._bar = self._bar, None
        if bar is not None:
            self._progress.remove_task(bar)
        if self._intake is not None and self._reservation is not None:
            self._intake.settle(self._reservation, None if isinstance(result, Failure) else result.size)
        if self._intake is not None and self._refusal is not None:
            line = self._intake.refusal_line(self._refusal, self._name)
            if line is not None:
                print_beside_bars(self._progress, lambda: say(f"dmsg: {line}", err=True))
            return Failure(self._refusal)
        if isinstance(result, Failure):
            more = "" if self._lines is None else self._lines.suffix()
            if more is not None:
                # A name that the peer has chosen must not begin a line of its own.
                text = f"dmsg: the transfer from {self._name} failed: {shorten(str(result.value))}{more}"
                print_beside_bars(self._progress, lambda: say(text, err=True))
            return result if result.check(TransferError) else Failure(TransferError(str(result.value)))
        print_beside_bars(self._progress, lambda: self._report(result))
        return None

    def _report(self, result: ReceivedParcel) -> None:
        if result.sha256:
            report("received", result.paths[0].name, result, self._sender, str(result.paths[0]))
            say_changed(result.changed)
            return
        if result.offer.kind == "text":
            shown = indent_text(f"{self._name}: {result.offer.text}", columns())
            tell(shown, text=result.offer.text, peer=str(self._sender))
            return
        names = [str(path) for path in result.paths]
        text = f"received {list_names(names)} from {self._name}: "
        text += f"{human_size(result.size)} in {result.seconds:.2f} s"
        tell(
            text,
            received=names,
            peer=str(self._sender),
            bytes=result.size,
            files=result.offer.files,
            seconds=result.seconds,
        )
        say_changed(result.changed)
