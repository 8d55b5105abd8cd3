"""Receiver's side of a key agreement, over any stream to a peer that may have made the code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.internet.protocol import Factory

from dmsg.apps.codes.pake import Role, WrongCode
from dmsg.apps.codes.stream import CodeAgreement, CodeEnd, CodeUsedUp
from dmsg.apps.codes.words import Code
from dmsg.net.deadlines import no_answer

CLOSE_TIMEOUT = 5.0
"""Seconds to wait until this side's last message has been sent."""


async def prove_code(
    reactor: IReactorTime, code: Code, connect: Callable[[IProtocolFactory], Deferred[IProtocol]]
) -> CodeAgreement:
    """Open a stream, and prove to the peer at its other end that this side knows ``code``.

    :param connect: function that opens the stream; its argument is the factory of the stream's protocol.
    :raises CodeUsedUp: the code is wrong or used up, or the peer did not answer in time.
    :raises CodeProtocolError: the peer does not use this protocol.
    """
    end = CodeEnd(reactor, Role.RECEIVER, code)
    factory = Factory.forProtocol(lambda: end)
    factory.noisy = False
    await connect(factory)
    try:
        return await end.agreed
    except WrongCode:
        with suppress(TimeoutError):
            await end.closed.addTimeout(CLOSE_TIMEOUT, reactor, no_answer)
        raise CodeUsedUp(
            "the code is wrong, or another person answered it; check the code, or ask for a new one"
        ) from None
