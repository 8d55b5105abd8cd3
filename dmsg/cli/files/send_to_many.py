"""Implementation of ``dmsg send`` to several receivers: by one code, or to the members of a group.

Each receiver has a stream and a sender of its own, and with a code also a key agreement of its own.  A slow receiver
therefore does not delay the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, DeferredLock, DeferredSemaphore
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Protocol

from dmsg.apps.codes.stream import CodeAgreement, CodeExpired, CodeUsedUp
from dmsg.cli.code_display import compare_numbers, show_code
from dmsg.cli.files.send_by_code import send_to_key
from dmsg.cli.output import describe, notice
from dmsg.cli.reconnect_notice import resume_timeout_of, watch_connection
from dmsg.errors import DmsgError, NobodyThere

if TYPE_CHECKING:
    from dmsg.apps.codes.nearby import Nearby
    from dmsg.cli.files.parcel_factory import ParcelFactory
    from dmsg.keys import PubKey
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client

GROUP_AT_ONCE = 16
"""Maximum number of members of a group to which a parcel is sent concurrently."""
_FAILURES = (DmsgError, OSError, ConnectionLost)
"""Exceptions after which the transfers to other receivers continue."""


class NotAllReceived(DmsgError):
    """Error: some of the receivers did not receive the parcel."""


class NobodyReceived(NobodyThere):
    """Error: no member of a group could be reached."""


class _Deliveries:
    """Concurrent transfers to several receivers.

    :ivar sent: number of transfers that have succeeded.
    :ivar failed: errors of the transfers that have failed, by receiver.
    """

    def __init__(self) -> None:
        self._running: list[Deferred[None]] = []
        self.sent = 0
        self.failed: dict[str, BaseException] = {}

    def begin(self, factory: ParcelFactory, work: Awaitable[None], peer: PubKey | None = None) -> None:
        """Start the transfer to one receiver.

        :param factory: factory that reports a failure.
        :param work: coroutine that sends the parcel and reports its success.
        :param peer: key of the receiver, if it is known.
        """

        async def deliver() -> None:
            try:
                await work
            except _FAILURES as error:
                self.failed[factory.receiver] = error
                factory.report_failure(error, peer)
            else:
                self.sent += 1
            finally:
                factory.stop()

        self._running.append(Deferred.fromCoroutine(deliver()))

    async def all_ended(self) -> None:
        """Wait until all transfers have ended."""
        for one in self._running:
            await one

    def cancel(self) -> None:
        """Cancel the transfers that are still running."""
        for one in self._running:
            one.addErrback(lambda _: None)
            one.cancel()

    def check(self) -> None:
        """:raises NotAllReceived: a transfer failed."""
        if self.failed:
            total = self.sent + len(self.failed)
            raise NotAllReceived(
                f"{len(self.failed)} of {total} receivers did not get the files: {', '.join(self.failed)}"
            )


async def send_to_receivers(
    reactor: Reactor,
    client: Client | None,
    make: ParcelFactory,
    words: int,
    *,
    receivers: int,
    is_limit_only: bool,
    expires: float | None,
    verify: bool,
    show_qr: bool,
    nearby: Nearby | None = None,
) -> None:
    """Offer one code, and send a parcel to each peer that knows it.

    :param client: client that offers the code through discovery; None offers it on the local network only.
    :param make: factory of the parcel.
    :param words: number of words of the code.
    :param receivers: number of peers that may use the code.
    :param is_limit_only: whether fewer peers than ``receivers`` are a success, too; otherwise they are an error.
    :param expires: seconds after which no further peer may use the code; running transfers continue.  None for no
        limit.
    :param verify: whether the user must compare the verifier of each peer.
    :param show_qr: whether to show the code as a QR code, too.
    :param nearby: object that also offers the code on this machine's local networks; None for discovery only.
    :raises CodeUsedUp: there were too many wrong guesses; running transfers have ended.
    :raises CodeExpired: too few peers had used the code when it expired.
    :raises NotAllReceived: a transfer failed.
    """
    deliveries, asking = _Deliveries(), DeferredLock()
    number = 0

    def begin(agreement: CodeAgreement) -> None:
        nonlocal number
        number += 1
        factory = make.for_receiver(f"receiver {number}")
        factory.say("has the code" if is_limit_only else f"has the code, {receivers - number} more may use it")
        deliveries.begin(factory, give(factory, agreement))

    async def give(factory: ParcelFactory, agreement: CodeAgreement) -> None:
        if verify:
            # There is only one terminal, so the user is asked about one receiver at a time.
            await asking.acquire()
            try:
                factory.say("compare the next number with the one on this receiver's screen")
                await compare_numbers(reactor, agreement, verify)
            except CodeUsedUp:
                agreement.proceed(_Hangup())
                raise
            finally:
                asking.release()
        sender = factory()
        agreement.proceed(sender)
        with watch_connection(reactor, lambda: sender.transport, resume_timeout_of(client), factory.say):
            sent = await sender.done
        factory.report(sent)

    try:
        offered = await show_code(
            reactor,
            client,
            words,
            make.type_there,
            show_qr=show_qr,
            nearby=nearby,
            receivers=receivers,
            expires=expires,
            on_agreed=begin,
        )
        ended: DmsgError | None = None
        try:
            await offered.agreed
        except (CodeExpired, CodeUsedUp) as error:
            ended = error
            if number:
                why = "the code has expired" if isinstance(error, CodeExpired) else describe(error)
                make.say(f"no further receiver is admitted: {why}")
        await deliveries.all_ended()
    finally:
        deliveries.cancel()
        make.stop()
    if isinstance(ended, CodeUsedUp):
        raise ended
    deliveries.check()
    if ended is not None and not (is_limit_only and number):
        raise CodeExpired(f"the code has expired; {number or 'none'} of {receivers} receivers used it")


async def send_to_group(
    reactor: Reactor, client: Client, make: ParcelFactory, members: Mapping[str, PubKey], timeout: float
) -> None:
    """Send a parcel to each member of a group.

    :param make: factory of the parcel.
    :param members: keys of the members, by their names in messages.
    :param timeout: seconds that opening a stream may take.
    :raises NobodyReceived: no member could be reached.
    :raises NotAllReceived: a transfer failed.
    """
    deliveries, at_once = _Deliveries(), DeferredSemaphore(GROUP_AT_ONCE)

    async def give(factory: ParcelFactory, key: PubKey) -> None:
        await at_once.acquire()
        try:
            await send_to_key(reactor, client, factory, key, timeout)
        finally:
            at_once.release()

    try:
        for name, key in members.items():
            factory = make.for_receiver(name)
            deliveries.begin(factory, give(factory, key), key)
        await deliveries.all_ended()
    finally:
        deliveries.cancel()
        make.stop()
    if not deliveries.sent and all(isinstance(error, NobodyThere) for error in deliveries.failed.values()):
        raise NobodyReceived(f"none of the {len(members)} members could be reached")
    deliveries.check()
    if len(members) > 1:
        notice(f"sent to all {len(members)} members")


class _Hangup(Protocol):
    """Protocol that aborts its stream at once."""

    def connectionMade(self) -> None:
        self.transport.abortConnection()  # type: ignore[union-attr]
