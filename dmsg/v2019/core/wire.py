"""Frames: ``type(1) || transport id(2) || payload size(2) || payload``, big endian.

Frames are a byte stream inside records and are not aligned with them: several
frames in a record and a frame over several records are both legal.  The loops
that read them are in :mod:`dmsg.v2019.core.relay` and
:mod:`dmsg.v2019.core.table`, for speed; this module has what they share.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from dmsg.errors import KeyFormatError, fit_close_reason
from dmsg.keys import PUBKEY_SIZE, PubKey
from dmsg.noise.records import MAX_PLAINTEXT

# --- specification constants ------------------------------------------------

HEADER_SIZE = 5
SEQUENCE_SIZE = 2
MAX_FRAME_PAYLOAD = MAX_PLAINTEXT - HEADER_SIZE
"""65510 bytes: the largest payload whose frame fits into one record."""
MAX_FWD_DATA = MAX_FRAME_PAYLOAD - SEQUENCE_SIZE
"""65508 bytes of user data in one FWD."""
MAX_FRAME = HEADER_SIZE + 65535
"""Bytes of the longest frame that the size field can announce."""
HANDSHAKE_PAYLOAD_SIZE = 2 * PUBKEY_SIZE
"""66 bytes: REQUEST and ACCEPT."""
ID_COUNT = 0x10000
IDS_PER_SIDE = ID_COUNT // 2
MAX_PING = 64
"""Bytes of a PING."""
PING_NAME = 8
"""Bytes by chance at the start of a PING of ours; ``INSTANCE_SIZE`` bytes that name the program follow."""
INSTANCE_SIZE = 8
MAX_NOTICE = 1 + 64
"""Bytes of a NOTICE."""
SAME_KEY = 1
"""What a NOTICE says: another program is connected with this key; the text is its address, as the server sees it."""
MAX_HANDSHAKE_PAYLOAD = 66 + 1024
"""Bytes of a REQUEST, with the KK message of a secure transport."""
MAX_CLOSE = 64
"""Bytes of a CLOSE that a server passes on; of a longer one only the reason."""
MIN_SECURE_REQUEST = 66 + 33 + 128 + 16
"""Bytes of the shortest REQUEST with a KK message: a key, a hello, a tag."""
MAX_HINTS = 16
"""Servers named in a DRAIN."""
RELAY_FEATURE = "relay1"
"""What the version of an entry says of a server that carries secure transports and knows PING."""
RECEIPT_FEATURE = "receipt1"
"""What the version of an entry says of a server that takes RECEIPT."""
SECURE_OVERHEAD = SEQUENCE_SIZE + 16
"""Bytes of a FWD's payload on a secure transport besides user data: the sequence and the tag."""
UNREAD_LIMIT = 65535
"""Bytes of unread data beyond which a receiver withholds its ACKs (2019 reference)."""

# --- tuning constants -------------------------------------------------------

WINDOW_BYTES = 512 * 1024
"""User bytes of one transport that a sender keeps unacknowledged."""
WINDOW_FRAMES = 8192
"""Frames of one transport that a sender keeps unacknowledged; far below 2**15,
so that a 16-bit sequence is never in use twice."""


class FrameType(IntEnum):
    """Frame types with the layout of their payloads."""

    OK = 0x0  # empty; the server's first frame, id 0 (not in the 2019 document)
    REQUEST = 0x1  # initiator pk(33) + responder pk(33)
    ACCEPT = 0x2  # initiator pk(33) + responder pk(33); a secure transport's have a KK message after it
    CLOSE = 0x3  # reason(1); a secure transport's has encrypt(reason(1)) after it
    # those that follow pass only between clients and servers that know of them (docs/protocol/frames.md)
    PING = 0x4  # anything up to 64 bytes; client to server, id 0
    PONG = 0x5  # what was in the PING
    DRAIN = 0x6  # seconds(2) + pk(33) of other servers; server to client, id 0
    RECEIPT = 0x7  # what was delivered, signed (telemetry.receipts); client to server, id 0
    NOTICE = 0x8  # what(1) + text; server to client, id 0, to those whose PING names an instance
    FWD = 0xA  # seq(2) + data; encrypted on a secure transport
    ACK = 0xB  # seq(2); encrypted seq(2) + hash(4) [+ window(4)] on a secure transport


OK, REQUEST, ACCEPT, CLOSE, PING, PONG, DRAIN, RECEIPT, NOTICE, FWD, ACK = (int(frame_type) for frame_type in FrameType)

unpack_header = struct.Struct(">BHH").unpack_from
"""(type, id, payload size) at an offset."""
pack_header = struct.Struct(">BHH").pack
pack_header_into = struct.Struct(">BHH").pack_into
pack_id_into = struct.Struct(">H").pack_into
_pack_close = struct.Struct(">BHHB").pack
_pack_ack = struct.Struct(">BHHH").pack
_pack_fwd = struct.Struct(">BHHH").pack

OK_FRAME = pack_header(OK, 0, 0)


def encode_frame(frame_type: int, transport_id: int, payload: bytes = b"") -> bytes:
    """Frame of any type."""
    return pack_header(frame_type, transport_id, len(payload)) + payload


def encode_close(transport_id: int, reason: int) -> bytes:
    """Return a CLOSE with its one byte of reason."""
    return _pack_close(CLOSE, transport_id, 1, fit_close_reason(reason))


def encode_ack(transport_id: int, sequence: int) -> bytes:
    """ACK of one sequence."""
    return _pack_ack(ACK, transport_id, SEQUENCE_SIZE, sequence)


def encode_fwd_header(transport_id: int, sequence: int, size: int) -> bytes:
    """The 7 bytes before ``size`` bytes of user data."""
    return _pack_fwd(FWD, transport_id, SEQUENCE_SIZE + size, sequence)


def encode_drain(seconds: int, servers: Sequence[PubKey]) -> bytes:
    """DRAIN: the server leaves in so many seconds, these are others."""
    return encode_frame(DRAIN, 0, seconds.to_bytes(2, "big") + b"".join(servers[:MAX_HINTS]))


def parse_drain(payload: bytes) -> tuple[int, list[PubKey]]:
    """Seconds and servers of a DRAIN.

    :raises KeyFormatError: malformed.
    """
    keys = payload[2:]
    if len(payload) < 2 or len(keys) % PUBKEY_SIZE or len(keys) > MAX_HINTS * PUBKEY_SIZE:
        raise KeyFormatError(f"{len(payload)} bytes")
    servers = [PubKey(keys[start : start + PUBKEY_SIZE]) for start in range(0, len(keys), PUBKEY_SIZE)]
    return int.from_bytes(payload[:2], "big"), servers


def close_reason(payload: bytes) -> int:
    """The reason in a CLOSE of any length; 0 where there is none."""
    return payload[0] if payload else 0


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as a value, for tools and tests; the hot loops make none."""

    type: int
    id: int
    payload: bytes

    def encode(self) -> bytes:
        """The bytes on the wire."""
        return encode_frame(self.type, self.id, self.payload)


class FrameBuffer:
    """Frames from a byte stream in pieces of any size, for tools and tests."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Append bytes and take out the whole frames."""
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
