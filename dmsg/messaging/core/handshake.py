"""Link handshake of the Messaging System, which consists of four JSON frames.  No I/O.

A is the initiator and B the responder; ``...`` stands for the members of the previous frame::

    1  A -> B  version initiator responder nonce
    2  B -> A  ... sig1       sig1 by B over SHA-256 of version || initiator(33) || responder(33) || nonce(16)
    3  A -> B  ... sig2       sig2 by A over the same || sig1(65)
    4  B -> A  ... accepted

Each frame is one JSON object. An LF after a frame is skipped; bytes after the last frame are kept for the caller. Every
frame must repeat the members of the earlier frames.  Signatures that are not computed yet may be absent or zeros.

Source: the seed document, section Link Handshake Frames; the two signatures in its example verify by these rules.  The
Go code of 2019 checks less: its responder does not check its own key, the version and the nonce's length.  This module
refuses wrong values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

from dmsg.errors import HandshakeError, KeyFormatError, SignatureError
from dmsg.keys import SIGNATURE_SIZE, PubKey, SecKey, Signature
from dmsg.messaging.core.wire import Profile

VERSION = "0.1"
NONCE_SIZE = 16
MAX_FRAME = 4096
"""Maximum bytes of one JSON frame with white space. The longest frame that this module writes has 519 bytes."""
MAX_DEPTH = 8
"""Maximum nesting depth of objects and lists in a frame. Known members have no nested values; unknown members may."""
_ZERO_SIGNATURE = "00" * SIGNATURE_SIZE
_BLANKS = b" \t\r\n"


_FLAT = re.compile(rb"""[ \t\r\n]*+\{(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+\}""", re.DOTALL)
"""Pattern of a JSON object without nested objects and lists. All known programs write such frames, and the pattern
finds their end much faster than a loop in Python."""


class _Scanner:
    """Scanner that finds the end of one JSON object. Its time is linear in the object's size, even if single bytes
    arrive."""

    __slots__ = ("_depth", "_escaped", "_position", "_quoted", "data", "end")

    def __init__(self) -> None:
        self.data = bytearray()
        self.end: int | None = None
        self._position = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False

    # This loop sees every byte. A function call for each byte would take longer than all other work.
    def feed(self, data: bytes) -> None:  # noqa: C901, PLR0912
        """Append bytes, and set ``end`` if the object is complete.

        :raises HandshakeError: the bytes are not a JSON object, or the object is too long or nested too deeply.
        """
        self.data += data
        buffer = self.data
        position = self._position
        if not position and (flat := _FLAT.match(buffer)):
            self.end = flat.end()
        while self.end is None and position < len(buffer):
            byte = buffer[position]
            position += 1
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif byte == 0x5C:
                    self._escaped = True
                elif byte == 0x22:
                    self._quoted = False
            elif not self._depth:
                if byte == 0x7B:
                    self._depth = 1
                elif byte not in _BLANKS:
                    raise HandshakeError("handshake frame is not a JSON object")
            elif byte == 0x22:
                self._quoted = True
            elif byte in (0x7B, 0x5B):
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    raise HandshakeError("handshake frame is nested too deeply")
            elif byte in (0x7D, 0x5D):
                self._depth -= 1
                if not self._depth:
                    self.end = position
        self._position = position
        if (self.end or len(buffer)) > MAX_FRAME:
            raise HandshakeError(f"handshake frame is longer than {MAX_FRAME} bytes")

    def take(self) -> dict[str, object]:
        """Remove and return the object. The bytes after it stay in :attr:`data`.

        :raises HandshakeError: the object is not valid JSON.
        """
        assert self.end is not None
        # The object is parsed only after its end was found. If a parser started anew with each piece, a peer that sends
        # byte by byte would cause work that grows with the square of the size.
        text = bytes(self.data[: self.end])
        rest = bytes(self.data[self.end :])
        self.__init__()  # type: ignore[misc]
        self.data += rest
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise HandshakeError("handshake frame is not a JSON object") from None
        assert isinstance(value, dict)
        return value


class JSONHandshake:
    """One side of a link handshake. Processes received bytes and returns bytes to send.

    :param remote: key of the responder, if this side is the initiator; None if this side is the responder.
    :param nonce: 16 bytes. Like ``sign``, this is only for tests that replay a recorded handshake.
    :ivar remote: key of the peer once the handshake is complete; None before.
    """

    optional = b"\n"
    """Bytes that may follow the last frame, even in a separate TCP segment. They are skipped."""

    def __init__(
        self,
        key: SecKey,
        remote: PubKey | None = None,
        *,
        profile: Profile = Profile.SEED,
        nonce: bytes | None = None,
        sign: Callable[[bytes], Signature] | None = None,
    ) -> None:
        self._key = key
        self._sign = sign or key.sign
        self._profile = profile
        self._scanner = _Scanner()
        self._outgoing = b""
        self._sig1: Signature | None = None
        self._sig2: Signature | None = None
        self.remote: PubKey | None = None
        self._responder = remote if remote is not None else key.public
        self._initiator: PubKey | None = None
        self._nonce = b""
        self._is_initiator = remote is not None
        self._frames_read = 0
        if self._is_initiator:
            self._initiator = key.public
            self._nonce = nonce if nonce is not None else os.urandom(NONCE_SIZE)
            self._write()

    # --- bytes ---

    def data_to_send(self) -> bytes:
        """Remove and return the bytes to send to the peer now."""
        data, self._outgoing = self._outgoing, b""
        return data

    def receive_data(self, data: bytes) -> None:
        """Process the next bytes of the stream.

        :raises HandshakeError: the handshake failed; close the connection.
        """
        while self.remote is None:
            self._scanner.feed(data)  # The scanner also skips an LF after the previous frame.
            if self._scanner.end is None:
                return
            frame = self._scanner.take()
            data = bytes(self._scanner.data)
            self._scanner.data.clear()
            self._receive(frame)
        self._scanner.data += data

    def trailing_data(self) -> bytes:
        """Remove and return the bytes after the handshake, including the optional LF."""
        data = bytes(self._scanner.data)
        self._scanner.data.clear()
        return data

    # --- frames ---

    def _receive(self, frame: dict[str, object]) -> None:
        self._frames_read += 1
        first = self._frames_read == 1
        if self._is_initiator:
            self._check_repeated(frame)
            if first:
                self._sig1 = self._take_signature(frame, "sig1", self._responder, self._preimage())
                self._check_absent(frame, "sig2", "accepted")
                self._sig2 = self._sign(self._preimage() + self._sig1)
                self._write()
                return
            self._same_signature(frame, "sig1", self._sig1)
            self._same_signature(frame, "sig2", self._sig2)
            # Only the JSON value true means acceptance. Go, too, does not decode 1 or "true" as a boolean.
            if frame.get("accepted") is not True:
                raise HandshakeError("the responder does not accept the link")
            self.remote = self._responder
        elif first:
            self._take_first(frame)
            self._sig1 = self._sign(self._preimage())
            self._write()
        else:
            self._check_repeated(frame)
            self._same_signature(frame, "sig1", self._sig1)
            self._check_absent(frame, "accepted")
            assert self._initiator is not None and self._sig1 is not None
            self._sig2 = self._take_signature(frame, "sig2", self._initiator, self._preimage() + self._sig1)
            self._write(accepted=True)
            self.remote = self._initiator

    def _take_first(self, frame: dict[str, object]) -> None:
        self._check_version(frame)
        self._initiator = _key(frame, "initiator")
        if _key(frame, "responder") != self._responder:
            raise HandshakeError("handshake names another responder than this key")
        self._nonce = _hex(frame, "nonce", NONCE_SIZE)
        # The initiator must not send signatures yet. In Go, a signature that is already set would become part of the
        # signed text.
        self._check_absent(frame, "sig1", "sig2", "accepted")

    def _check_version(self, frame: dict[str, object]) -> None:
        if frame.get("version") != VERSION:
            raise HandshakeError(f"the peer's handshake names another version than {VERSION}")

    def _check_repeated(self, frame: dict[str, object]) -> None:
        """Check that a frame repeats the members of the first frame unchanged.

        :raises HandshakeError: a member is missing or differs.
        """
        self._check_version(frame)
        assert self._initiator is not None
        for name, mine in (
            ("initiator", bytes(self._initiator)),
            ("responder", bytes(self._responder)),
            ("nonce", self._nonce),
        ):
            if _hex(frame, name, len(mine)) != mine:
                raise HandshakeError(f"{name} is not the same as in an earlier frame")

    @staticmethod
    def _check_absent(frame: dict[str, object], *names: str) -> None:
        for name in names:
            value = frame.get(name)
            if value not in (None, False, _ZERO_SIGNATURE):
                raise HandshakeError(f"{name} is set too early: in this frame it must be absent, false or zero")

    @staticmethod
    def _same_signature(frame: dict[str, object], name: str, own: Signature | None) -> None:
        assert own is not None
        if _hex(frame, name, SIGNATURE_SIZE) != own:
            raise HandshakeError(f"{name} is not the same as in an earlier frame")

    @staticmethod
    def _take_signature(frame: dict[str, object], name: str, by: PubKey, payload: bytes) -> Signature:
        signature = Signature(_hex(frame, name, SIGNATURE_SIZE))
        try:
            by.verify(payload, signature)
        except SignatureError as error:
            raise HandshakeError(f"{name}: {error}") from None
        return signature

    def _preimage(self) -> bytes:
        """Return the 85 bytes over whose SHA-256 ``sig1`` is computed."""
        assert self._initiator is not None
        return VERSION.encode() + self._initiator + self._responder + self._nonce

    def _write(self, *, accepted: bool = False) -> None:
        assert self._initiator is not None
        # The members are in the order of the seed document's examples. No value needs escaping, because all values are
        # hexadecimal.
        text = (
            f'{{"version":"{VERSION}","initiator":"{self._initiator.hex()}",'
            f'"responder":"{self._responder.hex()}","nonce":"{self._nonce.hex()}"'
        )
        for name, signature in (("sig1", self._sig1), ("sig2", self._sig2)):
            if signature is not None:
                text += f',"{name}":"{signature.hex()}"'
            elif self._profile is Profile.SKYWIRE:
                text += f',"{name}":"{_ZERO_SIGNATURE}"'
        text += ',"accepted":true}\n' if accepted else "}\n"
        self._outgoing += text.encode()


def _hex(frame: dict[str, object], name: str, size: int) -> bytes:
    # isalnum() is checked because bytes.fromhex() accepts blanks. Two different texts could otherwise have one signed
    # value.
    value = frame.get(name)
    if not isinstance(value, str) or len(value) != 2 * size or not value.isalnum():
        raise HandshakeError(f"{name} is not {2 * size} hexadecimal characters")
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise HandshakeError(f"{name} is not hexadecimal") from None


def _key(frame: dict[str, object], name: str) -> PubKey:
    try:
        return PubKey(_hex(frame, name, 33))
    except KeyFormatError as error:
        raise HandshakeError(f"{name}: {error}") from None
