"""Texts of the errors with which relays refuse messages.  The wording is that of the reference implementation, because
clients compare these texts."""

from __future__ import annotations

from dmsg.rmb.errors import Drop

RATE_LIMITED = "exceeded rate limits, dropping message"
WRONG_SOURCE = "message wrong source"
NO_DESTINATION = "message with missing destination"
UNKNOWN_DESTINATION = "unknown twin destination"
NO_RELAY = "relay info is not set for this twin"
OFFLINE = "destination offline"
EXPIRED = "message has expired"
FUTURE = "message timestamp is in the future"
BAD_SESSION = "message with an invalid destination session"
BUSY = "destination does not read fast enough"
REMOTE = "remote relay rejected permanently: "
NOT_ROUTED = "failed to route message to peer '{peer}': {why}"

TEXTS = {
    Drop.RATE_LIMITED: RATE_LIMITED,
    Drop.WRONG_SOURCE: WRONG_SOURCE,
    Drop.NO_DESTINATION: NO_DESTINATION,
    Drop.UNKNOWN_DESTINATION: UNKNOWN_DESTINATION,
    Drop.NO_RELAY: NO_RELAY,
    Drop.OFFLINE: OFFLINE,
    Drop.EXPIRED: EXPIRED,
    Drop.BAD_TIMES: FUTURE,
    Drop.BAD_REQUEST: BAD_SESSION,
    Drop.BUSY: BUSY,
}
