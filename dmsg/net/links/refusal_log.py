"""What the log says of strangers: who was refused and why, and how often, without a line for each time.

The first time of an address and a reason is a line at once; what follows
within ``SUM_UP`` seconds is one line at their end.  The lines have one form,
which programs that ban addresses can read::

    stranger 203.0.113.5: too_many_from_address
    stranger 203.0.113.5: too_many_from_address, 262 more in 10 s
"""

from __future__ import annotations

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

SUM_UP = 10.0
"""Seconds after which what came again is summed up."""
MAX_STRANGERS = 50
"""Addresses, with their reasons, that have lines of their own in that time; the rest is one line for each reason."""

_log = Logger()


class Strangers:
    """Those of one server."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._again: dict[tuple[str, str], int] = {}
        self._others: dict[str, int] = {}
        self._call: IDelayedCall | None = None
        self._stopped = False

    def tell(self, address: str, reason: str, detail: str = "") -> None:
        """Somebody at ``address`` was refused, or its connection ended, for ``reason``.

        :param detail: in words; said once.
        """
        who = address, reason
        if who in self._again:
            self._again[who] += 1
        elif len(self._again) < MAX_STRANGERS:
            self._again[who] = 0
            detail = f" ({detail})" if detail else ""
            _log.info("stranger {address}: {reason}{detail}", address=address, reason=reason, detail=detail)
        else:
            self._others[reason] = self._others.get(reason, 0) + 1
        if self._call is None and not self._stopped:
            self._call = self._reactor.callLater(SUM_UP, self._sum_up)

    def _sum_up(self) -> None:
        self._call = None
        for (address, reason), more in self._again.items():
            if more:
                _log.info(
                    "stranger {address}: {reason}, {more} more in {seconds} s",
                    address=address,
                    reason=reason,
                    more=more,
                    seconds=round(SUM_UP),
                )
        for reason, more in self._others.items():
            _log.info(
                "other strangers: {reason}, {more} times in {seconds} s",
                reason=reason,
                more=more,
                seconds=round(SUM_UP),
            )
        self._again.clear()
        self._others.clear()

    def stop(self) -> None:
        """Sum up now, and for the last time."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()
            self._sum_up()
