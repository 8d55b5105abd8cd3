"""A Noise handshake: messages in, messages out, at the end two keys.

Exactly the two patterns of the reference, each written as the tokens of the
Noise specification (revision 34, sections 5 and 7).  The library ``noiseprotocol``
drives any pattern with any functions, and spends on looking them up more than
half of what a handshake costs beside its Diffie-Hellmans; the tests hold this
module against it (``tests/noise/test_oracle.py``).  No length prefixes here (see
:mod:`dmsg.noise.xk`) and no records (see :mod:`dmsg.noise.records`).

The rules of secp256k1 are those of the 2019 reference (``noise/dh.go``): DHLEN is 33,
the length of a public key, so the 32 bytes of a shared secret get one zero byte
appended; all 33 go into MixKey.

The 2019 reference gives the *writer of the last message* the keys the other
way round than the Noise specification (``noise/noise.go``: ``res, ns.dec,
ns.enc, err = ns.hs.WriteMessage(...)``).  For XK, three messages, that is the
initiator, so both sides swap.  For KK, two messages, what comes out is the
specification's assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.errors import HandshakeError, KeyFormatError, LocalProtocolError
from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey

TAG_SIZE = 16
MAX_FRAMED_MESSAGE = 4094
"""Bytes of the longest handshake message that any family asks for: with its length it fits into 4 KiB."""
MAX_HANDSHAKE_MESSAGE = 65535
"""Bytes; the Noise specification's maximum (section 3)."""
HANDSHAKE_FRAMES = 64
"""Of the frames of a read that are taken at a time: what the keys of one handshake cost, a third of a millisecond."""


class Pattern(Enum):
    """The two patterns of the reference."""

    XK = b"Noise_XK_Secp256k1_ChaChaPoly_SHA256"  # messages of 49, 49, 65 bytes
    KK = b"Noise_KK_Secp256k1_ChaChaPoly_SHA256"  # messages of 49, 49 bytes


_TOKENS = {
    Pattern.XK: (("e", "es"), ("e", "ee"), ("s", "se")),
    Pattern.KK: (("e", "es", "ss"), ("e", "ee", "se")),
}
"""Of each message; the initiator writes the first one."""
_STARTS = {pattern: sha256(pattern.value).digest() for pattern in Pattern}
"""``h`` and ``ck`` at the start: both names are longer than a hash."""

_BLOCK = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_NONCES = tuple(bytes(4) + count.to_bytes(8, "little") for count in range(3))
"""No key of a handshake seals more: the payload of one message, a static key and a payload of the next one."""


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """What a finished handshake leaves.

    :ivar remote: the static key that the other side proved to hold.
    :ivar send_key: 32 bytes, encrypts what this side sends.
    :ivar receive_key: 32 bytes.
    :ivar hash: 32 bytes, the handshake hash (channel binding).
    """

    remote: PubKey
    send_key: bytes
    receive_key: bytes
    hash: bytes


def _hkdf(chain: bytes, material: bytes) -> tuple[bytes, bytes]:
    """Two outputs of 32 bytes each (section 4.3): HMAC-SHA-256 (RFC 2104) three times.

    Written out, because keys here are shorter than a block and the last two
    HMACs have the same one: a handshake does this three to four times.
    """
    key = chain.ljust(_BLOCK, b"\0")
    temporary = sha256(key.translate(_OUTER) + sha256(key.translate(_INNER) + material).digest()).digest()
    key = temporary.ljust(_BLOCK, b"\0")
    inner, outer = key.translate(_INNER), key.translate(_OUTER)
    first = sha256(outer + sha256(inner + b"\1").digest()).digest()
    return first, sha256(outer + sha256(inner + first + b"\2").digest()).digest()


class Handshake:
    """One side of one handshake.

    After any error it is damaged: drop it and close the connection.

    :param remote: the other side's static key; needed by all but the
        responder of XK.
    :param ephemeral: only for tests with recorded randomness.
    """

    __slots__ = (
        "_chain",
        "_cipher",
        "_ephemeral",
        "_hash",
        "_initiator",
        "_local",
        "_nonce",
        "_pattern",
        "_remote",
        "_remote_ephemeral",
        "_step",
        "result",
    )

    result: HandshakeResult | None
    """None until the last message was written or read."""

    def __init__(
        self,
        pattern: Pattern,
        local: SecKey,
        *,
        initiator: bool,
        remote: PubKey | None = None,
        prologue: bytes = b"",
        ephemeral: SecKey | None = None,
    ) -> None:
        if remote is None and (initiator or pattern is Pattern.KK):
            raise LocalProtocolError(f"the remote key is needed for this side of {pattern.name}")
        self._pattern = pattern
        self._initiator = initiator
        self._local = local
        self._remote = remote
        self._ephemeral = ephemeral
        self._remote_ephemeral: PubKey | None = None
        self._cipher: ChaCha20Poly1305 | None = None
        self._nonce = 0
        self._step = 0
        self.result = None
        self._hash = self._chain = _STARTS[pattern]
        self._mix_hash(prologue)
        # keys known before: the initiator's first, where both are
        if pattern is Pattern.KK:
            self._mix_hash(bytes(self._static(of_initiator=True)))
        self._mix_hash(bytes(self._static(of_initiator=False)))

    def write_message(self, payload: bytes = b"") -> bytes:
        """The next handshake message.

        :raises LocalProtocolError: it is the other side's turn.
        """
        message = b""
        for what in self._next(writes=True):
            if what == "e":
                ephemeral = self._ephemeral = self._ephemeral or SecKey.generate()
                public = bytes(ephemeral.public)
                self._mix_hash(public)
                message += public
            elif what == "s":
                message += self._seal(bytes(self._local.public))
            else:
                self._mix_dh(what)
        message += self._seal(payload)
        self._finish()
        return message

    def read_message(self, message: bytes) -> bytes:
        """Take the other side's message; returns its payload.

        :raises HandshakeError: too short or too long, a key that is no point,
            or a tag that does not fit.
        :raises LocalProtocolError: it is this side's turn.
        """
        if len(message) > MAX_HANDSHAKE_MESSAGE:
            raise HandshakeError("handshake message is too long")
        tokens = self._next(writes=False)
        try:
            payload = self._read(tokens, bytes(message))
        except InvalidTag:
            raise HandshakeError("handshake message is not authentic") from None
        except (KeyFormatError, ValueError) as error:
            raise HandshakeError(f"handshake message is malformed: {error}") from None
        self._finish()
        return payload

    # --- messages ---

    def _next(self, *, writes: bool) -> tuple[str, ...]:
        messages = _TOKENS[self._pattern]
        if self._step >= len(messages):
            raise LocalProtocolError("the handshake is done")
        if (self._step % 2 == 0) is not (self._initiator is writes):
            raise LocalProtocolError(f"it is {'the other' if writes else 'this'} side's turn to write")
        self._step += 1
        return messages[self._step - 1]

    def _read(self, tokens: tuple[str, ...], message: bytes) -> bytes:
        for what in tokens:
            if what == "e":
                # a point off the curve is refused here, before any DH (reference: panic)
                self._remote_ephemeral = PubKey(message[:PUBKEY_SIZE])
                self._mix_hash(message[:PUBKEY_SIZE])
                message = message[PUBKEY_SIZE:]
            elif what == "s":
                self._remote = PubKey(self._open(message[: PUBKEY_SIZE + TAG_SIZE]))
                message = message[PUBKEY_SIZE + TAG_SIZE :]
            else:
                self._mix_dh(what)
        return self._open(message)

    def _finish(self) -> None:
        if self._step < len(_TOKENS[self._pattern]):
            return
        send, receive = _hkdf(self._chain, b"")
        # the specification's order is turned for the responder, and the reference turns XK's again
        if self._initiator is (self._pattern is Pattern.XK):
            send, receive = receive, send
        assert self._remote is not None
        self.result = HandshakeResult(remote=self._remote, send_key=send, receive_key=receive, hash=self._hash)

    # --- the symmetric state (section 5.2) ---

    def _static(self, *, of_initiator: bool) -> PubKey:
        key = self._local.public if self._initiator is of_initiator else self._remote
        assert key is not None
        return key

    def _mix_hash(self, data: bytes) -> None:
        self._hash = sha256(self._hash + data).digest()

    def _mix_dh(self, token: str) -> None:
        """MixKey of the Diffie-Hellman that ``token`` names: the initiator's key, then the responder's."""
        own, other = (token[0], token[1]) if self._initiator else (token[1], token[0])
        secret = self._local if own == "s" else self._ephemeral
        public = self._remote if other == "s" else self._remote_ephemeral
        assert secret is not None
        assert public is not None
        shared = secret.lasting_ecdh(public) if own == other == "s" else secret.ecdh(public)
        self._chain, key = _hkdf(self._chain, shared + b"\0")
        self._cipher = ChaCha20Poly1305(key)
        self._nonce = 0

    def _seal(self, plain: bytes) -> bytes:
        # each pattern mixes a key before anything is sealed
        assert self._cipher is not None
        sealed = self._cipher.encrypt(_NONCES[self._nonce], plain, self._hash)
        self._nonce += 1
        self._mix_hash(sealed)
        return sealed

    def _open(self, sealed: bytes) -> bytes:
        assert self._cipher is not None
        plain = self._cipher.decrypt(_NONCES[self._nonce], sealed, self._hash)
        self._nonce += 1
        self._mix_hash(sealed)
        return plain
