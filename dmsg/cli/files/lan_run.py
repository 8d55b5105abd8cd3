"""Paths by which the sender and the receiver of a code reach each other: through discovery and servers, on their local
network, or both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from dmsg.apps.codes.nearby import AgreementRace, NearbySource
from dmsg.apps.codes.rendezvous import accept_code
from dmsg.apps.codes.stream import CodeAgreement
from dmsg.apps.codes.words import Code
from dmsg.cli.client_run import with_client
from dmsg.cli.code_display import compare_numbers
from dmsg.cli.output import describe, notice
from dmsg.errors import DmsgError
from dmsg.v2019.lan.peer import LanPeer

if TYPE_CHECKING:
    from dmsg.cli.client_settings import ClientSettings
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client

NOT_RESUMED = 0.0
"""Seconds for which a lost stream over a direct link can be resumed: none, because the stream ends with its link."""


async def with_offer_paths(
    reactor: Reactor,
    settings: ClientSettings,
    lan: str,
    use: Callable[[Client | None, LanPeer | None], Awaitable[None]],
) -> None:
    """Prepare the paths by which a code is to be offered, call ``use``, and close them afterwards.

    If ``lan`` is ``also`` and the client finds no server, the code is offered on the local network only.

    :param lan: value of --lan: ``only``, ``also`` or ``off``.
    :param use: function that offers the code.  It gets a client, or None for the local network only, and the object
        that offers codes on local networks, or None.
    """
    if lan == "off":
        await with_client(reactor, settings, lambda client: use(client, None), published=True)
        return
    nearby = LanPeer(reactor, on_warning=notice)
    if not nearby.networks():
        notice("this machine is in no network now; the code can be used once this machine has joined one")
    try:
        if lan == "only":
            await use(None, nearby)
            return
        began = False

        async def both(client: Client) -> None:
            nonlocal began
            began = True
            await use(client, nearby)

        try:
            await with_client(reactor, settings, both, published=True)
        except DmsgError as error:
            if began:
                raise
            notice(f"{describe(error)}; so only receivers on this network can use the code")
            await use(None, nearby)
    finally:
        await nearby.stop()


async def with_agreement(
    reactor: Reactor,
    settings: ClientSettings,
    lan: str,
    code: Code,
    use: Callable[[CodeAgreement, float], Awaitable[None]],
    *,
    verify: bool,
    timeout: float,
) -> None:
    """Find the peer that made the code, prove that this side knows the code, and call ``use`` with the agreement.

    :param lan: value of --lan: ``only``, ``also`` or ``off``.
    :param use: function that gets the agreement, and the seconds after which a lost stream ends.
    :param verify: whether the user must compare the verifiers of both sides.
    :param timeout: seconds that opening a stream may take, and seconds for which the local network is searched.
    :raises CodeUsedUp: the code is wrong or used up, or the verifiers differ.
    """

    async def agreed_by(client: Client) -> None:
        agreed = await accept_code(reactor, client, code, timeout=timeout)
        await use(await compare_numbers(reactor, agreed, verify), client.streams.resume_timeout)

    if lan == "off":
        await with_client(reactor, settings, agreed_by)
        return
    race = AgreementRace(reactor, sources=1 if lan == "only" else 2)
    nearby = LanPeer(reactor, on_warning=notice)
    source = NearbySource(reactor, nearby, code, race, timeout=timeout)
    by_server = None if lan == "only" else _ByServer(reactor, settings, code, race, timeout)
    try:
        agreed = await race.first
        resume_timeout = settings.resume_timeout
        if by_server is None or not by_server.has_won(agreed):
            resume_timeout = NOT_RESUMED
            if by_server is not None:
                by_server.stop()
        await source.stop()
        await use(await compare_numbers(reactor, agreed, verify), resume_timeout)
    finally:
        await source.stop()
        if by_server is not None:
            by_server.stop()
            await by_server.ended
        await nearby.stop()


class _ByServer:
    """Candidate in an :class:`~dmsg.apps.codes.nearby.AgreementRace`: reaches the peer through discovery and servers.

    :ivar ended: Deferred that fires when the client has stopped.
    """

    def __init__(
        self, reactor: Reactor, settings: ClientSettings, code: Code, race: AgreementRace, timeout: float
    ) -> None:
        self._reactor = reactor
        self._code = code
        self._race = race
        self._timeout = timeout
        self._agreed: CodeAgreement | None = None
        self._has_begun = False
        running = Deferred.fromCoroutine(with_client(reactor, settings, self._take_part))
        self.ended: Deferred[None] = running.addErrback(self._failed)

    async def _take_part(self, client: Client) -> None:
        self._has_begun = True

        def note(agreed: CodeAgreement) -> CodeAgreement:
            self._agreed = agreed
            return agreed

        self._race.add(lambda: accept_code(self._reactor, client, self._code, timeout=self._timeout).addCallback(note))
        self._race.source_ended()
        # The coroutine waits here, because the client stops when the coroutine ends. After the transfer, stop() cancels
        # it.
        await Deferred()

    def _failed(self, failure: Failure) -> None:
        if failure.check(CancelledError) is not None:
            return
        if self._has_begun:
            failure.raiseException()
        self._race.source_ended(failure)

    def has_won(self, agreed: CodeAgreement) -> bool:
        """Whether this candidate has won the race, so that ``agreed`` was made through discovery and servers."""
        return agreed is self._agreed

    def stop(self) -> None:
        """Stop the client."""
        self.ended.cancel()
