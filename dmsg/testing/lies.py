"""Lies of a server: functions that each replace one relayed frame by other frames, or drop it.

There are lies that change, drop, repeat or reorder frames, that invent frames or replay old ones, and that send frames
to wrong clients. The server does not know the keys of its clients, so it cannot create an authentic encrypted frame.
"""

from __future__ import annotations

from random import Random

from dmsg.errors import CloseReason
from dmsg.telemetry.receipts import RECEIPT_SIZE
from dmsg.testing.liar import DATA, TRANSPORT, LyingPort, Teller
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    DRAIN,
    FWD,
    ID_COUNT,
    MAX_FRAME_PAYLOAD,
    NOTICE,
    OK,
    PONG,
    RECEIPT,
    REQUEST,
    SAME_KEY,
    Frame,
)

MAX_AFFECTED_FRAMES = 20
"""Maximum number of frames that a lie about several frames affects."""
DELAYS = (0.05, 1.0, 6.0, 20.0)
"""Seconds for which a liar delays frames."""

_EVERY = TRANSPORT | {PONG, DRAIN, NOTICE}


# --- lies about one frame ---


def _cut(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return []


def _repeat(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [frame] * random.choice((2, 3))


def _reorder(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    port.postponed.append(frame)
    return []


def _repeat_late(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    port.postponed.append(frame)
    return [frame]


def _flip(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    payload = bytearray(frame.payload)
    if payload:
        payload[random.randrange(len(payload))] ^= 1 << random.randrange(8)
    return [Frame(frame.type, frame.id, bytes(payload))]


def _truncate(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [Frame(frame.type, frame.id, frame.payload[: random.randrange(len(frame.payload) + 1)])]


def _lengthen(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    more = random.randbytes(random.choice((1, 4, 16, 33)))
    return [Frame(frame.type, frame.id, (frame.payload + more)[:MAX_FRAME_PAYLOAD])]


def _empty(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [Frame(frame.type, frame.id, b"")]


def _retype(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    others = [one for one in (OK, REQUEST, ACCEPT, CLOSE, FWD, ACK, 0x9, 0xF) if one != frame.type]
    return [Frame(random.choice(others), frame.id, frame.payload)]


def _other_id(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [Frame(frame.type, port.some_id(frame, random), frame.payload)]


def _no_id(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [Frame(frame.type, random.randrange(ID_COUNT), frame.payload)]


def _other_client(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Send a frame to another client, under an id of one of that client's transports."""
    other = port.pick_other_port(random)
    if other is None:
        return [frame]
    other.put([Frame(frame.type, other.some_id(frame, random), frame.payload)])
    return random.choice(([], [frame]))


# --- lies about several frames ---


def _cross(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Exchange the ids of two transports in this frame and in the next few data frames of both."""
    other = port.some_id(frame, random)
    number = random.randint(1, MAX_AFFECTED_FRAMES)
    port.swapped[frame.id], port.swapped[other] = (other, number), (frame.id, number)
    return [Frame(frame.type, other, frame.payload)]


def _hold(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    port.hold(frame.id, random.choice(DELAYS))
    port.held[frame.id].append(frame)
    return []


def _swallow(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    port.to_drop[frame.type, frame.id] = random.randint(1, MAX_AFFECTED_FRAMES)
    return []


def _silence(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Drop all further data and ACKs of a transport."""
    port.to_drop[FWD, frame.id] = port.to_drop[ACK, frame.id] = 1_000_000
    return []


# --- forged frames ---


def _forge_close(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    reason = bytes((random.choice((*CloseReason, 99)) & 0xFF,))
    sealed = random.choice((b"", random.randbytes(17), random.randbytes(5)))
    closing = Frame(CLOSE, random.choice((frame.id, port.some_id(frame, random))), reason + sealed)
    return random.choice(([closing], [frame, closing], [closing, frame], [frame, closing, closing]))


def _forge_drain(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    keys = random.choice((b"", bytes(port.peer.key), b"".join(bytes(one.key) for one in port.liar.peers)))
    seconds = random.choice((0, 5, 600, 65535))
    return [frame, Frame(DRAIN, 0, seconds.to_bytes(2, "big") + keys[: 16 * 33])]


def _forge_notice(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [frame, Frame(NOTICE, 0, bytes((random.choice((SAME_KEY, 2)),)) + random.randbytes(20))]


def _forge_receipt(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [frame, Frame(RECEIPT, random.choice((0, frame.id)), random.randbytes(RECEIPT_SIZE))]


def _forge_request(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Send a forged REQUEST of another client after the given frame. The REQUEST is plain, or has an invalid handshake
    message."""
    other = port.pick_other_port(random)
    asking = bytes(port.peer.key if other is None else other.peer.key) + bytes(port.peer.key)
    return [frame, Frame(REQUEST, port.unused_id(random), asking + random.choice((b"", random.randbytes(177))))]


def _forge_accept(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return [Frame(ACCEPT, frame.id, frame.payload[:66] + random.randbytes(max(0, len(frame.payload) - 66)))]


def _forge_data(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    forged = Frame(random.choice((FWD, ACK)), frame.id, random.randbytes(random.choice((1, 2, 8, 18, 22, 26, 100))))
    return random.choice(([forged, frame], [frame, forged]))


def _malformed(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Send a malformed frame after the given frame. The client has to end the connection because of it."""
    return [frame, random.choice((Frame(DRAIN, 0, b"malformed"), Frame(REQUEST, frame.id, bytes(66))))]


# --- replays ---


def _replay(frame_type: int) -> Teller:
    def replay(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
        payload = port.remembered(frame_type, random)
        if payload is None:
            return [frame]
        ids = (frame.id, port.some_id(frame, random), port.unused_id(random))
        transport_id = ids[2] if frame_type == REQUEST else random.choice(ids)
        return random.choice(
            ([frame, Frame(frame_type, transport_id, payload)], [Frame(frame_type, frame.id, payload)])
        )

    return replay


# --- lies about who is connected ---


def _no_such_peer(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Report to the initiator that the responder is not connected, and send no REQUEST to the responder."""
    route = port.peer.routes.get(frame.id)
    if route is not None:
        reason = random.choice((CloseReason.NO_SUCH_PEER, CloseReason.REFUSED, CloseReason.UNSPECIFIED))
        port.liar.port_of(route.peer).put([Frame(CLOSE, route.to_id, bytes((reason,)))])
    return []


def _wrong_client(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Forward a REQUEST to a client other than the responder that it names."""
    other = port.pick_other_port(random)
    if other is None:
        return [frame]
    other.put([Frame(REQUEST, other.unused_id(random), frame.payload)])
    return []


def _answer_for(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    """Accept a REQUEST in the name of its responder."""
    route = port.peer.routes.get(frame.id)
    if route is not None:
        answer = frame.payload[:66] + random.randbytes(max(0, len(frame.payload) - 66))
        port.liar.port_of(route.peer).put([Frame(ACCEPT, route.to_id, answer)])
    return [frame]


def _no_pong(port: LyingPort, frame: Frame, random: Random) -> list[Frame]:
    return random.choice(([], [Frame(PONG, 0, random.randbytes(16))], [frame, frame]))


KINDS: dict[str, tuple[frozenset[int], Teller]] = {
    "cut": (TRANSPORT, _cut),
    "repeat": (TRANSPORT, _repeat),
    "repeat late": (TRANSPORT, _repeat_late),
    "reorder": (TRANSPORT, _reorder),
    "flip": (TRANSPORT, _flip),
    "truncate": (TRANSPORT, _truncate),
    "lengthen": (TRANSPORT, _lengthen),
    "empty": (TRANSPORT, _empty),
    "retype": (TRANSPORT, _retype),
    "other id": (TRANSPORT, _other_id),
    "no id": (TRANSPORT, _no_id),
    "other client": (TRANSPORT, _other_client),
    "cross streams": (DATA, _cross),
    "hold": (TRANSPORT, _hold),
    "swallow ACKs": (frozenset({ACK}), _swallow),
    "swallow data": (frozenset({FWD}), _swallow),
    "silence": (DATA, _silence),
    "forge CLOSE": (TRANSPORT, _forge_close),
    "forge DRAIN": (_EVERY, _forge_drain),
    "forge NOTICE": (_EVERY, _forge_notice),
    "forge receipt": (_EVERY, _forge_receipt),
    "forge REQUEST": (_EVERY, _forge_request),
    "forge ACCEPT": (frozenset({ACCEPT}), _forge_accept),
    "forge data": (DATA, _forge_data),
    "malformed": (_EVERY, _malformed),
    "replay REQUEST": (_EVERY, _replay(REQUEST)),
    "replay ACCEPT": (TRANSPORT, _replay(ACCEPT)),
    "replay data": (DATA, _replay(FWD)),
    "replay ACK": (DATA, _replay(ACK)),
    "replay CLOSE": (TRANSPORT, _replay(CLOSE)),
    "no such peer": (frozenset({REQUEST}), _no_such_peer),
    "wrong client": (frozenset({REQUEST}), _wrong_client),
    "answer for another": (frozenset({REQUEST}), _answer_for),
    "no PONG": (frozenset({PONG}), _no_pong),
}
"""Kinds of lies by name: the types of frames to which a lie applies, and its function."""
