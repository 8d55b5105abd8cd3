"""Programs in a walk of transfers by codes: senders that offer a file by a code, and receivers that use the code.

A program does what ``dmsg send`` and ``dmsg receive`` do, without a terminal. Each program has a key of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from dmsg.apps.codes import Code, CodeAgreement, CodeUsedUp, OfferedCode, accept_code, offer_code
from dmsg.apps.codes.receiver_proof import CLOSE_TIMEOUT
from dmsg.apps.codes.stream import MAX_WRONG_GUESSES
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import FilesSender, SentParcel
from dmsg.apps.parcels.walk import WalkResult, walk
from dmsg.apps.partial_files import part_of
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.deadlines import no_answer
from dmsg.testing.lab import Lab
from dmsg.testing.limited_destination import LimitedDestination
from dmsg.testing.promise import PromiseBroken

STARTING, OFFERING, AGREEING, SENDING, RECEIVING, FINISHING, STOPPING = STATES = (
    *("starting", "offering", "agreeing", "sending", "receiving", "finishing", "stopping"),
)
"""States of a program in the walk. A program is finishing when all content is sent or received, and the transfer
is not confirmed yet."""
TRANSFER_STATES = frozenset({SENDING, RECEIVING, FINISHING})
"""States of a program that has agreed on a code and transfers content."""
MIN_SERVERS = 2
"""Number of servers to which each program connects."""


class OfferRecord:
    """Record of one offered code: who was told the code, who used it, and how often it was guessed.

    :ivar sender: key of the program that offers the code.
    :ivar told: keys of the programs whose users were told the code.
    :ivar attempts: number of key agreements that strangers have begun with wrong words.
    :ivar verdicts: number of these that the sender has answered with "wrong".
    :ivar counted: number of these that the sender has counted against the number of tries of the code.
    :ivar agreements: key agreements that the sender has finished with this code.
    """

    def __init__(self, code: Code, sender: PubKey) -> None:
        self.code = code
        self.sender = sender
        self.told: set[PubKey] = set()
        self.attempts = self.verdicts = self.counted = 0
        self.agreements: list[CodeAgreement] = []
        self.received: list[CodeAgreement] = []

    def check(self) -> None:
        """Check the guarantees of codes.

        :raises PromiseBroken: somebody without the code agreed, the code was used twice, or guesses are miscounted.
        """
        for agreement in self.agreements:
            if agreement.peer not in self.told:
                raise PromiseBroken("a peer that was not told the code has completed a key agreement")
        if len(self.agreements) > 1:
            raise PromiseBroken(f"a code for one receiver was used {len(self.agreements)} times")
        for agreement in self.received:
            if agreement.peer != self.sender:
                raise PromiseBroken("a receiver has completed a key agreement with a peer that did not create the code")
            if any(one.verifier != agreement.verifier for one in self.agreements):
                raise PromiseBroken("the verifiers of both sides differ")
        if max(self.counted, self.verdicts) > MAX_WRONG_GUESSES:
            raise PromiseBroken(f"{self.verdicts} wrong guesses were answered, and {MAX_WRONG_GUESSES} are allowed")
        if self.counted > self.attempts:
            raise PromiseBroken(f"{self.counted} wrong guesses were counted, and {self.attempts} were made")
        # The last guess is counted when the offer has ended. Before that, the stranger closes the stream, and the
        # nameplate is released.
        if self.counted < min(self.verdicts, MAX_WRONG_GUESSES - 1):
            raise PromiseBroken(f"{self.verdicts} wrong guesses were answered, and {self.counted} were counted")


class Program:
    """Program of one person, on a host of its own.

    :param number: number that distinguishes the programs of a host.
    :ivar failure: reason for which the program has failed; None if it runs or has succeeded.
    :ivar ended_at: time by the lab's clock at which the program ended or was killed; None while it runs.
    :ivar state: present state, one of ``STATES``; a column of the coverage table.
    :ivar share: share of the content that is sent or received, from 0 to 1.
    :ivar on_change: function that is called with the program when its state or its share has changed.
    """

    def __init__(self, lab: Lab, name: str, number: int) -> None:
        self._lab = lab
        self.name = name
        self.began = lab.clock.seconds()
        self.host = lab.network.host(name)
        self.host.revive()
        self.client = lab.add_client(name, key=lab.key(f"{name} {number}"), min_servers=MIN_SERVERS)
        self.failure: Failure | None = None
        self.ended_at: float | None = None
        self.state = STARTING
        self.share = 0.0
        self.on_change: Callable[[Program], object] = lambda program: None
        self._was_interrupted = False
        self._working: Deferred[Any] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended, or was killed."""
        return self.ended_at is not None

    @property
    def stream(self) -> Any:
        """Stream of the transfer; None before it has begun."""
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether the program transfers content, and nothing that it has sent is on its way to the other program."""
        stream = self.stream
        if self.state not in TRANSFER_STATES or self.has_ended or self.host.is_paused or stream is None:
            return False
        is_connected = stream.away_since is None and not stream.disconnecting
        return is_connected and not stream._outbox.size and not stream._carrier.in_flight()  # noqa: SLF001

    def check(self) -> None:
        """Check that the program has raised no unexpected error, and that no wrong bytes have arrived.

        :raises PromiseBroken: the program has raised an unexpected error, or has received wrong bytes.
        """
        expected = (DmsgError, CancelledError) if self._was_interrupted else (DmsgError,)
        if self.failure is not None and self.failure.check(*expected) is None:
            raise PromiseBroken(f"the program of {self.name} has failed: {self.failure.getTraceback()}")
        if self.failure is not None and "SHA-256" in self.failure.getErrorMessage():
            raise PromiseBroken(f"wrong bytes arrived: {self.failure.getErrorMessage()}")

    def start(self) -> None:
        """Start the work of the program."""
        self.host.do(self._begin)

    def _begin(self) -> None:
        working = self._working = Deferred.fromCoroutine(self._work())
        working.addBoth(self._stop)

    def interrupt(self) -> None:
        """Interrupt the program, as Ctrl-C does. It closes its streams, and ends."""
        if not self.has_ended and self._working is not None:
            self._was_interrupted = True
            self.host.do(self._working.cancel)

    def _go_on(self, state: str) -> None:
        self.state = state
        self.on_change(self)

    def _progress(self, done: int, size: int) -> None:
        """Note how much of the content is sent or received.

        :param done: number of bytes so far.
        :param size: number of bytes of the content.
        """
        if self.state in (SENDING, RECEIVING):
            self.share = done / size if size else 1.0
            self._go_on(FINISHING if done >= size else self.state)

    def _work(self) -> Coroutine[Deferred[Any], Any, None]:
        raise NotImplementedError

    def _stop(self, result: object) -> None:
        if isinstance(result, Failure):
            self.failure = result
        self._go_on(STOPPING)
        # The process is ended by a timer of the clock, because it must not be killed while its own code is running.
        self.client.stopService().addBoth(lambda _: self._lab.clock.callLater(0, self.kill))

    def kill(self) -> None:
        """End the process, if it runs. The kernel closes its files."""
        if not self.has_ended:
            self.ended_at = self._lab.clock.seconds()
            self._lab.kill(self.name)
            self._close_files()

    def _close_files(self) -> None:
        """Close the files that the kernel closes when a process is killed."""


class SenderProgram(Program):
    """Program that offers a file or directory by a code.

    :param is_prompt: whether the transfer begins in the callback of the key agreement, as in a program with several
        receivers. The first message of the transfer then follows the confirmation in the same frame. Otherwise the
        program releases its nameplate first.
    :ivar record: record of the code; None until there is a code.
    :ivar sent: result of the transfer, if it succeeded.
    """

    def __init__(self, lab: Lab, name: str, number: int, source: Path, *, is_prompt: bool = False) -> None:
        super().__init__(lab, name, number)
        self._source = source
        self._is_prompt = is_prompt
        self._walked: WalkResult | None = None
        self._parcel: FilesSender | None = None
        self._offered: OfferedCode | None = None
        self.record: OfferRecord | None = None
        self.sent: SentParcel | None = None

    async def _work(self) -> None:
        self._walked = walk([self._source])
        await self.client.when_published()
        offered = self._offered = await offer_code(
            self.host, self.client, on_agreed=self._agreed, on_wrong_guess=self._guessed, on_warning=lambda text: None
        )
        self.record = OfferRecord(offered.code, self.client.public_key)
        self._go_on(OFFERING)
        try:
            agreement = await offered.agreed
        except (CancelledError, DmsgError) as error:
            self.record.counted += isinstance(error, CodeUsedUp)
            if self._parcel is not None:
                # The transfer has begun in the callback of the agreement, and nobody waits for its end any more.
                self._parcel.done.addErrback(lambda _: None)
            raise
        parcel = self._parcel or self._send(agreement)
        self.sent = await parcel.done

    def _send(self, agreement: CodeAgreement) -> FilesSender:
        assert self._walked is not None
        self._go_on(SENDING)
        size = self._walked.checked.size
        parcel = self._parcel = FilesSender(self._walked, progress=lambda done: self._progress(done, size))
        agreement.proceed(parcel)
        return parcel

    @property
    def stream(self) -> Any:
        return None if self._parcel is None else self._parcel.transport

    def _agreed(self, agreement: CodeAgreement) -> None:
        assert self.record is not None
        self.record.agreements.append(agreement)
        if self._is_prompt:
            self._send(agreement)

    def _guessed(self, left: int) -> None:
        assert self.record is not None
        self.record.counted = MAX_WRONG_GUESSES - left

    def _close_files(self) -> None:
        if self._parcel is not None:
            self._parcel._offered.close()  # noqa: SLF001  # The kernel closes them.


class ReceiverProgram(Program):
    """Program that uses a code, and writes the received parcel to a directory.

    :param content: function that returns the present content of the file that is offered; None for a directory.
    :ivar record: record of the code that the program uses.
    :ivar received: result of the transfer, if it succeeded.
    :ivar disk: directory that the program writes to, whose disk may become full.
    :ivar resumed: size in bytes of the partial file of an earlier transfer; 0 if the offered file does not begin with
        these bytes.
    """

    def __init__(
        self,
        lab: Lab,
        name: str,
        number: int,
        record: OfferRecord,
        directory: Path,
        content: Callable[[int], bytes | None],
    ) -> None:
        super().__init__(lab, name, number)
        self.record = record
        self.disk = LimitedDestination(directory)
        self._directory = directory
        self._content = content
        self._parcel: ParcelReceiver | None = None
        self._size = 0
        self.received: ReceivedParcel | None = None
        self.resumed: int | None = None
        record.told.add(self.client.public_key)

    @property
    def stream(self) -> Any:
        return None if self._parcel is None else self._parcel.transport

    def check(self) -> None:
        super().check()
        # If the source was replaced after the offer, different content may have been sent.
        known = self.received is not None and self._content(self.received.offer.size) is not None
        if known and self.received is not None and self.resumed is not None:
            needed = self.received.offer.size - self.resumed
            if self.received.size != needed:
                raise PromiseBroken(f"{self.received.size} bytes were sent to complete a file that lacked {needed}")

    def _on_offer(self, offer: Offer) -> None:
        """Accept an offer, and find out how many bytes of it an earlier transfer has left."""
        self._size = offer.size
        content = self._content(offer.size)
        if content is not None:
            part = part_of(self._directory / offer.things[0][0])
            have = part.read_bytes()[: offer.size] if part.is_file() else b""
            self.resumed = len(have) if content.startswith(have) else 0

    async def _work(self) -> None:
        await self.client.when_published()
        self._go_on(AGREEING)
        agreement = await accept_code(self.host, self.client, self.record.code)
        self.record.received.append(agreement)
        self._go_on(RECEIVING)
        parcel = self._parcel = ParcelReceiver(
            self.disk, self._on_offer, progress=lambda done: self._progress(done, self._size)
        )
        agreement.proceed(parcel)
        result = await parcel.done.addBoth(lambda result: result)
        if isinstance(result, ReceivedParcel):
            self.received = result
        with suppress(Exception):
            await parcel.closed.addTimeout(CLOSE_TIMEOUT, self.host, no_answer)
        if isinstance(result, Failure):
            result.raiseException()

    def _close_files(self) -> None:
        for part in self.disk._held:  # noqa: SLF001  # The kernel unlocks them.
            if part._descriptor is not None:  # noqa: SLF001
                os.close(part._descriptor)  # noqa: SLF001
                part._descriptor = None  # noqa: SLF001
        self.disk.release()
        if self._parcel is not None:
            self._parcel._contents.close()  # noqa: SLF001
