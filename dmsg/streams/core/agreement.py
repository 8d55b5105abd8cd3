"""The KK handshake inside REQUEST and ACCEPT: how two clients agree on a secure transport.

REQUEST is ``initiator pk(33) || responder pk(33) || KK message 1``, ACCEPT the
same two keys and KK message 2 (seed document, TODO list).  What the server
need not know is in the messages' encrypted payloads, :class:`Hello`.
``docs/protocol/secure-transport.md`` is the specification.  No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypedDict

from dmsg.errors import HandshakeError, fit_close_reason
from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey
from dmsg.noise.handshake import TAG_SIZE as _TAG_SIZE, Handshake, HandshakeResult, Pattern

PROTOCOL = b"dmsg secure transport 1"
"""The first part of the prologue; the two public keys are the rest."""
UPGRADE_PROTOCOL = b"dmsg upgraded transport 1"
"""The same where the messages follow a plain REQUEST and ACCEPT, in FWD frames."""
FEATURE = "secure1"
"""What the version of an entry says of a client that speaks this."""
UPGRADE_FEATURE = "upgrade1"
"""What it says of a client that upgrades plain transports, for servers that pass on no others."""
PREFACE_FRAMES = 4
"""FWDs without data by which a responder says that it takes an upgrade; programs do not see them."""
PING_FEATURE = "ping1"
"""What it says of a client that answers probes."""
TOKEN_SIZE = 16
HASH_SIZE = 32
HELLO_SIZE = 128
"""Bytes of a hello, with its padding: the server cannot tell one from another by its length."""
KEYS_SIZE = 2 * PUBKEY_SIZE
"""Bytes of both keys, which stand before the messages."""
MIN_MESSAGE = PUBKEY_SIZE + HELLO_SIZE + _TAG_SIZE
"""177 bytes: a KK message in a REQUEST or ACCEPT."""
MAX_MESSAGE = 1024
"""Bytes of a KK message of a later version, with options that this one ignores; a family may ask for as much as
:data:`~dmsg.noise.handshake.MAX_FRAMED_MESSAGE`."""
CRITICAL = 0x80
"""Options from here on must be understood, or the transport is refused."""
OPTION_END = 0x00
OPTION_OPEN = 0x01
OPTION_TAGS = 0x02
OPTION_HALF_CLOSE = 0x03
OPTION_RESUME = 0x82
OPTION_ENDED = 0x83
OPTION_PROBE = 0x84

_preface = struct.Struct(f">{PREFACE_FRAMES}H")
_head = struct.Struct(">HI")
_resume = struct.Struct(f">{TOKEN_SIZE}sIQ{HASH_SIZE}s")


@dataclass(frozen=True, slots=True)
class Resume:
    """Where one end of a stream stands.

    :ivar token: 16 bytes, of the stream.
    :ivar generation: uint32, counts the tries to move the stream to another transport; a
        REQUEST with one that was there before is refused.
    :ivar received: uint64, bytes of the stream that have arrived in order.
    :ivar hash: 32 bytes, the rolling hash of them.
    """

    token: bytes
    generation: int
    received: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """What the two ends tell each other when a transport is opened.

    ``port(2) || window(4) || options``, big endian, each option
    ``type(1) || length(1) || value``, then zeros up to 128 bytes.

    :ivar port: uint16, whom the initiator wants; 0 in the answer.
    :ivar window: uint32, bytes that the sender of this will take unacknowledged.
    :ivar token: 16 bytes of chance: the stream can be resumed by them; None: it ends
        with its transport.
    :ivar resume: the transport goes on with a stream.
    :ivar ended: that stream was closed by this end with this reason.
    :ivar tags: of a stream that begins: its rolling hash is over the tags of frames; where one of the two hellos does
        not say so, as those of programs before 0.2, it is over the data.
    :ivar half_close: of a stream that begins: its sender understands the end of data, after which the other direction
        goes on; used where both hellos say so.
    :ivar probe: a ping, which no application sees: 0, of the client; 1, of the client if somebody listens on ``port``.
    """

    port: int = 0
    window: int = 0
    token: bytes | None = None
    resume: Resume | None = None
    ended: int | None = None
    probe: int | None = None
    tags: bool = False
    half_close: bool = False

    def encode(self) -> bytes:
        """The bytes on the wire."""
        parts = [_head.pack(self.port, self.window)]
        if self.token is not None:
            parts.append(_option(OPTION_OPEN, self.token))
        if self.tags:
            parts.append(_option(OPTION_TAGS, b""))
        if self.half_close:
            parts.append(_option(OPTION_HALF_CLOSE, b""))
        if (resume := self.resume) is not None:
            value = _resume.pack(resume.token, resume.generation, resume.received, resume.hash)
            parts.append(_option(OPTION_RESUME, value))
        if self.ended is not None:
            parts.append(_option(OPTION_ENDED, bytes((fit_close_reason(self.ended),))))
        if self.probe is not None:
            parts.append(_option(OPTION_PROBE, bytes((self.probe,))))
        return b"".join(parts).ljust(HELLO_SIZE, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """:raises HandshakeError: malformed, or with a critical option that is unknown."""
        if len(data) < HELLO_SIZE:
            raise HandshakeError("hello is too short")
        port, window = _head.unpack_from(data)
        options: dict[int, bytes] = {}
        position = _head.size
        while position < len(data) and data[position] != OPTION_END:
            following = position + 2 + (data[position + 1] if position + 1 < len(data) else len(data))
            if following > len(data):
                raise HandshakeError("hello is cut")
            kind = data[position]
            if kind in options:
                raise HandshakeError("hello has an option twice")
            options[kind] = data[position + 2 : following]
            position = following
        return cls(port, window, **_options(options))


def _option(kind: int, value: bytes) -> bytes:
    return bytes((kind, len(value))) + value


_SIZES = {
    OPTION_OPEN: TOKEN_SIZE,
    OPTION_TAGS: 0,
    OPTION_HALF_CLOSE: 0,
    OPTION_RESUME: _resume.size,
    OPTION_ENDED: 1,
    OPTION_PROBE: 1,
}


class _Options(TypedDict, total=False):
    """Fields of a :class:`Hello` that are options on the wire."""

    token: bytes
    tags: bool
    half_close: bool
    resume: Resume
    ended: int
    probe: int


def _options(options: dict[int, bytes]) -> _Options:
    values: _Options = {}
    for kind, value in options.items():
        if kind not in _SIZES:
            if kind >= CRITICAL:
                raise HandshakeError(f"hello has the unknown option {kind:#x}")
        elif len(value) != _SIZES[kind]:
            raise HandshakeError(f"option {kind:#x} of the hello has a wrong length")
        elif kind == OPTION_OPEN:
            values["token"] = value
        elif kind == OPTION_TAGS:
            values["tags"] = True
        elif kind == OPTION_HALF_CLOSE:
            values["half_close"] = True
        elif kind == OPTION_RESUME:
            values["resume"] = Resume(*_resume.unpack(value))
        elif kind == OPTION_ENDED:
            values["ended"] = value[0]
        elif value[0] > 1 or OPTION_OPEN in options or OPTION_RESUME in options:
            raise HandshakeError("a probe carries no stream")
        else:
            values["probe"] = value[0]
    return values


def preface(keys: bytes) -> tuple[int, ...]:
    """The sequences of the preface of an upgrade.  :param keys: the payload of its REQUEST."""
    return _preface.unpack_from(sha256(UPGRADE_PROTOCOL + keys).digest())


def _handshake(key: SecKey, remote: PubKey, *, initiator: bool, upgrade: bool, ephemeral: SecKey | None) -> Handshake:
    ends: Sequence[bytes] = (key.public, remote) if initiator else (remote, key.public)
    return Handshake(
        Pattern.KK,
        key,
        initiator=initiator,
        remote=remote,
        prologue=(UPGRADE_PROTOCOL if upgrade else PROTOCOL) + ends[0] + ends[1],
        ephemeral=ephemeral,
    )


class Proposal:
    """The initiator's side.

    :ivar keys: both ends', the initiator's first: all that a plain REQUEST has.
    :ivar message: the first one of KK.
    :ivar upgrade: the message follows a plain REQUEST.
    """

    __slots__ = ("_handshake", "_max_message", "hello", "keys", "message", "upgrade")

    def __init__(
        self,
        key: SecKey,
        remote: PubKey,
        hello: Hello,
        *,
        upgrade: bool = False,
        ephemeral: SecKey | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        """:param max_message: bytes of the longest answer that is taken."""
        self._max_message = max_message
        self._handshake = _handshake(key, remote, initiator=True, upgrade=upgrade, ephemeral=ephemeral)
        self.hello = hello
        self.upgrade = upgrade
        self.keys = key.public + remote
        self.message = self._handshake.write_message(hello.encode())

    @property
    def payload(self) -> bytes:
        """Of the REQUEST frame."""
        return self.keys if self.upgrade else self.keys + self.message

    def accepted(self, payload: bytes) -> tuple[HandshakeResult, Hello]:
        """The answer is there.

        :param payload: of the ACCEPT frame; where that was a plain one, the keys and the responder's message.
        :raises HandshakeError: it is not the answer to this REQUEST.
        """
        if payload[:KEYS_SIZE] != self.keys:
            raise HandshakeError("ACCEPT is of other keys than the REQUEST")
        hello = Hello.decode(self._handshake.read_message(_message(payload, self._max_message)))
        assert self._handshake.result is not None
        return self._handshake.result, hello


class Offer:
    """The responder's side: a REQUEST that is authentic.

    A server that recorded it can send it again; so nothing may come of an
    offer before the initiator's first frame confirms that it holds the keys.

    :ivar hello: the initiator's.
    """

    __slots__ = ("_handshake", "_keys", "hello")

    def __init__(
        self,
        key: SecKey,
        payload: bytes,
        *,
        upgrade: bool = False,
        ephemeral: SecKey | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        """:param payload: of the REQUEST frame; where that was a plain one, the keys and the initiator's message.

        :param max_message: bytes of the longest message that is taken.
        :raises KeyFormatError: the initiator's key is none.
        :raises HandshakeError: the message is not authentic or malformed.
        """
        self._keys = payload[:KEYS_SIZE]
        message = _message(payload, max_message)
        if self._keys[PUBKEY_SIZE:] != key.public:
            raise HandshakeError("REQUEST is to another key")
        initiator = PubKey(payload[:PUBKEY_SIZE])
        self._handshake = _handshake(key, initiator, initiator=False, upgrade=upgrade, ephemeral=ephemeral)
        self.hello = Hello.decode(self._handshake.read_message(message))

    def accept(self, hello: Hello) -> tuple[HandshakeResult, bytes]:
        """The keys, and the payload of the ACCEPT frame; where that was a plain one, of which the message is sent."""
        payload = self._keys + self._handshake.write_message(hello.encode())
        assert self._handshake.result is not None
        return self._handshake.result, payload


def is_secure(payload: bytes) -> bool:
    """Whether a REQUEST asks for a secure transport."""
    return len(payload) > KEYS_SIZE


def _message(payload: bytes, longest: int) -> bytes:
    message = payload[KEYS_SIZE:]
    if not MIN_MESSAGE <= len(message) <= longest:
        raise HandshakeError("handshake message has a wrong length")
    return message
