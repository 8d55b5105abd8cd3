"""Calls of a random walk of the message bus: the state of each call, and the roles of the hosts for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dmsg.testing.walk_coverage import NO_PARTY

RELAYS = ("relay-1", "relay-2")
TWINS = {"anna": ("relay-1",), "ben": ("relay-2",), "cleo": ("relay-1", "relay-2"), "dan": ("relay-2",)}
"""Twins, and the relays to which each is connected."""
KILL_TWIN = "kill twin"
SENDING, ACCEPTED, HANDLED = "sending", "accepted", "handled"
STATES = (SENDING, ACCEPTED, HANDLED)
"""States of an open call, in the order of the table's columns. A relay has confirmed an ``ACCEPTED`` call, and no
program has handled it. The caller of a ``HANDLED`` call does not have the answer."""
CALLER, RECEIVER, OTHER_TWIN = "its caller", "its receiver", "another twin"
RECEIVER_RELAY, OTHER_RELAY = "a relay of its receiver", "another relay"
"""Parties: roles of a host for a call."""
_TWINS, _RELAYS = (CALLER, RECEIVER, OTHER_TWIN), (RECEIVER_RELAY, OTHER_RELAY)
_PARTIES: dict[str, Sequence[str]] = {
    **dict.fromkeys(("delay", "loss", "reorder", "bandwidth", "partition", "reset"), (*_TWINS, *_RELAYS)),
    **dict.fromkeys(("kill", "restart", "leave", "pause"), _RELAYS),
    **dict.fromkeys((KILL_TWIN, "half-open"), _TWINS),
}


class CallPlace(NamedTuple):
    """State of an open call, and names of its twins, at the time of a fault.

    :ivar state: one of :data:`STATES`.
    """

    state: str
    caller: str
    receiver: str

    def party_of(self, host: str) -> str:
        """Return the role of a host for this call."""
        if host in (self.caller, self.receiver):
            return CALLER if host == self.caller else RECEIVER
        if host in TWINS:
            return OTHER_TWIN
        return RECEIVER_RELAY if host in TWINS[self.receiver] else OTHER_RELAY


def parties_of(kind: str) -> Sequence[str]:
    """Return the parties to which a fault can happen."""
    return _PARTIES.get(kind, (NO_PARTY,))


class Call:
    """Call of a twin.

    :ivar accepted: whether a relay has confirmed the message.
    :ivar handled: number of programs of the receiver that have handled the call.
    :ivar answered: whether the caller has the answer.
    :ivar is_due: whether the caller must get the answer, because neither the caller nor the receiver was killed.
    """

    def __init__(self, caller: str, receiver: str, number: int) -> None:
        self.caller, self.receiver = caller, receiver
        self.key = f"call {number} from {caller} to {receiver}".encode()
        self.accepted = self.answered = False
        self.handled = 0
        self.is_due = True

    @property
    def is_open(self) -> bool:
        """Whether the walk must still wait for this call: for its answer if ``is_due``, otherwise until a program has
        handled the accepted call."""
        return not self.answered if self.is_due else self.accepted and not self.handled

    @property
    def place(self) -> CallPlace:
        """Present state of the call, which must be open, and its twins."""
        state = HANDLED if self.handled else ACCEPTED if self.accepted else SENDING
        return CallPlace(state, self.caller, self.receiver)

    def __str__(self) -> str:
        accepted = "accepted" if self.accepted else "not accepted"
        return f"{self.key.decode()} ({accepted}, handled {self.handled} times)"
