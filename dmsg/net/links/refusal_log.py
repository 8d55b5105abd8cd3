"""Log of refused clients, which summarises repetitions.

The first refusal of an address for a reason is logged at once. Repetitions within ``SUM_UP`` seconds are logged as one
line at the end of this time. The lines have a fixed format, which programs that ban addresses can parse::

    stranger 203.0.113.5: too_many_from_address
    stranger 203.0.113.5: too_many_from_address, 262 more in 10 s
"""

from __future__ import annotations

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

SUM_UP = 10.0
"""Length in seconds of an interval. At its end, repeated refusals are summarised in one log line for each reason."""
MAX_STRANGERS = 50
"""Maximum number of pairs of address and reason that get separate lines in an interval. All others are summarised in
one line for each reason."""

_log = Logger()


class RefusalLog:
    """Log of the clients that one server refuses."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._repeats: dict[tuple[str, str], int] = {}
        self._unnamed_repeats: dict[str, int] = {}
        self._call: IDelayedCall | None = None
        self._stopped = False

    def log_refusal(self, address: str, reason: str, detail: str = "") -> None:
        """Log that a client was refused, or that its connection was ended for ``reason``.

        :param detail: explanation in words, logged with the first refusal only.
        """
        # An attacker decides how often this method is called, and with how many addresses. So the numbers of log
        # lines and of stored addresses are limited per interval.
        who = address, reason
        if who in self._repeats:
            self._repeats[who] += 1
        elif len(self._repeats) < MAX_STRANGERS:
            self._repeats[who] = 0
            detail = f" ({detail})" if detail else ""
            _log.info("stranger {address}: {reason}{detail}", address=address, reason=reason, detail=detail)
        else:
            # This table needs no limit, because the code defines a small number of reasons.
            self._unnamed_repeats[reason] = self._unnamed_repeats.get(reason, 0) + 1
        if self._call is None and not self._stopped:
            self._call = self._reactor.callLater(SUM_UP, self._sum_up)

    def _sum_up(self) -> None:
        self._call = None
        for (address, reason), more in self._repeats.items():
            if more:
                _log.info(
                    "stranger {address}: {reason}, {more} more in {seconds} s",
                    address=address,
                    reason=reason,
                    more=more,
                    seconds=round(SUM_UP),
                )
        for reason, more in self._unnamed_repeats.items():
            _log.info(
                "other strangers: {reason}, {more} times in {seconds} s",
                reason=reason,
                more=more,
                seconds=round(SUM_UP),
            )
        self._repeats.clear()
        self._unnamed_repeats.clear()

    def stop(self) -> None:
        """Log the summary of the last interval, and stop."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()
            self._sum_up()
