"""Checks whether a server of 2019 sends the REQUESTs of other clients over this connection.

A server of 2019 sends the REQUESTs for a key to the newest connection of this key. When any connection of the key ends,
the server sends them to none until the key connects again. So a client becomes unreachable if its server notices late
that an older connection of the client is dead, and nothing else shows this to the client.

A check is a plain REQUEST to the client's own key, which every server of 2019 relays. If the REQUEST arrives over this
connection, so do those of others, and the client closes the transport at once. No other client is involved, unless
another program uses the key. Servers that answer PING need no checks, because there the newest connection stays
reachable.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import CloseReason, DmsgTimeout, TransportRefused
from dmsg.net.reactor import cancel_call

FIRST_CHECK = (1.0, 3.0)
"""Minimum and maximum seconds between the start of a connection and its first check."""
CHECK_INTERVAL = 60.0
"""Seconds between two checks, before jitter."""
CHECK_JITTER = 0.1
"""Fraction by which ``CHECK_INTERVAL`` is randomly shortened or lengthened."""
CHECK_TIMEOUT = 10.0
"""Seconds to wait for the REQUEST of a check."""
REPEAT_DELAY = 5.0
"""Seconds after which a check without a result is repeated."""
MAX_UNANSWERED = 3
"""Number of consecutive checks without any data from the server after which the connection is closed."""
MAX_SHARED_INTERVAL = 300.0
"""Maximum seconds between two checks while the REQUESTs reach another program. The interval begins at
``CHECK_INTERVAL`` and doubles with each check."""

_NOT_DELIVERED = (CloseReason.UNSPECIFIED, CloseReason.NO_SUCH_PEER)
"""Reasons with which servers refuse a REQUEST for a key that is not connected."""
_OTHER_PROGRAM = (CloseReason.REFUSED, CloseReason.ENCRYPTION_REQUIRED)
"""Reasons with which clients refuse a plain REQUEST, and which no server uses for a plain REQUEST."""

_log = Logger()


class ReachabilityCheck:
    """Regular check whether REQUESTs for the client's key arrive over one connection.

    :param server: short form of the server's key, for messages.
    :param request: sends a plain REQUEST to the client's own key and closes its transport if it opens. The Deferred
        fires if the transport opens, and fails with TransportRefused, DmsgTimeout or the error that ended the
        connection.
    :param is_needed: returns whether the server may be of 2019.
    :param is_requesting: returns whether a transport to the client's own key is being opened over this connection.
    :param received: returns the number of reads from the connection so far.
    :param on_result: callback invoked when it becomes known, or is not known any more, that no REQUESTs arrive over
        this connection; with the reason, or an empty text.
    :param on_dead: callback invoked with a reason when the connection has to be replaced by a new one.
    :param on_shared: callback invoked when another program with the same key is connected to the server.
    :ivar was_reached: whether a REQUEST has arrived over this connection.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        server: str,
        *,
        request: Callable[[float], Deferred[object]],
        is_needed: Callable[[], bool],
        is_requesting: Callable[[], bool],
        received: Callable[[], int],
        on_result: Callable[[str], None],
        on_dead: Callable[[str], None],
        on_shared: Callable[[], None],
        random: Random | None = None,
    ) -> None:
        self._reactor = reactor
        self._server = server
        self._request = request
        self._is_needed = is_needed
        self._is_requesting = is_requesting
        self._received = received
        self._on_result = on_result
        self._on_dead = on_dead
        self._on_shared = on_shared
        self._random = random or Random()
        self._timer: IDelayedCall | None = None
        self._is_waiting = False
        """Whether the last check has no result yet."""
        self._expected = 0
        """Number of REQUESTs of checks that were sent and may still arrive."""
        self._unanswered = 0
        self._shared_interval = CHECK_INTERVAL
        self._is_active = self._is_stopped = False
        self.was_reached = False

    def check_soon(self) -> None:
        """Check within seconds, and regularly from then on."""
        self._is_active = True
        if not self._is_waiting:
            self._schedule(self._random.uniform(*FIRST_CHECK))

    def check_now(self) -> bool:
        """Check at once, because the connection is probably dead. If no data arrives, report this after one check.

        :returns: False if the connection is not checked at all.
        """
        if not self._is_active or self._is_stopped or not self._is_needed():
            return False
        self._unanswered = MAX_UNANSWERED - 1
        if not self._is_waiting:
            self._schedule(0.0)
        return True

    def stop(self) -> None:
        """Stop the checks, because the connection is lost."""
        self._is_stopped = True
        cancel_call(self._timer)
        self._timer = None

    def arrived(self) -> bool:
        """Handle a plain REQUEST from the client's own key, which has arrived at this client.

        :returns: whether to refuse the REQUEST with the reason REFUSED; False if it may come from the application.
        """
        if self._is_stopped or not self._is_needed():
            return False
        # Callbacks are called in a later reactor turn, because the caller has not finished reading.
        if self._expected:
            self._expected -= 1
            self._is_waiting = False
            self._unanswered = 0
            self._shared_interval = CHECK_INTERVAL
            self.was_reached = True
            self._schedule(self._jitter(CHECK_INTERVAL))
            self._reactor.callLater(0, self._on_result, "")
            return True
        if self._is_requesting():
            return False
        # Another program with the same key checks whether it is reachable. The reason REFUSED tells that program that
        # this one gets the REQUESTs instead.
        self._reactor.callLater(0, self._on_shared)
        return True

    def _schedule(self, delay: float) -> None:
        if not self._is_stopped:
            cancel_call(self._timer)
            self._timer = self._reactor.callLater(delay, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_needed():
            self._on_result("")
            return
        if self._is_requesting():
            # The application's REQUEST and that of a check have the same payload, and could be mistaken for each other.
            self._schedule(REPEAT_DELAY)
            return
        self._is_waiting = True
        self._expected += 1
        before = self._received()
        self._request(CHECK_TIMEOUT).addCallbacks(self._was_accepted, self._has_failed, errbackArgs=(before,))

    def _was_accepted(self, _: object) -> None:
        if self._is_waiting:
            self._expected -= 1
            self._is_shared()

    def _has_failed(self, failure: Failure, before: int) -> None:
        # Once its REQUEST has arrived, the check is over, and the client closes the transport. The failure is then only
        # the end of this transport.
        if self._is_stopped or not self._is_waiting:
            return
        error = failure.value
        if isinstance(error, TransportRefused):
            self._expected -= 1
            self._was_refused(error.reason)
            return
        self._is_waiting = False
        if not isinstance(error, DmsgTimeout) or self._received() != before:
            # Data has arrived, so the REQUEST may be late because of other data before it.
            self._unanswered = 0
            self._schedule(REPEAT_DELAY)
            return
        self._unanswered += 1
        if self._unanswered < MAX_UNANSWERED:
            self._schedule(REPEAT_DELAY)
            return
        self._on_dead(f"server {self._server} does not answer: this client is not reachable through it")

    def _was_refused(self, reason: int) -> None:
        if reason in _OTHER_PROGRAM:
            self._is_shared()
            return
        self._is_waiting = False
        self._unanswered = 0
        if reason in _NOT_DELIVERED:
            self._on_dead(
                f"server {self._server}, a program of 2019, no longer sends requests over this connection, because an "
                "older connection of this client has ended: the client connects again"
            )
            return
        self._schedule(REPEAT_DELAY)

    def _is_shared(self) -> None:
        self._is_waiting = False
        self._unanswered = 0
        interval, self._shared_interval = self._shared_interval, min(2 * self._shared_interval, MAX_SHARED_INTERVAL)
        self._on_shared()
        self._on_result(
            f"server {self._server}, a program of 2019, sends requests to another program with the same key: "
            "stop one of them, or give it a key of its own"
        )
        self._schedule(self._jitter(interval))

    def _jitter(self, seconds: float) -> float:
        return seconds * self._random.uniform(1 - CHECK_JITTER, 1 + CHECK_JITTER)
