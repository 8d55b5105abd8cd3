"""States of the ends of streams, and roles of the hosts for each end, which the coverage of a walk counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dmsg.streams.carrier import ClientStream
from dmsg.testing.promise import Talker
from dmsg.testing.walk_coverage import NO_PARTY

STATES = ("opening", "idle", "in flight", "paused", "moving", "suspended", "closing")
"""States of a stream's end, in the order of the table's columns."""
INITIATOR, RESPONDER, OTHER_CLIENT = "its initiator", "its responder", "another client"
OWN_SERVER, OTHER_SERVER, DISCOVERY = "its server", "another server", "discovery"
"""Parties: roles of a host for an end of a stream. ``OWN_SERVER`` carries the stream at the moment."""
_SERVERS = (OWN_SERVER, OTHER_SERVER)
_CLIENTS = (INITIATOR, RESPONDER, OTHER_CLIENT)
_PARTIES: dict[str, Sequence[str]] = {
    **dict.fromkeys(("delay", "loss", "reorder", "bandwidth", "partition", "reset"), (*_CLIENTS, *_SERVERS)),
    **dict.fromkeys(("kill", "leave", "pause", "poison"), _SERVERS),
    "restart": (OTHER_SERVER,),
    "wall clock": (*_CLIENTS, *_SERVERS, DISCOVERY),
    **dict.fromkeys(("kill client", "half-open"), _CLIENTS),
    "kill discovery": (DISCOVERY,),
    "lost last frame": (INITIATOR,),
}


class StreamPlace(NamedTuple):
    """State of an end of a stream, and names of the stream's hosts, at the time of a fault or lie.

    :ivar state: one of :data:`STATES`.
    :ivar server: name of the server that carries the stream; empty if none does.
    """

    state: str
    initiator: str
    responder: str
    server: str

    def party_of(self, host: str) -> str:
        """Return the role of a host for this stream."""
        if host in (self.initiator, self.responder):
            return INITIATOR if host == self.initiator else RESPONDER
        if host.startswith(("server", "harbour")):
            return OWN_SERVER if host == self.server else OTHER_SERVER
        return DISCOVERY if host.startswith("discovery") else OTHER_CLIENT


def parties_of(kind: str) -> Sequence[str]:
    """Return the parties to which a fault or lie can happen."""
    if kind.startswith("lie: "):
        return _SERVERS
    return _PARTIES.get(kind, (NO_PARTY,))


def obstacle(kind: str, party: str, state: str) -> str:
    """Return why a fault or lie can never happen to a host in the role ``party`` for an end of a stream in this state,
    or an empty string if it can."""
    if party == OWN_SERVER and state in ("opening", "suspended"):
        return "a stream that opens or is suspended has no server"
    return ""


def state_of(talker: Talker) -> str | None:
    """Return the state of one end of a stream, one of :data:`STATES`; None if the end has no stream any more."""
    stream = talker.transport
    if stream is None:
        return "opening"
    if not isinstance(stream, ClientStream) or stream.has_ended or stream.end is None:
        return None
    end = stream.end
    states = {
        "closing": stream.disconnecting,
        "moving": end.unproven is not None or end.answers,
        "suspended": end.transport is None,
        "paused": stream._paused,  # noqa: SLF001  # Only the stream itself knows whether its application reads.
        "in flight": end.in_flight,
    }
    return next((state for state, present in states.items() if present), "idle")
