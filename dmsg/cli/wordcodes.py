"""Codes as commands use them: one side makes one and waits, the other types it."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from twisted.internet.defer import TimeoutError, ensureDeferred, maybeDeferred
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater

from dmsg.apps.codes.pake import Role, WrongCode
from dmsg.apps.codes.stream import PORT, TRIES, Agreed, CodeEnd, CodeFactory, CodeOver
from dmsg.apps.codes.words import Code
from dmsg.cli.asking import ask
from dmsg.cli.output import notice, say, state, tell
from dmsg.errors import DiscoveryError, Unwanted

if TYPE_CHECKING:
    from dmsg.discovery.lookup.nameplates import Nameplate
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client

CLOSE_TIMEOUT = 5.0
"""Seconds in which the other side is told how it ended."""
LOST_TWICE = 2
"""Times in a row that a nameplate could not be claimed again when the person is told."""


class CodeUsedUp(Unwanted):
    """Nothing came of a code."""


async def offer_code(
    reactor: Reactor, client: Client, words: int, type_there: str, *, verify: bool, show_qr: bool
) -> Agreed:
    """Make a code, show it, and wait for who knows it.

    :param type_there: the command to which it is given on the other machine.
    :raises CodeUsedUp: somebody guessed, too often.
    """

    def told_wrong(left: int) -> None:
        notice(f"somebody tried a wrong code; after {left} more such tries this one is used up")

    nameplate = await client.claim_nameplate()
    code = Code.make(nameplate.number, words)
    offer = CodeFactory(reactor, code, told_wrong)
    listening = client.listen(offer, PORT)
    keeping = ensureDeferred(_keep(reactor, nameplate))
    keeping.addErrback(lambda _: None)
    tell(f"code: {code}", code=str(code))
    if show_qr:
        _show_qr(str(code))
    notice(f"on the other machine: {type_there} {code}")
    try:
        agreed: Agreed = await offer.agreed
    except WrongCode:
        raise CodeUsedUp(f"wrong codes were tried {TRIES} times: this one is used up, make another") from None
    finally:
        keeping.cancel()
        offer.agreed.cancel()
        await _release(nameplate)
        await maybeDeferred(listening.stopListening)
    await _compare(reactor, agreed, verify)
    return agreed


async def take_code(reactor: Reactor, client: Client, code: Code, *, verify: bool, timeout: float) -> Agreed:
    """Find who made the code, and prove that this side knows it.

    :raises CodeUsedUp: it is not right, or not the one who made it answered.
    """
    peer = await client.find_nameplate(code.nameplate)
    end = CodeEnd(reactor, Role.RECEIVER, code)
    factory = Factory.forProtocol(lambda: end)
    factory.noisy = False
    await client.connect(peer, factory, PORT, timeout=timeout)
    try:
        agreed: Agreed = await end.agreed
    except WrongCode:
        with suppress(TimeoutError):
            await end.closed.addTimeout(CLOSE_TIMEOUT, reactor)
        raise CodeUsedUp(
            "the code is not right, or somebody else answered; look at it once more, or ask for another"
        ) from None
    except CodeOver as error:
        raise CodeUsedUp(str(error)) from None
    await _compare(reactor, agreed, verify)
    return agreed


async def _keep(reactor: Reactor, nameplate: Nameplate) -> None:
    """Claim it again and again, for as long as it is needed."""
    failed = 0
    while True:
        await deferLater(reactor, nameplate.renew_every)
        try:
            if not await nameplate.renew():
                notice("discovery has given the number of this code to somebody else: make another code")
                return
            failed = 0
        except DiscoveryError as error:
            failed += 1
            if failed == LOST_TWICE:
                notice(f"{error}; the code may be lost with it")


async def _release(nameplate: Nameplate) -> None:
    with suppress(DiscoveryError):  # it ends by itself
        await nameplate.release()


async def _compare(reactor: Reactor, agreed: Agreed, verify: bool) -> None:
    """Show what both sides can compare, if that is wanted."""
    if not verify:
        return
    say(f"verify: {agreed.verifier}", err=True)
    if not await ask(reactor, "Does the other side show the same?", default=False):
        raise CodeUsedUp("the other side shows something else")


def _show_qr(text: str) -> None:
    """For a telephone that is held before the screen."""
    if not sys.stderr.isatty() or state.quiet:
        return
    import segno

    code = segno.make(text, micro=False)
    width = code.symbol_size(border=2)[0]
    try:
        "▀▄█".encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return
    if shutil.get_terminal_size().columns >= width:
        code.terminal(out=sys.stderr, border=2, compact=True)
