"""Dialogues about codes: one command shows a code and waits, the other one asks for it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dmsg.apps.codes import rendezvous
from dmsg.apps.codes.stream import CodeAgreement, CodeUsedUp
from dmsg.apps.codes.words import Code
from dmsg.cli.output import notice, say, state, tell
from dmsg.cli.prompts import ask
from dmsg.cli.reconnect_notice import clock_time

if TYPE_CHECKING:
    from dmsg.apps.codes.nearby import Nearby
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


async def show_code(
    reactor: Reactor,
    client: Client | None,
    words: int,
    type_there: str,
    *,
    show_qr: bool,
    nearby: Nearby | None = None,
    receivers: int = 1,
    expires: float | None = None,
    on_agreed: Callable[[CodeAgreement], object] = lambda agreed: None,
) -> rendezvous.OfferedCode:
    """Make a code and show it.

    :param client: client by which the receiver finds this side; None offers the code on the network only.
    :param type_there: command to type on the other machine.
    :param nearby: this machine on its networks, if the code is offered there, too.
    :param receivers: number of peers for whom the code is good.
    :param expires: seconds after which the code is good for nobody; None for no limit.
    :param on_agreed: called with the agreement of each peer.
    """

    def report_wrong_guess(left: int) -> None:
        notice(f"somebody tried a wrong code; after {left} more wrong tries this code is used up")

    offered = await rendezvous.offer_code(
        reactor,
        client,
        nearby=nearby,
        words=words,
        receivers=receivers,
        expires=expires,
        on_agreed=on_agreed,
        on_wrong_guess=report_wrong_guess,
        on_warning=notice,
    )
    tell(f"code: {offered.code}", code=str(offered.code))
    if show_qr:
        print_qr(str(offered.code))
    notice(f"on the other machine: {type_there} {offered.code}")
    if receivers > 1 or expires is not None:
        good = [] if receivers == 1 else [f"for {receivers} receivers"]
        good += [] if expires is None else [f"until {clock_time(expires)}"]
        notice(f"the code is good {', '.join(good)}")
    return offered


async def offer_code(
    reactor: Reactor,
    client: Client | None,
    words: int,
    type_there: str,
    *,
    verify: bool,
    show_qr: bool,
    nearby: Nearby | None = None,
    expires: float | None = None,
) -> CodeAgreement:
    """Make a code, show it, and wait for the peer that knows it; the parameters are those of :func:`show_code`.

    :raises CodeUsedUp: see :class:`~dmsg.apps.codes.rendezvous.OfferedCode`; or the users saw different numbers.
    :raises CodeExpired: nobody used the code in time.
    """
    offered = await show_code(reactor, client, words, type_there, show_qr=show_qr, nearby=nearby, expires=expires)
    return await compare_numbers(reactor, await offered.agreed, verify)


async def accept_code(reactor: Reactor, client: Client, code: Code, *, verify: bool, timeout: float) -> CodeAgreement:
    """Prove to the peer that made a code that this side knows the code.

    :raises CodeUsedUp: see :func:`~dmsg.apps.codes.rendezvous.accept_code`; or the users saw different numbers.
    """
    return await compare_numbers(reactor, await rendezvous.accept_code(reactor, client, code, timeout=timeout), verify)


async def compare_numbers(reactor: Reactor, agreement: CodeAgreement, verify: bool) -> CodeAgreement:
    """Ask the user to compare the numbers of both sides, if an option asks for that.

    :raises CodeUsedUp: the numbers differ.
    """
    if verify:
        say(f"verify: {agreement.verifier}", err=True)
        if not await ask(reactor, "Does the other side show the same?", default=False):
            raise CodeUsedUp(
                "the other side shows a different number, so it may be somebody else: begin again with a new code"
            )
    return agreement


def print_qr(text: str) -> None:
    """Show the code as a QR code for a telephone's camera."""
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
