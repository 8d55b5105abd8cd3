"""Where a relay sends a message: the rules, without I/O.

The order of the rules and the texts of the errors are those of the reference
(docs/rmb/protocol.md); clients match on the texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from dmsg.rmb.envelope.texts import TEXTS
from dmsg.rmb.envelope.wire import MAX_SKEW
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.mail import Header
from dmsg.rmb.twins.address import MAX_SID, Session
from dmsg.rmb.twins.twin import Twin


class Action(Enum):
    """What to do with a message for a twin whose session is not connected here."""

    QUEUE = auto()
    """Keep it; offer it meanwhile to the twin's other relays, if there are any."""
    FORWARD = auto()
    """Send it to one of the twin's relays."""
    PROBE = auto()
    """Send it to one of the twin's relays where the session is connected; else refuse it."""
    REFUSE = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    """What :meth:`Rules.route` says.

    :ivar relays: other relays, in no order.
    """

    action: Action
    relays: frozenset[str] = frozenset()
    drop: Drop | None = None


class Refused(Exception):
    """A message is not carried.

    :ivar drop: why; ``TEXTS`` has what its sender is told.
    """

    def __init__(self, drop: Drop) -> None:
        super().__init__(TEXTS[drop])
        self.drop = drop


class Rules:
    """What one relay decides.

    :param domains: names under which twins list this relay; with none, whoever is not connected is elsewhere.
    :param limiter: of what twins may send, or None.
    :ivar drops: how often each reason occurred.
    :ivar windows: all that count what twins send, here or through other relays.
    """

    def __init__(self, domains: Iterable[str] = (), limiter: FixedWindow | None = None) -> None:
        self.domains = frozenset(domains)
        self.limiter = limiter
        self.windows = [limiter] if limiter is not None else []
        self.drops: Counter[Drop] = Counter()

    def admit(self, session: Session, header: Header, size: int, now: float) -> bool:
        """The rules that come before the destination; True for a ping.

        :raises Refused: it is not carried.
        """
        if self.limiter is not None and not self.limiter.measure(session.twin, size, now, is_answer=header.is_answer):
            raise Refused(Drop.RATE_LIMITED)
        if header.source != session:
            raise Refused(Drop.WRONG_SOURCE)
        if header.kind == "ping":
            return True
        if not header.destination.twin:
            raise Refused(Drop.NO_DESTINATION)
        self.check_message(header, now)
        return False

    def carried(self, header: Header, now: float) -> None:
        """A message goes on to its destination, which the registry knows: it may answer a request."""
        if header.kind == "request":
            for window in self.windows:
                window.ask(header.destination.twin, now)

    def charge(self, twin: int, messages: int, now: float) -> None:
        """Count what costs as much as so many messages of ``twin``."""
        if self.limiter is not None:
            self.limiter.charge(twin, messages, now)

    def check_message(self, header: Header, now: float) -> None:
        """What is asked of every message, whoever brings it.

        :raises Refused: its session is none that can be, its life is over, or begins too late.
        """
        if len(header.destination.sid or "") > MAX_SID:
            raise Refused(Drop.BAD_REQUEST)
        if header.is_over(now):
            raise Refused(Drop.EXPIRED)
        if header.timestamp > now + MAX_SKEW:
            raise Refused(Drop.BAD_TIMES)

    def route(self, header: Header, twin: Twin | None) -> Decision:
        """For a session that is not connected here.

        :param twin: of the destination; None when the registry has none.
        """
        if twin is None:
            return Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION)
        relays = twin.relays - {""}
        if not relays:
            return Decision(Action.REFUSE, drop=Drop.NO_RELAY)
        others = relays - self.domains
        if len(others) == len(relays):
            return Decision(Action.FORWARD, others)
        if header.fail_fast:
            # it may be connected to another of its relays
            return Decision(Action.PROBE, others) if others else Decision(Action.REFUSE, drop=Drop.OFFLINE)
        return Decision(Action.QUEUE, others)

    def for_intake(self, header: Header, twin: Twin | None) -> Decision:
        """For what another relay brings: nothing is forwarded a second time.

        ``relays`` of a QUEUE may be offered it.
        """
        if twin is None:
            return Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION)
        if self.domains and not twin.relays & self.domains:
            return Decision(Action.REFUSE, drop=Drop.NO_RELAY)
        if header.fail_fast:
            return Decision(Action.REFUSE, drop=Drop.OFFLINE)
        return Decision(Action.QUEUE, twin.relays - self.domains - {""} if self.domains else frozenset())
