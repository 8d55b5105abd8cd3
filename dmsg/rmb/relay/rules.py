"""Rules by which a relay decides where a message goes. No I/O.

The inputs are the header of a message, the session or relay that sent it here, the receiver's registry entry, and the
time. The output is a :class:`Decision`, or a :exc:`MessageRefused` with the reason for the sender. The switch executes
the decision (:mod:`dmsg.rmb.relay.switch`).

A session may send only messages whose source names that session.  A message from another relay is never forwarded a
second time, so messages cannot circulate. Each refusal has one reason, which the caller counts.

The order of the rules and the error texts are those of the reference implementation (docs/rmb/protocol.md), because
clients compare the texts.
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
    """Action of a relay on a message whose receiving session is not connected to this relay."""

    QUEUE = auto()
    """Store the message, and offer it to the twin's other relays, if there are any. A relay accepts an offered message
    only if the session is connected to it."""
    FORWARD = auto()
    """Send the message to one of the twin's relays."""
    PROBE = auto()
    """Send the message to one of the twin's relays if the session is connected there. Otherwise refuse it."""
    REFUSE = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of :meth:`Rules.route`.

    :ivar relays: other relays to which to send or offer the message, in no particular order.
    """

    action: Action
    relays: frozenset[str] = frozenset()
    drop: Drop | None = None


class MessageRefused(Exception):
    """Error: the message is not delivered, stored or forwarded.

    :ivar drop: reason. ``TEXTS`` has the text for the sender.
    """

    def __init__(self, drop: Drop) -> None:
        super().__init__(TEXTS[drop])
        self.drop = drop


class Rules:
    """Rules of one relay for messages.

    :param domains: names by which the registry entries of twins list this relay. If there are none, every session that
        is not connected here is assumed to use another relay.
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
        """Apply the rules that do not depend on the destination. Return True if the message is a ping.

        :raises MessageRefused: the message is refused.
        """
        if self.limiter is not None and not self.limiter.measure(session.twin, size, now, is_answer=header.is_answer):
            raise MessageRefused(Drop.RATE_LIMITED)
        # The relay does not verify the signatures of its own twins. A session has proved by its token that it belongs
        # to its twin.
        if header.source != session:
            raise MessageRefused(Drop.WRONG_SOURCE)
        if header.kind == "ping":
            return True
        if not header.destination.twin:
            raise MessageRefused(Drop.NO_DESTINATION)
        self.check_message(header, now)
        return False

    def grant_answer(self, header: Header, now: float) -> None:
        """Allow the destination of a request to send one answer that is not charged to its rate limit.

        The destination must exist in the registry.
        """
        if header.kind == "request":
            for window in self.windows:
                window.ask(header.destination.twin, now)

    def charge(self, twin: int, messages: int, now: float) -> None:
        """Charge ``messages`` messages to ``twin`` for other input that costs as much work, such as small fragments."""
        if self.limiter is not None:
            self.limiter.charge(twin, messages, now)

    def check_message(self, header: Header, now: float) -> None:
        """Check the conditions that apply to all messages, from sessions and from other relays.

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
        """Decide what to do with a message that a session has sent to a receiver that is not connected here.

        :param twin: registry entry of the destination; None if the registry has none.
        """
        if twin is None:
            return Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION)
        relays = twin.relays - {""}
        if not relays:
            return Decision(Action.REFUSE, drop=Drop.NO_RELAY)
        others = relays - self.domains
        # This relay is not one of the twin's relays, so the twin's sessions never connect here.
        if len(others) == len(relays):
            return Decision(Action.FORWARD, others)
        if header.fail_fast:
            # The session may be connected to another relay of its twin.
            return Decision(Action.PROBE, others) if others else Decision(Action.REFUSE, drop=Drop.OFFLINE)
        return Decision(Action.QUEUE, others)

    def route_inbound(self, header: Header, twin: Twin | None) -> Decision:
        """Decide what to do with a message that another relay has forwarded. This relay does not forward it again.

        If the action is QUEUE, the decision lists the relays to which the receiver may be connected.
        """
        if twin is None:
            return Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION)
        # The message is not forwarded, because the other relay's entry of the twin may be outdated, and the message
        # could circulate.
        if self.domains and not twin.relays & self.domains:
            return Decision(Action.REFUSE, drop=Drop.NO_RELAY)
        if header.fail_fast:
            return Decision(Action.REFUSE, drop=Drop.OFFLINE)
        return Decision(Action.QUEUE, twin.relays - self.domains - {""} if self.domains else frozenset())
