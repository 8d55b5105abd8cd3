"""Frames: ``type(1) || transport id(2) || payload size(2) || payload``, big endian. No I/O.

Frames form a byte stream inside records, and their boundaries are independent: a record may contain several frames, and
a frame may span several records. For speed, the loops that read frames are in :mod:`dmsg.v2019.core.relay` and
:mod:`dmsg.v2019.core.table`. This module has the constants and functions that both use.

Sources: the seed document of 2019 for REQUEST, ACCEPT, CLOSE, FWD and ACK. ``docs/protocol/frames.md`` defines the
types that this package adds, which are sent only between programs that both know them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from dmsg.errors import KeyFormatError, fit_close_reason
from dmsg.keys import PUBKEY_SIZE, PubKey
from dmsg.noise.records import MAX_PLAINTEXT

# --- constants of the specification -----------------------------------------

HEADER_SIZE = 5
SEQUENCE_SIZE = 2
MAX_FRAME_PAYLOAD = MAX_PLAINTEXT - HEADER_SIZE
"""Maximum bytes of a payload whose frame fits into one record: 65510."""
MAX_FWD_DATA = MAX_FRAME_PAYLOAD - SEQUENCE_SIZE
"""Maximum bytes of user data in one FWD frame: 65508."""
MAX_FRAME = HEADER_SIZE + 65535
"""Maximum bytes of a frame that its size field can express."""
HANDSHAKE_PAYLOAD_SIZE = 2 * PUBKEY_SIZE
"""Size in bytes of the payload of a plain REQUEST or ACCEPT, which is two public keys: 66."""
ID_COUNT = 0x10000
IDS_PER_SIDE = ID_COUNT // 2
MAX_PING = 64
"""Maximum bytes of a PING payload."""
PING_NAME = 8
"""Number of random bytes at the start of the PINGs of this package. ``INSTANCE_SIZE`` bytes that identify the program
follow."""
INSTANCE_SIZE = 8
MAX_NOTICE = 1 + 64
"""Maximum bytes of a NOTICE payload."""
SAME_KEY = 1
"""Code of the NOTICE that another program is connected with the same key. Its text is the other program's address, as
the server sees it."""
MAX_HANDSHAKE_PAYLOAD = 66 + 1024
"""Maximum bytes of a REQUEST or ACCEPT payload that contains the KK message of a secure transport."""
MAX_CLOSE = 64
"""Maximum bytes of a CLOSE payload that a server forwards as a whole. If the payload is longer, the server forwards
only the reason."""
MIN_SECURE_REQUEST = 66 + 33 + 128 + 16
"""Minimum bytes of a REQUEST payload with a KK message: two keys, an ephemeral key, a hello and a tag."""
MAX_HINTS = 16
"""Maximum number of servers named in a DRAIN."""
RELAY_FEATURE = "relay1"
"""Mark in the version of a server's entry: the server carries secure transports and answers PING."""
RECEIPT_FEATURE = "receipt1"
"""Mark in the version of a server's entry: the server accepts RECEIPT."""
SECURE_OVERHEAD = SEQUENCE_SIZE + 16
"""Number of bytes that a FWD payload on a secure transport has besides user data: the sequence and the tag."""
UNREAD_LIMIT = 65535
"""Number of unread bytes above which a receiver withholds its ACKs, as in the 2019 reference."""

# --- constants chosen by this package ---------------------------------------

WINDOW_BYTES = 512 * 1024
"""Maximum unacknowledged bytes of user data of a sender on one plain transport."""
WINDOW_FRAMES = 8192
"""Maximum number of unacknowledged frames of a sender on one plain transport. It is far below 2**15, so that no 16-bit
sequence is in use twice."""


class FrameType(IntEnum):
    """Frame types, with the layouts of their payloads."""

    OK = 0x0
    """Accepts the connection. Id 0, no payload. It is the first frame of a server. The seed document, the text that
    described the protocol before there was code, does not have it."""
    REQUEST = 0x1
    """Requests a transport. Payload: ``initiator pk(33) || responder pk(33)``, then KK message 1 if it is secure."""
    ACCEPT = 0x2
    """Accepts a transport. Payload: ``initiator pk(33) || responder pk(33)``, then KK message 2 if it is secure."""
    CLOSE = 0x3
    """Ends a transport. Payload: ``reason(1)``, then the encrypted reason on a secure transport."""

    # The types from PING to NOTICE are sent only between clients and servers that both know them
    # (docs/protocol/frames.md).
    PING = 0x4
    """Asks the other end for a PONG. Id 0. Payload: up to 64 bytes of any kind."""
    PONG = 0x5
    """Answers a PING. Id 0. Payload: the payload of the PING."""
    DRAIN = 0x6
    """Announces to a client that the server stops. Id 0. Payload: ``seconds(2)``, then ``pk(33)`` of other servers."""
    RECEIPT = 0x7
    """Sends the server a signed statement of the bytes that were delivered (:mod:`dmsg.telemetry.receipts`). Id 0."""
    NOTICE = 0x8
    """Tells a client that another program uses its key. Sent only to clients whose PINGs contain an instance: random
    bytes that identify the running program. Id 0. Payload: ``code(1) || text``."""
    FWD = 0xA
    """Carries data. Payload: ``sequence(2) || data``, encrypted on a secure transport."""
    ACK = 0xB
    """Acknowledges data. Payload: ``sequence(2)``. On a secure transport: ``sequence(2) || hash(4)``, and ``window(4)``
    if the receive window has changed, encrypted."""


# The types are also module constants. The loops that read frames would otherwise look up a member of the enumeration
# for each frame.
OK, REQUEST, ACCEPT, CLOSE, PING, PONG, DRAIN, RECEIPT, NOTICE, FWD, ACK = (int(frame_type) for frame_type in FrameType)

unpack_header = struct.Struct(">BHH").unpack_from
"""Function that unpacks (type, id, payload size) of the frame at an offset of a buffer."""
pack_header = struct.Struct(">BHH").pack
pack_header_into = struct.Struct(">BHH").pack_into
pack_id_into = struct.Struct(">H").pack_into
_pack_close = struct.Struct(">BHHB").pack
_pack_ack = struct.Struct(">BHHH").pack
_pack_fwd = struct.Struct(">BHHH").pack

OK_FRAME = pack_header(OK, 0, 0)


def encode_frame(frame_type: int, transport_id: int, payload: bytes = b"") -> bytes:
    """Return a frame of any type."""
    return pack_header(frame_type, transport_id, len(payload)) + payload


def encode_close(transport_id: int, reason: int) -> bytes:
    """Return a CLOSE frame, whose payload is the reason in one byte."""
    return _pack_close(CLOSE, transport_id, 1, fit_close_reason(reason))


def encode_ack(transport_id: int, sequence: int) -> bytes:
    """Return a frame that acknowledges one sequence on a plain transport."""
    return _pack_ack(ACK, transport_id, SEQUENCE_SIZE, sequence)


def encode_fwd_header(transport_id: int, sequence: int, size: int) -> bytes:
    """Return the 7 bytes that precede ``size`` bytes of user data in a plain FWD frame."""
    return _pack_fwd(FWD, transport_id, SEQUENCE_SIZE + size, sequence)


def encode_drain(seconds: int, servers: Sequence[PubKey]) -> bytes:
    """Return a DRAIN frame, which announces that the server stops in ``seconds`` seconds.

    :param servers: other servers, of which the frame names at most ``MAX_HINTS``.
    """
    return encode_frame(DRAIN, 0, seconds.to_bytes(2, "big") + b"".join(servers[:MAX_HINTS]))


def parse_drain(payload: bytes) -> tuple[int, list[PubKey]]:
    """Return the seconds and the servers in a DRAIN payload.

    :raises KeyFormatError: the payload is malformed.
    """
    keys = payload[2:]
    if len(payload) < 2 or len(keys) % PUBKEY_SIZE or len(keys) > MAX_HINTS * PUBKEY_SIZE:
        raise KeyFormatError(f"a DRAIN frame has 2 bytes for a time and then whole keys, not {len(payload)} bytes")
    servers = [PubKey(keys[start : start + PUBKEY_SIZE]) for start in range(0, len(keys), PUBKEY_SIZE)]
    return int.from_bytes(payload[:2], "big"), servers


def close_reason(payload: bytes) -> int:
    """Return the reason in a CLOSE payload of any length; 0 if the payload is empty."""
    # On a secure transport, an encrypted copy of the reason follows, which only the other end can decrypt.
    return payload[0] if payload else 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame as an object, for tools and tests. The fast loops do not use this class."""

    type: int
    id: int
    payload: bytes

    def encode(self) -> bytes:
        """Return the bytes on the wire."""
        return encode_frame(self.type, self.id, self.payload)


class FrameBuffer:
    """Parser of frames in a byte stream that arrives in pieces of any size, for tools and tests."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Append received bytes. Remove and return the frames that are now complete."""
        buffer = self._data
        buffer += data
        frames = []
        position = 0
        while len(buffer) - position >= HEADER_SIZE:
            frame_type, transport_id, size = unpack_header(buffer, position)
            following = position + HEADER_SIZE + size
            if following > len(buffer):
                break
            frames.append(Frame(frame_type, transport_id, bytes(buffer[position + HEADER_SIZE : following])))
            position = following
        del buffer[:position]
        return frames
