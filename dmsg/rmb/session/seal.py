"""What a peer does to a message before it leaves, and asks of one that came.

Nothing unsigned is believed, but a relay's error about something that was
sent.  A message is for this twin, not older and not newer than it says it may
be, signed by who it says it is of, and had not been received before.
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
"""Codes of errors that peers answer."""
STRICT_FOR = 600.0
"""Seconds for which a session that has signed with borders is expected to do so."""
MAX_STRICT = 50_000
"""Sessions of which that is remembered."""
MAX_SEEN = 500_000
"""Messages that are remembered until their life ends."""
MAX_SEEN_OF_TWIN = 200_000
"""Of one twin; it may not make others be forgotten."""


class Rejected(RmbError):
    """A message is not taken.

    :ivar code: what its sender is told, if it is a request; None means nothing.
    :ivar envelope: None when the bytes are no envelope.
    """

    def __init__(self, drop: Drop, text: str, code: int | None = None, envelope: Envelope | None = None) -> None:
        super().__init__(text)
        self.drop = drop
        self.code = code
        self.envelope = envelope

    @property
    def wants_answer(self) -> tuple[int, Envelope] | None:
        """The code of the error, and the request that it answers; None where nobody is told."""
        if self.code is None or self.envelope is None or self.envelope.WhichOneof("message") != "request":
            return None
        return self.code, self.envelope


@dataclass(frozen=True, slots=True)
class Received:
    """A message that may be believed.

    :ivar payload: decrypted.
    :ivar by_relay: an error that a relay made, or the answer to a ping: nobody signed it, and it counts only
        for a uid that was sent.
    """

    envelope: Envelope
    kind: str
    source: Session
    payload: bytes
    by_relay: bool = False


class Seen:
    """Messages received before, until their life ends: by source, uid and kind.

    A twin has a share.  When all is full the one with most is forgotten from,
    the messages first that end first: it can only make its own be repeated.
    """

    def __init__(self, most: int = MAX_SEEN, of_twin: int = MAX_SEEN_OF_TWIN) -> None:
        self._most, self._of_twin = most, of_twin
        self._twins: dict[int, tuple[dict[tuple[str, str], float], list[tuple[float, str, str]]]] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, source: int, uid: str, kind: str, until: float, now: float) -> bool | None:
        """Whether it is new; None when the twin's share is used up."""
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
        """The one of a twin that ends first."""
        known, heap = self._twins[twin]
        _, uid, kind = heapq.heappop(heap)
        del known[uid, kind]
        self._total -= 1
        if not heap:
            del self._twins[twin]


class Seal:
    """Of one twin.

    :param session: what messages of this twin are from.
    :param encryption: None sends everything plain, and cannot read what is not.
    :param strict: messages are signed with borders too; receivers that say
        so in the registry get payloads bound to their envelope.
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
        """Sessions that signed with borders, and when they did so last."""

    def _knows_borders(self, session: Session, now: float) -> bool:
        return now - self._known_strict.get(session, -STRICT_FOR) < STRICT_FOR

    # --- outbound ---

    def close(self, envelope: Envelope, payload: bytes | None, receiver: Twin, to: Session, now: int) -> bytes:
        """Address, stamp, encrypt and sign; the bytes to send.

        :param payload: None for none, as errors have.
        :raises CipherError: the receiver's key is no key.
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
            elif self._strict and (receiver.strict or self._knows_borders(to, now)):
                envelope.bound = self._encryption.encrypt_bound(payload, receiver.pk, frame_of_payload(envelope))
            else:
                envelope.cipher = self._encryption.encrypt(payload, receiver.pk)
        envelope.signature = self._signer.sign(challenge(envelope))
        if self._strict:
            envelope.strict_signature = self._signer.sign(strict_challenge(envelope))
        data: bytes = envelope.SerializeToString()
        return data

    # --- inbound ---

    async def open(self, data: bytes, now: int) -> Received:
        """What came, if it may be believed; whether it is new is for the caller to ask.

        :raises Rejected: it may not.
        """
        try:
            envelope = decode(data)
        except EnvelopeError as error:
            raise Rejected(Drop.BAD_FRAME, str(error)) from None
        kind, source = kind_of(envelope), source_of(envelope)
        if not kind:
            raise Rejected(Drop.BAD_PAYLOAD, "a message without a kind")
        if len(envelope.uid) > MAX_UID or not envelope.uid:
            raise Rejected(Drop.BAD_PAYLOAD, f"uid has no, or more than {MAX_UID}, characters")
        if not source.twin:
            # only relays leave the source out, and only two things do they say
            if kind == "error":
                return Received(envelope, kind, source, b"", by_relay=True)
            if kind == "pong" and destination_of(envelope) == self.session:
                return Received(envelope, kind, source, envelope.plain, by_relay=True)
            raise Rejected(Drop.NOT_SIGNED, f"a {kind} without a source", None, envelope)
        if destination_of(envelope) != self.session:
            raise Rejected(Drop.NOT_FOR_US, f"a {kind} for {destination_of(envelope)}", None, envelope)
        wrong = times_error(envelope, now)
        if wrong is not None:
            raise Rejected(Drop.BAD_TIMES, f"envelope validation error: {wrong}", VALIDATION, envelope)
        sender = await self._sender(envelope, source.twin)
        try:
            self._check(envelope, sender, now)
        except SignatureInvalid as error:
            text = f"invalid envelope signature: {error}"
            raise Rejected(Drop.BAD_SIGNATURE, text, BAD_SIGNATURE, envelope) from None
        return Received(envelope, kind, source, self._payload(envelope, sender))

    async def _sender(self, envelope: Envelope, number: int) -> Twin:
        try:
            twin: Twin = await self._registry.get(number)
        except TwinNotFound:
            raise Rejected(Drop.UNKNOWN_TWIN, f"unknown twin id '{number}'", UNKNOWN_TWIN, envelope) from None
        except RmbError as error:
            raise Rejected(Drop.REGISTRY_DOWN, f"other: {error}", OTHER, envelope) from None
        return twin

    def _check(self, envelope: Envelope, sender: Twin, now: int) -> None:
        source = source_of(envelope)
        if not envelope.HasField("strict_signature"):
            # a relay can take it off, and move the borders of what the other one is over
            if sender.strict or self._knows_borders(source, now):
                raise SignatureInvalid("the strict signature is missing")
            verify(envelope.signature, challenge(envelope), sender.account)
            return
        # it is over everything that the other one is over, so one is enough
        verify(envelope.strict_signature, strict_challenge(envelope), sender.account)
        remember(self._known_strict, source, now, MAX_STRICT)

    def _payload(self, envelope: Envelope, sender: Twin) -> bytes:
        which = envelope.WhichOneof("payload")
        if which is None or which == "plain":
            return bytes(envelope.plain)
        if sender.pk is None:
            raise Rejected(Drop.BAD_PAYLOAD, "sender twin has no public key", NO_KEY, envelope)
        try:
            if self._encryption is None:
                raise CipherError("this twin has no encryption key")
            if which == "bound":
                return self._encryption.decrypt_bound(envelope.bound, sender.pk, frame_of_payload(envelope))
            return self._encryption.decrypt(envelope.cipher, sender.pk)
        except CipherError as error:
            raise Rejected(Drop.BAD_PAYLOAD, f"e2e error: {error}", E2E, envelope) from None
