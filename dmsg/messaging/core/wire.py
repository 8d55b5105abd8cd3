"""Frames of the Messaging System, in both layouts, and their limits.  No I/O.

Numbers are big endian.  The body of each frame begins with the channel's id, one byte::

    seed     type(1) size(2)             body      size = length of the body
    skywire  size(2) type(1)             body      size = 1 + length of the body

    0 OpenChannel    id(1) remote(33) noise message 1(49)
    1 ChannelOpened  id(1) noise message 2(49)
                     skywire, with two ids: id(1) own id(1) noise message 2(49)
    2 CloseChannel   id(1)
    3 ChannelClosed  id(1)
    4 Send           id(1) size(2) ciphertext(size), size with the 16 bytes of the tag

Sources: the seed document, section Messaging Frames; the Go code of March 2019 for the ``skywire`` layout, the byte
order, and the contents of a Send.

With *two ids* (in the Go code from 2019-03-13 on), a channel can have a different id in each direction of a link. The
id of a direction is chosen by the side that receives the frames. The answer to an OpenChannel has the id of the
OpenChannel, and after it the id that the other side must use from then on.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

from dmsg.base.cipher_names import TAG_SIZE
from dmsg.errors import DropReason, KeyFormatError, LocalProtocolError, RemoteProtocolError
from dmsg.keys import PUBKEY_SIZE, PubKey

OPEN_CHANNEL, CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, SEND = range(5)
HEADER_SIZE = 3
ID_OFFSET = HEADER_SIZE
"""Offset of the channel's id in a frame of either layout."""
ID_COUNT = 256
"""Number of channel ids on one link."""
NOISE_MESSAGE_SIZE = PUBKEY_SIZE + TAG_SIZE
"""Size of a Noise message in bytes: a key and a tag."""
OPEN_BODY_SIZE = 1 + PUBKEY_SIZE + NOISE_MESSAGE_SIZE
OPENED_BODY_SIZE = 1 + NOISE_MESSAGE_SIZE
OPENED_TWO_SIZE = OPENED_BODY_SIZE + 1
"""Size in bytes of the body of a ChannelOpened with two ids."""
SEND_OVERHEAD = 3
"""Number of bytes of a Send's body before its ciphertext: the id and the size."""
MIN_SEND_BODY = SEND_OVERHEAD

_seed = struct.Struct(">BH")
_skywire = struct.Struct(">HB")
_send_head = struct.Struct(">BH")
unpack_send_head = _send_head.unpack_from


class Profile(Enum):
    """Frame layout and rules that both ends of a link use. No frame names the profile.

    ``SEED`` follows the seed document.  ``SKYWIRE`` follows the Go code of March 2019. That code has a different
    header, writes signatures that are not computed yet as zeros, and rekeys before each tenth message of a channel.
    """

    SEED = "seed"
    SKYWIRE = "skywire"

    @property
    def max_body(self) -> int:
        """Maximum size in bytes of a frame's body. In ``SEED`` it is the limit of the size field,
        in ``SKYWIRE`` that of the Go code."""
        return 65535 if self is Profile.SEED else 65517

    @property
    def max_plaintext(self) -> int:
        """Maximum size in bytes of one message before encryption: 65516 in ``SEED``, 65498 in ``SKYWIRE``."""
        return self.max_body - SEND_OVERHEAD - TAG_SIZE

    @property
    def feature(self) -> str:
        """Mark in the ``version`` of an entry. It says that the client or server uses this profile."""
        return f"messaging-{self.value}"


class Frame(NamedTuple):
    """Parsed frame.

    :ivar body: body as it was received; it begins with the channel's id.
    """

    type: int
    body: bytes


def encode_header(profile: Profile, frame_type: int, size: int) -> bytes:
    """Return the header of a frame, 3 bytes.

    :param size: size of the body in bytes.
    :raises LocalProtocolError: the body is larger than the profile allows.
    """
    if size > profile.max_body:
        raise LocalProtocolError(f"the body has {size} bytes, the limit is {profile.max_body}")
    if profile is Profile.SEED:
        return _seed.pack(frame_type, size)
    return _skywire.pack(size + 1, frame_type)


def encode_frame(profile: Profile, frame_type: int, body: bytes) -> bytes:
    """Return a complete frame.

    :raises LocalProtocolError: the body is larger than the profile allows.
    """
    return encode_header(profile, frame_type, len(body)) + body


def encode_open(profile: Profile, channel: int, remote: PubKey, message: bytes) -> bytes:
    """Return an OpenChannel frame.

    :param message: Noise message 1, 49 bytes.
    """
    return encode_frame(profile, OPEN_CHANNEL, bytes((channel,)) + remote + message)


def encode_opened(profile: Profile, channel: int, message: bytes, own: int | None = None) -> bytes:
    """Return a ChannelOpened frame.

    :param message: Noise message 2, 49 bytes.
    :param own: with two ids, the id that the receiver must use for the channel from now on; None with one id.
    """
    ids = bytes((channel,)) if own is None else bytes((channel, own))
    return encode_frame(profile, CHANNEL_OPENED, ids + message)


def decode_opened(profile: Profile, body: bytes) -> tuple[int | None, bytes] | None:
    """Return a pair from a ChannelOpened: its second id (None if it has only one id), and Noise message 2.

    :returns: the pair; None if the length of the body is wrong.
    """
    if len(body) == OPENED_BODY_SIZE:
        return None, body[1:]
    if len(body) == OPENED_TWO_SIZE and profile is Profile.SKYWIRE:
        return body[1], body[2:]
    return None


def encode_close(profile: Profile, channel: int) -> bytes:
    """Return a CloseChannel frame."""
    return encode_frame(profile, CLOSE_CHANNEL, bytes((channel,)))


def encode_closed(profile: Profile, channel: int) -> bytes:
    """Return a ChannelClosed frame."""
    return encode_frame(profile, CHANNEL_CLOSED, bytes((channel,)))


def send_head(profile: Profile, channel: int, plaintext: int) -> bytes:
    """Return the 6 bytes before the ciphertext of a Send frame.

    :param plaintext: size of the message before encryption, in bytes.
    :raises LocalProtocolError: the message is larger than the profile allows; the caller must not encrypt it.
    """
    # The size is checked before the encryption. A message that was encrypted and not sent would use up a nonce, and the
    # other end could not decrypt any later message.
    size = plaintext + TAG_SIZE
    return encode_header(profile, SEND, size + SEND_OVERHEAD) + _send_head.pack(channel, size)


def decode_open(body: bytes) -> tuple[PubKey, bytes]:
    """Return the remote key and Noise message 1 of an OpenChannel.

    :raises KeyFormatError: the length of the body is wrong, or the key is invalid.
    """
    if len(body) != OPEN_BODY_SIZE:
        raise KeyFormatError(f"OpenChannel has {len(body)} bytes instead of {OPEN_BODY_SIZE}")
    return PubKey(body[1 : 1 + PUBKEY_SIZE]), body[1 + PUBKEY_SIZE :]


def read_header(profile: Profile, buffer: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """Return the type and the body size of the frame at ``position``.

    :raises RemoteProtocolError: the size field is invalid or exceeds the profile's limit.
    """
    if profile is Profile.SEED:
        frame_type, size = _seed.unpack_from(buffer, position)
    else:
        size, frame_type = _skywire.unpack_from(buffer, position)
        if not 0 < size <= profile.max_body + 1:
            raise RemoteProtocolError(
                DropReason.BAD_FRAME, f"a frame gives its size as {size} bytes, the limit is {profile.max_body + 1}"
            )
        size -= 1
    # An OpenChannel has a fixed size. If the size field is larger, the peer probably uses the other layout. The link
    # ends now, because the bytes that the field announces would never arrive.
    if frame_type == OPEN_CHANNEL and size > OPEN_BODY_SIZE:
        raise wrong_profile(f"an OpenChannel frame has {size} bytes")
    return frame_type, size


def wrong_profile(problem: str) -> RemoteProtocolError:
    """Return the error for a peer that seems to use the other profile."""
    return RemoteProtocolError(DropReason.WRONG_PROFILE, f"{problem}: the peer seems to use the other --profile")


_LIKELY = {
    OPEN_CHANNEL: (OPEN_BODY_SIZE,),
    CHANNEL_OPENED: (OPENED_BODY_SIZE, OPENED_TWO_SIZE),
    CLOSE_CHANNEL: (1,),
    CHANNEL_CLOSED: (1,),
}


def _is_likely(frame_type: int, size: int) -> bool:
    """Whether the first frame of a link may have this type and size: it must be a control frame of the right size."""
    return size in _LIKELY.get(frame_type, ())


def check_first(profile: Profile, buffer: bytes | bytearray | memoryview) -> None:
    """Check by the first header of a link that the peer does not use the other profile.

    :raises RemoteProtocolError: the header is valid only in the other profile.
    """
    # The handshake does not name the profile, so a wrong setting can be detected only here. The link ends only if the
    # header is valid in the other profile and invalid in this one, because a false alarm would disconnect a correct
    # peer.
    seed_type, seed_size = _seed.unpack_from(buffer)
    size, skywire_type = _skywire.unpack_from(buffer)
    in_seed, in_skywire = _is_likely(seed_type, seed_size), _is_likely(skywire_type, size - 1)
    if in_skywire and not in_seed and profile is Profile.SEED and not (seed_type == SEND and seed_size):
        raise wrong_profile("the first frame is invalid")
    if in_seed and not in_skywire and profile is Profile.SKYWIRE and not (skywire_type == SEND and size):
        raise wrong_profile("the first frame is invalid")


class FrameBuffer:
    """Parser of frames from a byte stream in pieces of any size. It is slow but simple."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Append bytes, and return the frames that are complete now.

        :raises RemoteProtocolError: a header is invalid, see :func:`read_header`.
        """
        self._data += data
        buffer = self._data
        frames = []
        position = 0
        while len(buffer) - position >= HEADER_SIZE:
            frame_type, size = read_header(self._profile, buffer, position)
            following = position + HEADER_SIZE + size
            if following > len(buffer):
                break
            frames.append(Frame(frame_type, bytes(buffer[position + HEADER_SIZE : following])))
            position = following
        del buffer[:position]
        return frames
