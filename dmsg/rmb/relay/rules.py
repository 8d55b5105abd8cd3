"""Rules by which a relay decides where a message goes. No I/O.

The inputs are the header of a message, the session or relay that sent it here, the receiver's registry entry, and the
time. The output is a :class:`Decision`, or :exc:`MessageRefused` with the reason for the sender. The switch carries the
decision out (:mod:`dmsg.rmb.relay.switch`).

A session may send only messages whose source names that session.  A message from another relay is never forwarded a
second time, so messages cannot circulate. Each refusal has one reason, which the catching code counts.

The order of the rules and the texts of the errors are those of the reference (docs/rmb/protocol.md); clients match on
the texts.
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
    """Action that a relay takes on a message for a session that is not connected here."""

    QUEUE = auto()
    """Store the message, and meanwhile offer it to the twin's other relays, if it has any."""
    FORWARD = auto()
    """Send the message to one of the twin's relays."""
    PROBE = auto()
    """Send the message to one of the twin's relays if the session is connected there; otherwise refuse it."""
    REFUSE = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of :meth:`Rules.route`.

    :ivar relays: other relays to which the message may be sent, in no order.
    """

    action: Action
    relays: frozenset[str] = frozenset()
    drop: Drop | None = None


class MessageRefused(Exception):
    """A message is neither delivered, stored nor forwarded.

    :ivar drop: the reason; ``TEXTS`` has the text for the sender.
    """

    def __init__(self, drop: Drop) -> None:
        super().__init__(TEXTS[drop])
        self.drop = drop


class Rules:
    """Decisions of one relay about messages.

    :param domains: names under which twins list this relay. If there is none, every session that is not connected here
        is taken to be at another relay.
    :param limiter: rate limit of twins, or None.
    :ivar drops: number of drops by reason.
    :ivar windows: all counters of the messages and bytes that twins send, through this relay or through others.
    """

    def __init__(self, domains: Iterable[str] = (), limiter: FixedWindow | None = None) -> None:
        self.domains = frozenset(domains)
        self.limiter = limiter
        self.windows = [limiter] if limiter is not None else []
        self.drops: Counter[Drop] = Counter()

    def admit(self, session: Session, header: Header, size: int, now: float) -> bool:
        """Apply the rules that do not depend on the destination; return True for a ping.

        :raises MessageRefused: the message is refused.
        """
        if self.limiter is not None and not self.limiter.measure(session.twin, size, now, is_answer=header.is_answer):
            raise MessageRefused(Drop.RATE_LIMITED)
        # The relay does not verify signatures of its own twins; the token has proved that the session belongs to its
        # twin.
        if header.source != session:
            raise MessageRefused(Drop.WRONG_SOURCE)
        if header.kind == "ping":
            return True
        if not header.destination.twin:
            raise MessageRefused(Drop.NO_DESTINATION)
        self.check_message(header, now)
        return False

    def grant_answer(self, header: Header, now: float) -> None:
        """Let the destination of a request send one answer that is not charged to its rate limit.  The destination must
        be known to the registry."""
        if header.kind == "request":
            for window in self.windows:
                window.ask(header.destination.twin, now)

    def charge(self, twin: int, messages: int, now: float) -> None:
        """Count something else that ``twin`` sent, such as small fragments, as this number of messages, because it
        costs as much work."""
        if self.limiter is not None:
            self.limiter.charge(twin, messages, now)

    def check_message(self, header: Header, now: float) -> None:
        """Check the conditions for every message, from a session or from another relay.

        :raises MessageRefused: the destination session is malformed, the message has expired, or its timestamp is too
            far ahead.
        """
        if len(header.destination.sid or "") > MAX_SID:
            raise MessageRefused(Drop.BAD_REQUEST)
        if header.is_over(now):
            raise MessageRefused(Drop.EXPIRED)
        if header.timestamp > now + MAX_SKEW:
            raise MessageRefused(Drop.BAD_TIMES)

    def route(self, header: Header, twin: Twin | None) -> Decision:
        """Decide about a message for a session that is not connected here.

        :param twin: the twin of the destination; None when the registry has none.
        """
        if twin is None:
            return Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION)
        relays = twin.relays - {""}
        if not relays:
            return Decision(Action.REFUSE, drop=Drop.NO_RELAY)
        others = relays - self.domains
        # None of the twin's relays is this one, so its sessions never connect here.
        if len(others) == len(relays):
            return Decision(Action.FORWARD, others)
        if header.fail_fast:
            # The session may be connected to another relay of its twin.
            return Decision(Action.PROBE, others) if others else Decision(Action.REFUSE, drop=Drop.OFFLINE)
        return Decision(Action.QUEUE, others)

    def route_inbound(self, header: Header, twin: Twin | None) -> Decision:
        """Decide about a message that another relay sent here; it is never forwarded a second time.

        A QUEUE decision lists the relays to which the message may be offered.
        """
        if twin is None:
            return Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION)
        # The message is refused and not forwarded: the other relay may have an outdated entry, and forwarding for it
        # could send a message round in a circle.
        if self.domains and not twin.relays & self.domains:
            return Decision(Action.REFUSE, drop=Drop.NO_RELAY)
        if header.fail_fast:
            return Decision(Action.REFUSE, drop=Drop.OFFLINE)
        return Decision(Action.QUEUE, twin.relays - self.domains - {""} if self.domains else frozenset())
