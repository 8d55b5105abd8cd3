"""Seal of messages: signs and encrypts messages before they are sent, and verifies and decrypts received ones.

An accepted message is for this twin, has valid times, and is signed by the twin that it names as its source. Unsigned
messages are rejected, except errors and pongs of relays.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from dmsg.base.bounded_tables import remember
from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import (
    DEFAULT_EXPIRATION,
    MAX_UID,
    SENT_EXPIRATION,
    challenge,
    decode,
    destination_of,
    frame_of_payload,
    kind_of,
    set_address,
    source_of,
    stamp,
    strict_challenge,
    times_error,
)
from dmsg.rmb.errors import CipherError, Drop, EnvelopeError, RmbError, SignatureInvalid, TwinNotFound
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Signer, verify
from dmsg.rmb.twins.twin import Twin

PAYLOAD_TYPE, PAYLOAD_DATA, VALIDATION, UNKNOWN_TWIN, BAD_SIGNATURE, NO_KEY, E2E, OTHER = (
    100,
    101,
    102,
    103,
    104,
    105,
    106,
    500,
)
"""Error codes in the answers of peers."""
STRICT_FOR = 600.0
"""Seconds after a strict signature during which every message of the same session must have one."""
MAX_STRICT = 50_000
"""Maximum number of sessions that are remembered because they have made a strict signature."""
MAX_SEEN = 500_000
"""Maximum number of messages in the replay window. Each is remembered until it expires."""
MAX_SEEN_OF_TWIN = 200_000
"""Maximum number of messages of one twin in the replay window, so that one twin cannot evict the messages of others."""


class MessageRejected(RmbError):
    """Error: the message is not accepted.

    :ivar code: error code for the sender, if the message is a request; with None no answer is sent.
    :ivar envelope: rejected message; None if the bytes are not an envelope.
    """

    def __init__(self, drop: Drop, text: str, code: int | None = None, envelope: Envelope | None = None) -> None:
        super().__init__(text)
        self.drop = drop
        self.code = code
        self.envelope = envelope

    @property
    def wants_answer(self) -> tuple[int, Envelope] | None:
        """Error code and rejected request, if the sender must get an answer; else None."""
        if self.code is None or self.envelope is None or self.envelope.WhichOneof("message") != "request":
            return None
        return self.code, self.envelope


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """Message that passed all checks.

    :ivar payload: decrypted payload.
    :ivar by_relay: whether a relay made the message, as an error or a pong. Such a message is not signed. Receivers
        ignore such a message unless they have sent a message with the same uid.
    """

    envelope: Envelope
    kind: str
    source: Session
    payload: bytes
    by_relay: bool = False


class ReplayWindow:
    """Replay window: remembers received messages by source, uid and kind, until they expire.

    The number of messages of each twin is limited. When the window is full, the twin with most messages loses the one
    that expires first. So a twin that fills the window makes only its own messages replayable.
    """

    def __init__(self, limit: int = MAX_SEEN, of_twin: int = MAX_SEEN_OF_TWIN) -> None:
        self._most, self._of_twin = limit, of_twin
        self._twins: dict[int, tuple[dict[tuple[str, str], float], list[tuple[float, str, str]]]] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, source: int, uid: str, kind: str, until: float, now: float) -> bool | None:
        """Add a message and return whether it is new. Return None if the window has no room for another message of this
        twin."""
        known, heap = self._twins.setdefault(source, ({}, []))
        while heap and heap[0][0] <= now:
            self._forget(source)
        if (uid, kind) in known:
            return False
        if len(known) >= self._of_twin:
            return None
        if self._total >= self._most:
            largest = max(self._twins, key=lambda twin: len(self._twins[twin][0]))
            if largest == source:
                return None
            self._forget(largest)
        known[uid, kind] = until
        heapq.heappush(heap, (until, uid, kind))
        self._total += 1
        self._twins[source] = (known, heap)
        return True

    def _forget(self, twin: int) -> None:
        """Forget the message of a twin that expires first."""
        known, heap = self._twins[twin]
        _, uid, kind = heapq.heappop(heap)
        del known[uid, kind]
        self._total -= 1
        if not heap:
            del self._twins[twin]


class Seal:
    """Keys and checks of one twin for its messages: signs and encrypts outgoing ones, verifies and decrypts incoming
    ones.

    :param session: session that sends the messages.
    :param encryption: encryption key. With None, messages are sent unencrypted, and encrypted ones cannot be decrypted.
    :param strict: whether messages also get a strict signature. Receivers that are strict in the registry then get
        payloads that are bound to their envelope.
    """

    def __init__(
        self,
        signer: Signer,
        session: Session,
        registry: TwinRegistry,
        encryption: Encryption | None,
        *,
        strict: bool = True,
    ) -> None:
        self._signer = signer
        self.session = session
        self._registry = registry
        self._encryption = encryption
        self._strict = strict
        self._known_strict: OrderedDict[Session, float] = OrderedDict()
        """Sessions that have made a strict signature, each with the time of its last message that had one."""

    def _is_known_strict(self, session: Session, now: float) -> bool:
        return now - self._known_strict.get(session, -STRICT_FOR) < STRICT_FOR

    # --- outbound ---

    def seal_message(self, envelope: Envelope, payload: bytes | None, receiver: Twin, to: Session, now: int) -> bytes:
        """Add the addresses and the time to a message, encrypt and sign it, and return the bytes to send.

        :param payload: payload before encryption; None for a message without payload, such as an error.
        :raises CipherError: the receiver's key is malformed.
        """
        set_address(envelope.source, self.session)
        set_address(envelope.destination, to)
        if not envelope.expiration:
            envelope.expiration = DEFAULT_EXPIRATION
        envelope.expiration = min(envelope.expiration, SENT_EXPIRATION)
        stamp(envelope, now)
        if payload is not None:
            if self._encryption is None or receiver.pk is None:
                envelope.plain = payload
            elif self._strict and (receiver.strict or self._is_known_strict(to, now)):
                envelope.bound = self._encryption.encrypt_bound(payload, receiver.pk, frame_of_payload(envelope))
            else:
                envelope.cipher = self._encryption.encrypt(payload, receiver.pk)
        envelope.signature = self._signer.sign(challenge(envelope))
        if self._strict:
            envelope.strict_signature = self._signer.sign(strict_challenge(envelope))
        data: bytes = envelope.SerializeToString()
        return data

    # --- inbound ---

    async def open_message(self, data: bytes, now: int) -> ReceivedMessage:
        """Verify and decrypt a received message. The caller must check whether the message is a repetition.

        :raises MessageRejected: the message is not accepted.
        """
        try:
            envelope = decode(data)
        except EnvelopeError as error:
            raise MessageRejected(Drop.BAD_FRAME, str(error)) from None
        kind, source = kind_of(envelope), source_of(envelope)
        if not kind:
            raise MessageRejected(Drop.BAD_PAYLOAD, "the message is neither a request nor a response nor an error")
        if len(envelope.uid) > MAX_UID or not envelope.uid:
            raise MessageRejected(Drop.BAD_PAYLOAD, f"uid must have 1 to {MAX_UID} characters")
        if not source.twin:
            # Only errors and pongs that a relay made have no source.
            if kind == "error":
                return ReceivedMessage(envelope, kind, source, b"", by_relay=True)
            if kind == "pong" and destination_of(envelope) == self.session:
                return ReceivedMessage(envelope, kind, source, envelope.plain, by_relay=True)
            raise MessageRejected(Drop.NOT_SIGNED, f"the {kind} has no source", None, envelope)
        if destination_of(envelope) != self.session:
            raise MessageRejected(
                Drop.NOT_FOR_US, f"the {kind} is for another session: {destination_of(envelope)}", None, envelope
            )
        wrong = times_error(envelope, now)
        if wrong is not None:
            raise MessageRejected(Drop.BAD_TIMES, f"envelope validation error: {wrong}", VALIDATION, envelope)
        sender = await self._sender(envelope, source.twin)
        try:
            self._check(envelope, sender, now)
        except SignatureInvalid as error:
            text = f"invalid envelope signature: {error}"
            raise MessageRejected(Drop.BAD_SIGNATURE, text, BAD_SIGNATURE, envelope) from None
        return ReceivedMessage(envelope, kind, source, self._payload(envelope, sender))

    async def _sender(self, envelope: Envelope, number: int) -> Twin:
        try:
            twin: Twin = await self._registry.get(number)
        except TwinNotFound:
            raise MessageRejected(Drop.UNKNOWN_TWIN, f"unknown twin id '{number}'", UNKNOWN_TWIN, envelope) from None
        except RmbError as error:
            raise MessageRejected(Drop.REGISTRY_DOWN, f"other: {error}", OTHER, envelope) from None
        return twin

    def _check(self, envelope: Envelope, sender: Twin, now: int) -> None:
        source = source_of(envelope)
        if not envelope.HasField("strict_signature"):
            # The strict signature is required here. Otherwise a relay could remove it, and then move characters between
            # fields, which the other signature does not detect.
            if sender.strict or self._is_known_strict(source, now):
                raise SignatureInvalid("the strict signature is missing")
            verify(envelope.signature, challenge(envelope), sender.account)
            return
        # The strict signature covers everything that the other signature covers, so only the strict one is verified.
        verify(envelope.strict_signature, strict_challenge(envelope), sender.account)
        remember(self._known_strict, source, now, MAX_STRICT)

    def _payload(self, envelope: Envelope, sender: Twin) -> bytes:
        which = envelope.WhichOneof("payload")
        if which is None or which == "plain":
            return bytes(envelope.plain)
        if sender.pk is None:
            raise MessageRejected(Drop.BAD_PAYLOAD, "sender twin has no public key", NO_KEY, envelope)
        try:
            if self._encryption is None:
                raise CipherError("this twin has no encryption key")
            if which == "bound":
                return self._encryption.decrypt_bound(envelope.bound, sender.pk, frame_of_payload(envelope))
            return self._encryption.decrypt(envelope.cipher, sender.pk)
        except CipherError as error:
            raise MessageRejected(Drop.BAD_PAYLOAD, f"e2e error: {error}", E2E, envelope) from None
