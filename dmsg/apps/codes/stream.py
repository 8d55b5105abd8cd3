"""Key agreement of :mod:`dmsg.apps.codes.pake` over a stream.  After the agreement, another protocol uses the
stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IProtocol, IReactorTime
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from dmsg.apps.codes.pake import Agreement, CodeProtocolError, Role, WrongCode
from dmsg.apps.codes.words import Code
from dmsg.base.buckets import Bucket
from dmsg.base.eviction import pick_loser
from dmsg.errors import DmsgError, NobodyThere, Unwanted
from dmsg.keys import PubKey
from dmsg.net.isolate import call_isolated
from dmsg.net.own_pauses import FairTimeout, add_fair_timeout, stop_timeout
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import stream_of

PORT = 25
"""Port on which the side that made a code listens."""
AGREE_TIMEOUT = 30.0
"""Seconds that one key agreement may take."""
EARLY_LIMIT = 512 * 1024
"""Maximum bytes to buffer from a peer between the agreement and the next protocol.  If a peer sends more, its
connection is aborted.
"""
CLOSE_TIMEOUT = 1.0
"""Seconds to wait until a peer with a wrong code has received the message WRONG."""
MAX_AGREEMENTS = 8
"""Maximum number of concurrent key agreements for one code.  Above it, a peer with several agreements loses one to
another peer.  Otherwise an agreement is ended whose peer has sent nothing, or that has run for ``SLOW_RUN`` seconds,
but none of another peer for one that has several.
"""
SLOW_RUN = 5.0
"""Seconds after which a key agreement may be ended to make room for another, even if its peer has sent data."""
MAX_WRONG_GUESSES = 5
"""Number of wrong guesses after which a code is used up.  A lower number would let strangers who find the nameplate use
up the code more easily.  A higher number would give them more guesses at the words.
"""
RUNS_BURST, RUNS_RATE = 64.0, 20.0
"""Rate limit of the key agreements for one code: maximum burst, and agreements per second.  Each agreement takes one or
two milliseconds of CPU time.
"""


class CodeUsedUp(Unwanted):
    """Error: the code is wrong or used up, or the peer did not answer; there is no agreement."""


class CodeExpired(NobodyThere):
    """Error: the code has expired before enough receivers have used it."""


@dataclass(frozen=True)
class CodeAgreement:
    """Result of a key agreement: both ends have proved that they know the code.

    :ivar peer: key of the other end, for this stream only.
    :ivar verifier: 12 digits in three groups, the same at both ends, for people to compare.
    :ivar proceed: function that connects a protocol to the stream.  The protocol first gets the bytes received so far.
        The stream is paused until the call.
    """

    peer: PubKey
    verifier: str
    proceed: Callable[[IProtocol], None]


class CodeEnd(Protocol):
    """Protocol of one end of a key agreement over a stream.

    :ivar agreed: Deferred that fires with :class:`CodeAgreement`; fails with :class:`~dmsg.apps.codes.pake.WrongCode`,
        :class:`~dmsg.apps.codes.pake.CodeProtocolError` or :class:`CodeUsedUp`.
    :ivar closed: Deferred that fires when the connection is closed and the last message has been sent.
    :ivar has_spoken: whether the other end has sent anything.
    """

    has_spoken = False

    def __init__(self, reactor: IReactorTime, role: Role, code: Code) -> None:
        self._reactor = reactor
        self._role = role
        self._code = code
        self._agreement: Agreement | None = None
        self._timer: FairTimeout | None = None
        self._next: IProtocol | None = None
        self._early_data: list[bytes] = []
        self._loss: Failure | None = None
        self._given_up = False
        self.agreed: Deferred[CodeAgreement] = Deferred(lambda _: self._give_up())
        self.closed: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        transport = stream_of(self)
        peer, host = transport.getPeer(), transport.getHost()
        binding = getattr(transport, "binding", None)
        if binding is None or not isinstance(peer, DmsgAddress) or not isinstance(host, DmsgAddress):
            self._fail(CodeProtocolError("codes need a secure stream"))
            return
        self._agreement = Agreement(
            self._role, self._code.password, local=host.public_key, remote=peer.public_key, binding=binding
        )
        self._timer = FairTimeout(self._reactor, AGREE_TIMEOUT, self._on_timeout)
        self._send()

    def _send(self) -> None:
        assert self._agreement is not None
        data = self._agreement.data_to_send()
        if data:
            self.transport.write(data)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        if self._next is not None:
            self._next.dataReceived(data)
            return
        self.has_spoken = True
        agreement = self._agreement
        if agreement is None or self._given_up:
            return  # The data is dropped, because no protocol will read it after a failed agreement.
        if agreement.done:
            self._early_data.append(data)
            if sum(map(len, self._early_data)) > EARLY_LIMIT:
                self._early_data.clear()
                self._abort()
            return
        try:
            rest = agreement.receive_data(data)
        except (WrongCode, CodeProtocolError) as error:
            self._send()
            self._fail(error, abort=False)
            return
        self._send()
        if agreement.done:
            stop_timeout(self._timer)
            if rest:
                self._early_data.append(rest)
            transport = stream_of(self)
            transport.pauseProducing()
            assert agreement.verifier is not None
            self.agreed.callback(
                CodeAgreement(cast(DmsgAddress, transport.getPeer()).public_key, agreement.verifier, self._proceed)
            )

    def _proceed(self, protocol: IProtocol) -> None:
        transport = stream_of(self)
        if self._loss is None:
            # The stream is resumed before the protocol is connected, because ``connectionMade`` may pause it.
            transport.resumeProducing()
        self._next = protocol
        protocol.makeConnection(transport)
        early, self._early_data = b"".join(self._early_data), []
        if early:
            protocol.dataReceived(early)
        if self._loss is not None:
            protocol.connectionLost(self._loss)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        stop_timeout(self._timer)
        self._loss = reason
        if self._next is not None:
            self._next.connectionLost(reason)
        elif not self.agreed.called and not self._given_up:
            # If this side, as the receiver, has sent its confirmation, the sender may have closed because the code is
            # wrong.
            judged = self._role is Role.RECEIVER and self._agreement is not None and self._agreement.awaits_guess
            what = "before the code was compared"
            if judged:
                what = "instead of an answer: was the code right, and is it still good?"
            elif self._role is Role.RECEIVER:
                what += "; perhaps somebody else used the code at the same time"
            self.agreed.errback(Failure(CodeUsedUp(f"the other side ended the connection {what}")))
        if not self.closed.called:
            self.closed.callback(None)

    def _on_timeout(self) -> None:
        self._fail(CodeUsedUp(f"the other side did not answer within {AGREE_TIMEOUT:g} s"))

    def _fail(self, error: DmsgError, *, abort: bool = True) -> None:
        stop_timeout(self._timer)
        self._given_up = True
        if abort:
            self._abort()
        else:
            self.transport.loseConnection()  # type: ignore[union-attr]
            # Without this timer, a peer that does not read would keep the connection open for ever.
            self._timer = FairTimeout(self._reactor, CLOSE_TIMEOUT, self._abort)
        if not self.agreed.called:
            self.agreed.errback(Failure(error))

    def _give_up(self) -> None:
        self._given_up = True
        self._abort()

    def _abort(self) -> None:
        stop_timeout(self._timer)
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]


class CodeFactory(Factory):
    """Factory that runs a key agreement with each peer that connects, until the code is used up.

    Wrong guesses are counted for the code as a whole, and a right guess does not reset the count.  A code for many
    receivers is therefore no easier to guess than a code for one.

    :param code: code that peers must know; None if the attribute ``code`` is set later.
    :param on_wrong_guess: callback invoked after each wrong guess except the last one allowed, with the number of
        guesses left.
    :param receivers: number of peers that may use the code.
    :param on_agreed: callback invoked with each :class:`CodeAgreement`.
    :ivar agreed: Deferred that fires with the :class:`CodeAgreement` of the last receiver; fails with
        :class:`~dmsg.apps.codes.pake.WrongCode` after ``MAX_WRONG_GUESSES`` wrong guesses.
    :ivar code: code that peers must know.  While it is None, peers are refused.
    :ivar receivers: number of further peers that may use the code.
    """

    noisy = False

    def __init__(
        self,
        reactor: IReactorTime,
        code: Code | None,
        on_wrong_guess: Callable[[int], object] = lambda left: None,
        *,
        receivers: int = 1,
        on_agreed: Callable[[CodeAgreement], object] = lambda agreed: None,
    ) -> None:
        self._reactor = reactor
        self.code = code
        self._on_wrong_guess = on_wrong_guess
        self._on_agreed = on_agreed
        self._running: dict[CodeEnd, tuple[PubKey | None, float]] = {}
        self._runs = Bucket(RUNS_BURST, reactor.seconds())
        self._is_over = False
        self.receivers = receivers
        self.tries = MAX_WRONG_GUESSES
        self.agreed: Deferred[CodeAgreement] = Deferred(lambda _: self._end())

    def buildProtocol(self, addr: IAddress | None) -> CodeEnd | None:
        now = self._reactor.seconds()
        peer = addr.public_key if isinstance(addr, DmsgAddress) else None
        if self.code is None or self._is_over or self.agreed.called:
            return None
        if not self._runs.take(1.0, RUNS_RATE, RUNS_BURST, now):
            return None
        if len(self._running) >= MAX_AGREEMENTS:
            loser = self._pick_evicted(peer, now)
            if loser is None:
                return None
            loser.agreed.cancel()
        end = CodeEnd(self._reactor, Role.SENDER, self.code)
        self._running[end] = (peer, now)
        end.agreed.addBoth(self._ended, end)
        return end

    def _pick_evicted(self, newcomer: PubKey | None, now: float) -> CodeEnd | None:
        """Return the agreement that ends to make room for one of ``newcomer``, or None."""
        counts = Counter(peer for peer, _ in self._running.values())
        loser = pick_loser(counts, newcomer)
        if loser is not None:
            of_loser = [end for end, (peer, _) in self._running.items() if peer == loser]
            return next((end for end in of_loser if not end.has_spoken), of_loser[-1])
        slow = [
            end
            for end, (peer, began) in self._running.items()
            if (now - began >= SLOW_RUN or not end.has_spoken) and (peer == newcomer or not counts[newcomer])
        ]
        return min(slow, key=lambda end: end.has_spoken, default=None)

    def _ended(self, result: CodeAgreement | Failure, end: CodeEnd) -> None:
        self._running.pop(end, None)
        if self._is_over or self.agreed.called:
            return
        if isinstance(result, Failure):
            if result.check(WrongCode) is None:
                # Any other failure, such as a timeout, is no guess: the peer has learnt nothing about the code, because
                # this side sends its confirmation only after the peer's confirmation was right.
                return
            self.tries -= 1
            if self.tries > 0:
                self._on_wrong_guess(self.tries)
                return
        else:
            self.receivers -= 1
            if self.receivers > 0:
                call_isolated(self._on_agreed, result)
                return
        agreed = self.agreed
        self._is_over = True
        self._end()
        if isinstance(result, Failure):
            # ``agreed`` fails only after the peer has received WRONG, because the program may end when ``agreed``
            # fails.
            add_fair_timeout(end.closed, CLOSE_TIMEOUT, self._reactor)
            end.closed.addBoth(lambda _: agreed.callback(result))
        else:
            call_isolated(self._on_agreed, result)
            agreed.callback(result)

    def expire(self) -> None:
        """Accept no further peers, and fail ``agreed`` with :class:`CodeExpired`."""
        if not self._is_over and not self.agreed.called:
            self._is_over = True
            self._end()
            self.agreed.errback(CodeExpired("nobody used the code in time; make another"))

    def _end(self) -> None:
        """End all running agreements."""
        running, self._running = list(self._running), {}
        for one in running:
            one.agreed.cancel()
