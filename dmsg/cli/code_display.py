"""Dialogues about codes: one side shows a code and waits for a peer, the other side has typed the code."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dmsg.apps.codes import rendezvous
from dmsg.apps.codes.stream import CodeAgreement, CodeUsedUp
from dmsg.apps.codes.words import Code
from dmsg.cli.output import notice, say, shows_notices, tell
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
    """Offer a new code, and print it.

    :param client: client that offers the code through discovery; None offers it on the local network only.
    :param words: number of words of the code.
    :param type_there: command that the other person types before the code.
    :param show_qr: whether to show the code as a QR code, too.
    :param nearby: object that also offers the code on this machine's local networks; None for discovery only.
    :param receivers: number of peers that may use the code.
    :param expires: seconds after which no peer may use the code; None for no limit.
    :param on_agreed: callback invoked with the agreement of each peer.
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
        notice(f"the code is valid {', '.join(good)}")
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
    """Offer a new code, print it, and wait for the peer that knows it.  The parameters are those of :func:`show_code`.

    :param verify: whether the user must compare the verifiers of both sides.
    :raises CodeUsedUp: there were too many wrong guesses, or the verifiers differ.
    :raises CodeExpired: nobody used the code in time.
    """
    offered = await show_code(reactor, client, words, type_there, show_qr=show_qr, nearby=nearby, expires=expires)
    return await compare_numbers(reactor, await offered.agreed, verify)


async def accept_code(reactor: Reactor, client: Client, code: Code, *, verify: bool, timeout: float) -> CodeAgreement:
    """Find the peer that offers a code, and prove that this side knows the code.

    :param verify: whether the user must compare the verifiers of both sides.
    :param timeout: seconds that opening the stream may take.
    :raises CodeUsedUp: the code is wrong or used up, or the verifiers differ.
    """
    return await compare_numbers(reactor, await rendezvous.accept_code(reactor, client, code, timeout=timeout), verify)


async def compare_numbers(reactor: Reactor, agreement: CodeAgreement, verify: bool) -> CodeAgreement:
    """Print the verifier of the agreement, and ask the user whether the other side shows the same.  Do nothing unless
    ``verify`` is true.

    :raises CodeUsedUp: the verifiers differ.
    """
    if verify:
        say(f"verify: {agreement.verifier}", err=True)
        if not await ask(reactor, "Does the other side show the same?", default=False):
            raise CodeUsedUp(
                "the other side shows a different number, so it may be somebody else: begin again with a new code"
            )
    return agreement


def print_qr(text: str) -> None:
    """Print a text as a QR code, for the camera of a phone. Do nothing if standard error is not a terminal, if the
    terminal is too small for the code, or if no notices are shown.
    """
    if not sys.stderr.isatty() or not shows_notices():
        return
    import segno

    code = segno.make(text, micro=False)
    width = code.symbol_size(border=2)[0]
    try:
        "▀▄█".encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return
    terminal = shutil.get_terminal_size()
    # A character shows two modules (squares) of the QR code, one above the other. One row of the terminal is left for
    # the cursor.
    if terminal.columns >= width and terminal.lines > (width + 1) // 2:
        code.terminal(out=sys.stderr, border=2, compact=True)
