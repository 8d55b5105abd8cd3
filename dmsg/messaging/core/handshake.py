"""Link handshake of the Messaging System, which consists of four JSON frames.  No I/O.

::

    1  A -> B  version initiator responder nonce
    2  B -> A  ... sig1       sig1 by B over SHA-256 of version || initiator(33) || responder(33) || nonce(16)
    3  A -> B  ... sig2       sig2 by A over the same || sig1(65)
    4  B -> A  ... accepted

Each frame is one JSON object; an LF after it is skipped, and bytes after the last frame are kept.  Every frame must
repeat the members of the frames before.  Only signatures that are not made yet may be absent or zeros.

Sources: the seed document, section Link Handshake Frames; its two signatures verify by these rules.  The Go code of
2019 checks less: its responder ignores its own key, the version and the nonce's length.  Here a wrong value is an
error.
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
"""Maximum bytes of one JSON frame with white space; the longest that this module writes has 519."""
MAX_DEPTH = 8
"""Maximum depth of objects and lists in a frame, which only unknown members can contain."""
_ZERO_SIGNATURE = "00" * SIGNATURE_SIZE
_BLANKS = b" \t\r\n"


_FLAT = re.compile(rb"""[ \t\r\n]*+\{(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+\}""", re.DOTALL)
"""Pattern of an object without nested ones, as all known programs write it, matched at the speed of C."""


class _Scanner:
    """Scanner for the end of one JSON object, which reads each byte once, or twice if the object arrives whole."""

    __slots__ = ("_depth", "_escaped", "_position", "_quoted", "data", "end")

    def __init__(self) -> None:
        self.data = bytearray()
        self.end: int | None = None
        self._position = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False

    # The loop sees every byte, and a call for each byte would cost more than the rest of the work.
    def feed(self, data: bytes) -> None:  # noqa: C901, PLR0912
        """Append bytes and set ``end`` if the object is complete.

        :raises HandshakeError: the bytes are no JSON object, or the object is too long or too deep.
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
        """Remove and return the object; the bytes after it stay in :attr:`data`.

        :raises HandshakeError: the object is not valid JSON.
        """
        assert self.end is not None
        # The object is parsed only when its end is found.  A parser that starts anew with each piece would let a peer
        # that sends byte by byte cost quadratic time.
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
    """Side of a link handshake, over bytes.

    :param remote: key of the responder, if this side is the initiator; None for the responder's side.
    :param nonce: 16 bytes; like ``sign``, only for tests with recorded randomness.
    :ivar remote: key of the peer once the handshake is complete, else None.
    """

    optional = b"\n"
    """Bytes that may follow the last frame, even in a TCP segment of their own, and are skipped."""

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
        """Return the bytes to send to the peer now, and empty the buffer."""
        data, self._outgoing = self._outgoing, b""
        return data

    def receive_data(self, data: bytes) -> None:
        """Process the next bytes of the stream.

        :raises HandshakeError: the handshake failed; the caller closes the connection.
        """
        while self.remote is None:
            self._scanner.feed(data)  # The scanner also skips the LF behind the previous frame.
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
            # Only the JSON value true accepts; Go does not decode 1 or "true" as a boolean either.
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
        # In Go the signed text includes a signature that is already set, so one from the initiator is refused.
        self._check_absent(frame, "sig1", "sig2", "accepted")

    def _check_version(self, frame: dict[str, object]) -> None:
        if frame.get("version") != VERSION:
            raise HandshakeError(f"the peer's handshake names another version than {VERSION}")

    def _check_repeated(self, frame: dict[str, object]) -> None:
        """Check that a frame repeats the agreed members unchanged.

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
                raise HandshakeError(f"{name} differs from an earlier frame")

    @staticmethod
    def _check_absent(frame: dict[str, object], *names: str) -> None:
        for name in names:
            value = frame.get(name)
            if value not in (None, False, _ZERO_SIGNATURE):
                raise HandshakeError(f"{name} is set in a frame before its turn")

    @staticmethod
    def _same_signature(frame: dict[str, object], name: str, own: Signature | None) -> None:
        assert own is not None
        if _hex(frame, name, SIGNATURE_SIZE) != own:
            raise HandshakeError(f"{name} differs from an earlier frame")

    @staticmethod
    def _take_signature(frame: dict[str, object], name: str, by: PubKey, payload: bytes) -> Signature:
        signature = Signature(_hex(frame, name, SIGNATURE_SIZE))
        try:
            by.verify(payload, signature)
        except SignatureError as error:
            raise HandshakeError(f"{name}: {error}") from None
        return signature

    def _preimage(self) -> bytes:
        """Return the 85 bytes that sig1 signs, before SHA-256."""
        assert self._initiator is not None
        return VERSION.encode() + self._initiator + self._responder + self._nonce

    def _write(self, *, accepted: bool = False) -> None:
        assert self._initiator is not None
        # The members are in the order of the seed document's examples.  Values need no escaping, because all are
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
    # bytes.fromhex() accepts blanks, so two texts could stand for one signed value.
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
