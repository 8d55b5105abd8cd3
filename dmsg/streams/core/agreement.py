"""KK handshake inside REQUEST and ACCEPT, by which two clients agree on a secure transport. No I/O.

The payload of REQUEST is ``initiator pk(33) || responder pk(33) || KK message 1``. The payload of ACCEPT has the same
two keys and KK message 2 (seed document, TODO list). Each message contains an encrypted :class:`Hello` with parameters
that servers need not know.

:class:`Proposal` is the initiator's side, and :class:`Offer` the responder's side. Each processes the payload of the
other side, and returns the keys and the other side's hello. An object that has raised
:exc:`~dmsg.errors.HandshakeError` cannot be used any more. The prologue of the handshake contains both keys in the
order of their roles, so a message is valid only for these two clients in these roles. An unknown option in a hello is
ignored, so that later versions can add options. But an unknown critical option ends the handshake.

An authentic REQUEST may be a replay. So a responder that accepts an offer waits for the initiator's first frame
(:mod:`dmsg.v2019.core.handshakes`). ``docs/protocol/secure-transport.md`` is the specification.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypedDict

from dmsg.base.cipher_names import TAG_SIZE, Cipher
from dmsg.errors import HandshakeError, fit_close_reason
from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey
from dmsg.noise.handshake import Handshake, HandshakeResult, Pattern

PROTOCOL = b"dmsg secure transport 1"
"""First part of the handshake's prologue, before the two public keys."""
UPGRADE_PROTOCOL = b"dmsg upgraded transport 1"
"""First part of the prologue in an upgrade, whose handshake messages follow a plain REQUEST and ACCEPT in FWD
frames."""
FEATURE = "secure1"
"""Mark in the version of a client's entry: the client supports secure transports."""
UPGRADE_FEATURE = "upgrade1"
"""Mark in the version of a client's entry: the client upgrades plain transports to secure ones, for servers that carry
only plain transports."""
PREFACE_FRAMES = 4
"""Number of FWD frames without data by which a responder announces that it accepts an upgrade. An application of 2019
does not see empty frames."""
PING_FEATURE = "ping1"
"""Mark in the version of a client's entry: the client answers probes."""
TOKEN_SIZE = 16
HASH_SIZE = 32
HELLO_SIZE = 128
"""Number of bytes of a hello, including its padding. The constant size keeps servers from distinguishing hellos by
their length."""
KEYS_SIZE = 2 * PUBKEY_SIZE
"""Number of bytes of the two public keys before the KK message."""
MIN_MESSAGE = PUBKEY_SIZE + HELLO_SIZE + TAG_SIZE
"""Number of bytes of a KK message of this version: 177. Later versions may have longer messages."""
MAX_MESSAGE = 1024
"""Maximum bytes of a KK message, which leaves room for options of later versions. A protocol family may permit up to
:data:`~dmsg.noise.handshake.MAX_FRAMED_MESSAGE`."""
FIRST_CRITICAL_OPTION = 0x80
"""Smallest type of a critical option. A transport with an unknown critical option is refused."""
OPTION_END = 0x00
OPTION_OPEN = 0x01
OPTION_TAGS = 0x02
OPTION_HALF_CLOSE = 0x03
OPTION_AES_GCM = 0x04
OPTION_RESUME = 0x82
OPTION_ENDED = 0x83
OPTION_PROBE = 0x84

_preface = struct.Struct(f">{PREFACE_FRAMES}H")
_head = struct.Struct(">HI")
_resume = struct.Struct(f">{TOKEN_SIZE}sIQ{HASH_SIZE}s")


@dataclass(frozen=True, slots=True)
class Resume:
    """Position of one end in a stream, for resuming the stream.

    :ivar token: 16 bytes that identify the stream.
    :ivar generation: uint32, number of the attempt to move the stream to another transport. A REQUEST is accepted only
        if its generation is higher than that of the last accepted attempt.
    :ivar received: uint64, number of bytes of the stream that this end has received in order.
    :ivar hash: 32 bytes, rolling hash of these bytes.
    """

    token: bytes
    generation: int
    received: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """Hello: encrypted message that each end sends when a transport is opened.

    The encoding is ``port(2) || window(4) || options``, big endian, and then zeros up to 128 bytes. Each option is
    ``type(1) || length(1) || value``.

    :ivar port: uint16, port that the initiator wants to reach; 0 in the answer.
    :ivar window: uint32, receive window of the sender in bytes.
    :ivar token: 16 random bytes by which the stream can be resumed; None if the stream ends with its transport.
    :ivar resume: position of the sender in the stream to resume; None for a new stream.
    :ivar ended: reason for which the sender has closed the stream that the other end wants to resume; None otherwise.
    :ivar tags: for a new stream: whether the sender can compute the rolling hashes over the tags of frames. If ``tags``
        is set in both hellos, both ends compute the hashes over the tags. Otherwise, as with programs before 0.2, they
        compute the hashes over the data.
    :ivar half_close: for a new stream: whether the sender supports half-close, which is used if it is set in both
        hellos.
    :ivar aes_gcm: for this transport: whether the sender prefers AES-256-GCM, which is used if it is set in both
        hellos. Otherwise the cipher is ChaCha20-Poly1305.
    :ivar probe: 0 for a probe of the client itself; 1 for a probe that is accepted only if a program listens on
        ``port``; None for a stream of an application.
    """

    port: int = 0
    window: int = 0
    token: bytes | None = None
    resume: Resume | None = None
    ended: int | None = None
    probe: int | None = None
    tags: bool = False
    half_close: bool = False
    aes_gcm: bool = False

    def encode(self) -> bytes:
        """Return the bytes on the wire."""
        # The options may be in any order. This order is the one of the recorded test vectors.
        parts = [_head.pack(self.port, self.window)]
        if self.token is not None:
            parts.append(_option(OPTION_OPEN, self.token))
        if self.tags:
            parts.append(_option(OPTION_TAGS, b""))
        if self.half_close:
            parts.append(_option(OPTION_HALF_CLOSE, b""))
        if self.aes_gcm:
            parts.append(_option(OPTION_AES_GCM, b""))
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
        """Parse a hello.

        :raises HandshakeError: the data are malformed, or have an unknown critical option.
        """
        if len(data) < HELLO_SIZE:
            raise HandshakeError("hello is too short")
        port, window = _head.unpack_from(data)
        options: dict[int, bytes] = {}
        position = _head.size
        # An option of type 0 ends the options, and the rest is padding. So a later version may send a longer hello.
        while position < len(data) and data[position] != OPTION_END:
            following = position + 2 + (data[position + 1] if position + 1 < len(data) else len(data))
            if following > len(data):
                raise HandshakeError("the hello is cut off inside an option")
            kind = data[position]
            # A repeated option is refused, because different programs could use different ones of its values.
            if kind in options:
                raise HandshakeError("hello has an option twice")
            options[kind] = data[position + 2 : following]
            position = following
        return cls(port, window, **_options(options))


def agreed_cipher(one: Hello, other: Hello) -> Cipher:
    """Return the cipher of a transport, given the hellos of its two ends."""
    return Cipher.AES_256_GCM if one.aes_gcm and other.aes_gcm else Cipher.CHACHA20_POLY1305


def _option(kind: int, value: bytes) -> bytes:
    return bytes((kind, len(value))) + value


_SIZES = {
    OPTION_OPEN: TOKEN_SIZE,
    OPTION_TAGS: 0,
    OPTION_HALF_CLOSE: 0,
    OPTION_AES_GCM: 0,
    OPTION_RESUME: _resume.size,
    OPTION_ENDED: 1,
    OPTION_PROBE: 1,
}


class _Options(TypedDict, total=False):
    """Fields of a :class:`Hello` that are options on the wire."""

    token: bytes
    tags: bool
    half_close: bool
    aes_gcm: bool
    resume: Resume
    ended: int
    probe: int


def _options(options: dict[int, bytes]) -> _Options:
    values: _Options = {}
    for kind, value in options.items():
        if kind not in _SIZES:
            if kind >= FIRST_CRITICAL_OPTION:
                raise HandshakeError(f"hello has the unknown option {kind:#x}")
        elif len(value) != _SIZES[kind]:
            raise HandshakeError(f"option {kind:#x} of the hello has a wrong length")
        elif kind == OPTION_OPEN:
            values["token"] = value
        elif kind == OPTION_TAGS:
            values["tags"] = True
        elif kind == OPTION_HALF_CLOSE:
            values["half_close"] = True
        elif kind == OPTION_AES_GCM:
            values["aes_gcm"] = True
        elif kind == OPTION_RESUME:
            values["resume"] = Resume(*_resume.unpack(value))
        elif kind == OPTION_ENDED:
            values["ended"] = value[0]
        elif value[0] > 1 or OPTION_OPEN in options or OPTION_RESUME in options:
            raise HandshakeError("hello of a probe names a stream")
        else:
            values["probe"] = value[0]
    return values


def preface(keys: bytes) -> tuple[int, ...]:
    """Return the sequence numbers of the preface: empty FWD frames by which a responder announces that it accepts the
    upgrade of a plain transport.

    :param keys: payload of the plain REQUEST, which is the two public keys.
    """
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
    """Initiator's side of the handshake.

    :ivar keys: public keys of both ends, the initiator's first. They are the whole payload of a plain REQUEST.
    :ivar message: KK message 1.
    :ivar upgrade: whether the message is sent after a plain REQUEST, to upgrade its transport.
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
        """:param max_message: maximum bytes of the responder's KK message."""
        self._max_message = max_message
        self._handshake = _handshake(key, remote, initiator=True, upgrade=upgrade, ephemeral=ephemeral)
        self.hello = hello
        self.upgrade = upgrade
        self.keys = key.public + remote
        self.message = self._handshake.write_message(hello.encode())

    @property
    def payload(self) -> bytes:
        """Payload of the REQUEST frame."""
        return self.keys if self.upgrade else self.keys + self.message

    def process_answer(self, payload: bytes) -> tuple[HandshakeResult, Hello]:
        """Process the answer. Return the transport's keys and the responder's hello.

        :param payload: payload of the ACCEPT frame; in an upgrade, the two keys and the responder's message.
        :raises HandshakeError: the payload is not an authentic answer to this REQUEST.
        """
        # The keys are compared, because a server could send the ACCEPT of another transport.
        if payload[:KEYS_SIZE] != self.keys:
            raise HandshakeError("ACCEPT names other keys than the REQUEST")
        hello = Hello.decode(self._handshake.read_message(_message(payload, self._max_message)))
        assert self._handshake.result is not None
        return self._handshake.result, hello


class Offer:
    """Responder's side of the handshake, made from an authentic REQUEST.

    A server can replay a recorded REQUEST. So an offer must have no effect before the initiator's first frame confirms
    that the initiator holds the keys.

    :ivar hello: hello of the initiator.
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
        """:param payload: payload of the REQUEST frame; in an upgrade, the two keys and the initiator's message.

        :param max_message: maximum bytes of the initiator's KK message.
        :raises KeyFormatError: the initiator's key is invalid.
        :raises HandshakeError: the message is malformed or not authentic.
        """
        # Cheap checks come before the key agreement, which is expensive and which an attacker could make this client
        # compute.
        self._keys = payload[:KEYS_SIZE]
        message = _message(payload, max_message)
        if self._keys[PUBKEY_SIZE:] != key.public:
            raise HandshakeError("REQUEST is addressed to another key")
        initiator = PubKey(payload[:PUBKEY_SIZE])
        self._handshake = _handshake(key, initiator, initiator=False, upgrade=upgrade, ephemeral=ephemeral)
        self.hello = Hello.decode(self._handshake.read_message(message))

    def accept(self, hello: Hello) -> tuple[HandshakeResult, bytes]:
        """Return the transport's keys, and the payload of the ACCEPT frame. In an upgrade, only the KK message in that
        payload is sent."""
        payload = self._keys + self._handshake.write_message(hello.encode())
        assert self._handshake.result is not None
        return self._handshake.result, payload


def is_secure(payload: bytes) -> bool:
    """Whether a REQUEST asks for a secure transport."""
    return len(payload) > KEYS_SIZE


def _message(payload: bytes, longest: int) -> bytes:
    # The maximum leaves room for options of later versions, and limits the work that a stranger's message causes.
    message = payload[KEYS_SIZE:]
    if not MIN_MESSAGE <= len(message) <= longest:
        raise HandshakeError("the handshake message in REQUEST or ACCEPT has a wrong length")
    return message
