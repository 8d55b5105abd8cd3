"""Password-authenticated key agreement (PAKE): both ends prove that they know the words of a code.

The protocol is SPAKE2 over Ed25519 with two confirmations.  An end that does not know the words learns nothing about
them, except that its guess was wrong.  Each run allows one guess, and the sender counts the wrong ones.  The agreement
includes the binding of the stream and both keys, so nobody can relay the messages between two streams.

Messages are ``type(1) || length(2) || body``, big endian.  The end that typed the code (the *receiver*) begins::

    receiver  PAKE     01  version(1) = 1 || element(33)
    sender    PAKE     01  version(1) = 1 || element(33)
    receiver  CONFIRM  02  HMAC(32)
    sender    CONFIRM  02  HMAC(32)        or  WRONG  03  (empty)

The element has the encoding of the package ``spake2``: one byte for the side, then 32 bytes.  The receiver confirms
first.  The sender, who made the code, can thus recognise a wrong guess before it reveals anything.

:class:`Agreement` accepts received bytes and returns the bytes to send.  It ends with a verifier that is the same at
both ends, or with an error, after which it cannot be used.  No I/O, no clock.  Sources: RFC 9382, and
``docs/protocol/word-codes.md``.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from enum import Enum, auto

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B

from dmsg.errors import DmsgError
from dmsg.keys import PubKey

PROTOCOL = b"dmsg code 1"
"""Name of this protocol.  The names of both ends and the purpose of each derived key begin with this name, so that
another protocol cannot use the same keys.
"""
VERSION = 1
PAKE, CONFIRM, WRONG = 1, 2, 3
HEAD_SIZE = 3
ELEMENT_SIZE = 33
MAC_SIZE = 32
BINDING_SIZE = 32
MAX_MESSAGE = 256
"""Maximum bytes of a message's body.  Version 1 needs 34; the rest is for later versions."""
VERIFIER_SIZE = 5
"""Bytes from which the verifier is computed: 40 bits, which give 12 decimal digits for people to compare."""


class WrongCode(DmsgError):
    """Error: the other end does not know the words of the code, or an attacker relays the stream."""


class CodeProtocolError(DmsgError):
    """Error: the other end does not speak this protocol, or speaks an unknown version of it."""


class Role(Enum):
    """Role in the agreement: the sender made the code, and the receiver typed it."""

    SENDER = auto()
    RECEIVER = auto()


class Agreement:
    """One end of a key agreement.

    :param password: secret of a :class:`~dmsg.apps.codes.words.Code`.
    :param local: key of this end, which the stream has proved.
    :param remote: key of the other end, which the stream has proved.
    :param binding: 32 bytes that are unique to the stream, so that the messages are useless on another stream.
    :param entropy: function that returns random bytes; None for ``os.urandom``.
    :ivar verifier: 12 digits for people to compare, once the agreement is done; until then None.
    """

    def __init__(
        self,
        role: Role,
        password: bytes,
        *,
        local: PubKey,
        remote: PubKey,
        binding: bytes,
        entropy: Callable[[int], bytes] | None = None,
    ) -> None:
        if len(binding) != BINDING_SIZE:
            raise ValueError("a binding must have 32 bytes")
        self._role = role
        sender, receiver = (local, remote) if role is Role.SENDER else (remote, local)
        side = SPAKE2_A if role is Role.SENDER else SPAKE2_B
        self._spake = side(
            password,
            idA=PROTOCOL + b" sender " + bytes(sender) + binding,
            idB=PROTOCOL + b" receiver " + bytes(receiver) + binding,
            entropy_f=entropy or os.urandom,
        )
        self._element = self._spake.start()
        self._buffer = bytearray()
        self._key: bytes | None = None
        # The receiver sends the first message.
        self._outgoing = b"" if role is Role.SENDER else _message(PAKE, bytes((VERSION,)) + self._element)
        self.verifier: str | None = None

    @property
    def done(self) -> bool:
        """Whether both ends have proved that they know the words."""
        return self.verifier is not None

    @property
    def awaits_guess(self) -> bool:
        """Whether the next message of the other end shows if the words are the same at both ends."""
        return self._key is not None and not self.done

    def data_to_send(self) -> bytes:
        """Return the bytes to send now.  Call this method even after :meth:`receive_data` has raised an error, because
        a last message may have to be sent.
        """
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def receive_data(self, data: bytes) -> bytes:
        """Process bytes from the other end.

        :returns: once the agreement is done, the bytes after the other end's last message; until then nothing.
        :raises WrongCode: the other end does not know the words; the agreement has failed.
        :raises CodeProtocolError: the message is malformed or of another version.
        """
        self._buffer += data
        while not self.done:
            if len(self._buffer) < HEAD_SIZE:
                return b""
            kind, size = self._buffer[0], int.from_bytes(self._buffer[1:HEAD_SIZE], "big")
            if size > MAX_MESSAGE:
                raise CodeProtocolError("the other side does not use dmsg's protocol for codes")
            if len(self._buffer) < HEAD_SIZE + size:
                return b""
            body = bytes(self._buffer[HEAD_SIZE : HEAD_SIZE + size])
            del self._buffer[: HEAD_SIZE + size]
            self._take(kind, body)
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _take(self, kind: int, body: bytes) -> None:
        if kind == PAKE and self._key is None:
            self._agree(body)
        elif kind == CONFIRM and self._key is not None:
            self._judge(body)
        elif kind == WRONG and not body and self._role is Role.RECEIVER and self._key is not None:
            raise WrongCode("the code is wrong")
        else:
            raise CodeProtocolError("the other side does not use dmsg's protocol for codes")

    def _agree(self, body: bytes) -> None:
        if body[:1] != bytes((VERSION,)) or len(body) != 1 + ELEMENT_SIZE:
            raise CodeProtocolError(
                "the other side uses another version of dmsg's protocol for codes: update the older dmsg of the two"
            )
        try:
            self._key = self._spake.finish(body[1:])
        except Exception as error:
            # The element is not a point, belongs to the wrong side, or is this end's own element sent back. The package
            # ``spake2`` raises a different error in each case.
            raise CodeProtocolError(f"the other side's message is malformed: {type(error).__name__}") from None
        if self._role is Role.SENDER:
            self._outgoing += _message(PAKE, bytes((VERSION,)) + self._element)
        else:
            self._outgoing += _message(CONFIRM, self._derive(b"confirm receiver"))

    def _judge(self, body: bytes) -> None:
        other = b"confirm receiver" if self._role is Role.SENDER else b"confirm sender"
        if not hmac.compare_digest(body, self._derive(other)):
            if self._role is Role.SENDER:
                self._outgoing += _message(WRONG, b"")
            raise WrongCode("the code is wrong")
        if self._role is Role.SENDER:
            self._outgoing += _message(CONFIRM, self._derive(b"confirm sender"))
        digits = f"{int.from_bytes(self._derive(b'verifier', VERIFIER_SIZE), 'big') % 10**12:012}"
        self.verifier = " ".join(digits[at : at + 4] for at in (0, 4, 8))

    def _derive(self, purpose: bytes, size: int = MAC_SIZE) -> bytes:
        assert self._key is not None
        return HKDF(algorithm=SHA256(), length=size, salt=None, info=PROTOCOL + b" " + purpose).derive(self._key)


def _message(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + len(body).to_bytes(2, "big") + body
