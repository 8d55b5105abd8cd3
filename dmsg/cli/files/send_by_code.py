"""Implementation of ``dmsg send`` and ``dmsg receive`` with a code instead of a key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, succeed
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from dmsg.apps.codes.receiver_proof import CLOSE_TIMEOUT
from dmsg.apps.codes.stream import CodeAgreement
from dmsg.apps.exposure import NEED_HIDDEN
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import DIRECTORY
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import ParcelSender
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.base.printable import printable
from dmsg.base.units import human_size
from dmsg.cli.code_display import offer_code
from dmsg.cli.files.parcel_factory import ParcelFactory
from dmsg.cli.files.send_by_key import (
    SHOWN_THINGS,
    list_names,
    print_beside_bars,
    quote_name,
    resumed_text,
    say_changed,
    transfer_progress,
)
from dmsg.cli.output import notice, say, state, tell
from dmsg.cli.prompts import ask, can_ask
from dmsg.cli.reconnect_notice import resume_timeout_of, watch_connection
from dmsg.cli.standard_io import StandardOutput
from dmsg.clients.address_book import AddressBook
from dmsg.net.deadlines import no_answer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dmsg.apps.codes.nearby import Nearby
    from dmsg.keys import PubKey
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


OLD_RECEIVERS = ("file name is malformed", "does not speak dmsg's file transfer")
"""Refusals that only receivers of dmsg 0.1 send, by their text.  Such a receiver accepts only a single file."""


# --- the side that makes the code ---


async def send_by_code(
    reactor: Reactor,
    client: Client | None,
    make: ParcelFactory,
    words: int,
    *,
    verify: bool,
    show_qr: bool,
    nearby: Nearby | None = None,
    expires: float | None = None,
) -> None:
    """Offer a code, wait for the peer that knows it, and send this peer a parcel.

    :param client: client that offers the code through discovery; None offers it on the local network only.
    :param make: factory of the parcel.
    :param words: number of words of the code.
    :param verify: whether the user must compare the verifiers of both sides.
    :param show_qr: whether to show the code as a QR code, too.
    :param nearby: object that also offers the code on this machine's local networks; None for discovery only.
    :param expires: seconds after which no peer may use the code; None for no limit.
    """
    agreed = await offer_code(
        reactor, client, words, make.type_there, verify=verify, show_qr=show_qr, nearby=nearby, expires=expires
    )
    try:
        sender = make()
        agreed.proceed(sender)
        with watch_connection(reactor, lambda: sender.transport, resume_timeout_of(client), make.say):
            sent = await sender.done
        make.stop()
        make.report(sent)
    finally:
        make.stop()


async def send_to_key(reactor: Reactor, client: Client, make: ParcelFactory, key: PubKey, timeout: float) -> None:
    """Send a parcel to the client with this key.  If the receiver runs dmsg 0.1, send a single file in its protocol.

    :param make: factory of the parcel.
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
            raise TransferError(f"not sent to {AddressBook().name_or_key(key)}: {why}") from None
        await _give(reactor, client, make, sender, key, timeout)


async def _give(
    reactor: Reactor, client: Client, make: ParcelFactory, sender: ParcelSender, key: PubKey, timeout: float
) -> None:
    factory = Factory.forProtocol(lambda: sender)
    factory.noisy = False
    try:
        await client.connect(key, factory, timeout=timeout)
        with watch_connection(reactor, lambda: sender.transport, resume_timeout_of(client), make.say):
            sent = await sender.done
    finally:
        make.stop()
    make.report(sent, key)


# --- the side that types the code ---


async def receive_by_code(
    reactor: Reactor,
    agreed: CodeAgreement,
    resume_timeout: float,
    directory: Path,
    *,
    overwrite: bool,
    hidden: bool,
    max_size: int | None,
    yes: bool,
) -> None:
    """Receive the parcel of the peer that made the code.

    :param agreed: agreement with the peer.
    :param resume_timeout: seconds after which a lost stream ends.
    :param directory: directory for the received files.
    :param max_size: maximum bytes of the parcel; None for no limit.
    :param yes: whether to accept the offer without asking the user.
    """
    progress = transfer_progress()
    try:
        done = await _TransferDialogue(
            reactor,
            progress,
            resume_timeout,
            Destination(directory, overwrite=overwrite, hidden=hidden),
            max_size,
            yes,
        ).take(agreed)
    finally:
        progress.stop()
    done()


class _TransferDialogue:
    """Transfer by a code at the receiving side: asks the user, shows the progress, and prints the result."""

    def __init__(
        self,
        reactor: Reactor,
        progress: Progress,
        resume_timeout: float,
        place: Destination,
        max_size: int | None,
        yes: bool,
    ) -> None:
        self._reactor = reactor
        self._progress = progress
        self._resume_timeout = resume_timeout
        self._place = place
        self._max_size = max_size
        self._yes = yes
        self._bar: TaskID | None = None
        self._output: StandardOutput | None = None
        self._declined = False
        self._question: Deferred[bool] | None = None

    def _say(self, text: str) -> None:
        print_beside_bars(self._progress, lambda: notice(text))

    async def take(self, agreement: CodeAgreement) -> Callable[[], None]:
        """Receive the whole parcel.

        :returns: function that prints the result.  The caller has to remove the progress bar before calling it.
        """
        receiver = ParcelReceiver(
            self._place,
            self._on_offer,
            progress=self._on_progress,
            pipe=self._write,
            end_pipe=self._end_output,
            limit=self._max_size,
        )
        self._receiver = receiver
        agreement.proceed(receiver)
        try:
            with watch_connection(self._reactor, lambda: receiver.transport, self._resume_timeout, self._say):
                taken = await receiver.done
        except CancelledError:
            if self._output is not None:
                self._output.abandon()
            raise
        except TransferError as error:
            if self._declined:
                raise TransferRefused("you declined the offer") from None
            if str(error).endswith("exists already"):
                hint = "--overwrite replaces files, --dir puts it elsewhere; the code is used up: ask for a new one"
                if self._place.overwrites:
                    # The existing target is a directory or a link, or a directory was sent. With --overwrite, only a
                    # file replaces a file.
                    hint = (
                        "only a file replaces a file: remove it, or use --dir; the code is used up: ask for a new one"
                    )
                raise TransferError(f"{error}: {hint}") from None
            if NEED_HIDDEN in str(error):
                raise TransferError(f"{error}; the code is used up: ask for a new one") from None
            raise
        finally:
            if self._question is not None:
                self._question.cancel()  # If the user has answered, cancelling has no effect.
            if self._output is not None:
                await self._output.close()
            with suppress(TimeoutError):
                # The client must not stop before the sender has received the result.
                await receiver.closed.addTimeout(CLOSE_TIMEOUT, self._reactor, no_answer)
        return lambda: self._report(taken)

    def _report(self, received: ReceivedParcel) -> None:
        offer = received.offer
        if offer.kind == "text":
            return  # The text itself was printed when it arrived.
        names = [str(path) for path in received.paths]
        what = list_names(names) if names else printable(offer.text)
        text = (
            f"received {what}: {human_size(received.size)} in {received.seconds:.2f} s, {human_size(received.rate)}/s"
        )
        text += resumed_text(offer.size - received.size if names else 0)
        fields = {"bytes": received.size, "files": offer.files, "seconds": received.seconds}
        if offer.kind == "pipe":
            notice(text)  # The received data went to standard output, so the report goes to standard error.
        else:
            tell(text, received=names, **fields)
            say_changed(received.changed)

    def _on_offer(self, offer: Offer) -> Deferred[str | None]:
        if offer.kind == "text":
            if state.json:
                tell("", text=offer.text)
            else:
                say(offer.text, as_it_is=not sys.stdout.isatty())
            # If printing the text has failed, say() or tell() has set the exit status state.status. The parcel is then
            # refused.
            return succeed(None if state.status is None else "it could not be written")
        if offer.kind == "pipe" and sys.stdout.isatty():
            notice(f"{describe_offer(offer)}: not shown on a terminal; write it to a file: dmsg receive CODE > FILE")
            return succeed("the receiver's standard output is a terminal")
        if self._max_size is not None and offer.size > self._max_size:
            return succeed(f"{human_size(offer.size)} is too much, the limit is {human_size(self._max_size)}")
        question = f"{describe_offer(offer)}, from a stranger; take it?"
        if self._yes:
            asked: Deferred[bool] = succeed(True)
        elif can_ask():
            asked = self._question = ask(self._reactor, question, default=True)
        else:
            notice(f"{question} Standard input is not a terminal, so nobody can answer: use --yes to accept")
            return succeed("nobody can answer the question whether to accept it")

        def answered(accepted: bool) -> str | None:
            if not accepted:
                self._declined = True
                return "the receiver does not want it"
            if offer.kind == "pipe":
                self._output = StandardOutput(self._reactor, self._receiver.transport, self._output_failed)
            # The bar must not start before the question was answered, because the two would overwrite each other.
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

    def _output_failed(self, error: Exception) -> None:
        """End the transfer, because standard output was closed or cannot be written."""
        if not self._receiver.done.called:
            self._receiver.refuse(str(error) or "its standard output was closed")
            self._receiver.done.errback(Failure(error))

    def _end_output(self) -> Deferred[None]:
        assert self._output is not None
        return self._output.close()


def describe_offer(offer: Offer) -> str:
    """Return a text that describes an offer to the user."""
    if offer.kind == "pipe":
        return f"a pipe ({printable(offer.text)}) to standard output, of unknown size"
    named = [
        f"{quote_name(name)}{'/' if kind == DIRECTORY else ''}"
        + (f" ({files:,} {'file' if files == 1 else 'files'})" if kind == DIRECTORY else "")
        # Names that begin with a dot come first, so that the user does not overlook them.
        for name, kind, _, files, _ in sorted(offer.things, key=lambda thing: thing[0][:1] != ".")[:SHOWN_THINGS]
    ]
    more = len(offer.things) - SHOWN_THINGS
    if more > 0:
        named.append(f"and {more} more")
    return f"{', '.join(named)}, {human_size(offer.size)}"
