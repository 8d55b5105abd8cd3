"""Verification of the messages that other relays send, singly or in batches: checks limits and signatures, and passes
valid messages to the switch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from dmsg.base.buckets import RateLimit
from dmsg.errors import DmsgError
from dmsg.net.blocks import blocks_of
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.texts import OFFLINE
from dmsg.rmb.envelope.wire import challenge, decode
from dmsg.rmb.errors import Drop, EnvelopeError, SignatureInvalid, TwinNotFound
from dmsg.rmb.relay.inbound.accept import InboundAcceptor
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.mail import Header
from dmsg.rmb.relay.rules import MessageRefused
from dmsg.rmb.relay.switch import Switch
from dmsg.rmb.twins.identity import verify
from dmsg.rmb.twins.twin import Twin

INTAKE_RATE, INTAKE_BURST = 5000.0, 10_000.0
"""Maximum number of messages per second, and in a burst, that other relays may send from one address or block of
addresses."""
INTAKE_COUNT, INTAKE_SIZE = 60_000, 512 * 1024 * 1024
"""Maximum number of messages, and of their bytes, per minute that are accepted from other relays for one sending
twin."""
MAX_TAKEN = 65_536
"""Maximum number of accepted messages that are remembered until they expire, so that repetitions are recognised."""
INVALID_MESSAGE_COST = 20
"""Number by which a malformed or wrongly signed message counts in the rate limit of its address, where any other
message counts as one."""
MAX_INTAKE = 1024
"""Maximum number of messages from other relays that are processed at the same time."""


class Verdict(NamedTuple):
    """Answer to one message of another relay.

    A temporary refusal never has a 4xx status, because relays of the reference implementation treat a 4xx as final.

    :ivar retry_after: seconds after which another attempt may succeed; None if the answer is final.
    """

    status: int
    text: str = ""
    retry_after: int | None = None


TAKEN = Verdict(202)


class InboundVerifier:
    """Verifier of messages that other relays send to this relay.

    :ivar under_way: number of messages that are not answered yet.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._intake = InboundAcceptor(switch)
        self._rate = RateLimit(INTAKE_RATE, INTAKE_BURST, blocks_of)
        self._of_twins = FixedWindow(INTAKE_COUNT, INTAKE_SIZE)
        switch.rules.windows.append(self._of_twins)
        self._accepted_until: OrderedDict[bytes, float] = OrderedDict()
        self.under_way = 0

    def too_many(self, address: str, now: float) -> Verdict | None:
        """Count one more message of ``address`` and return None. If the message exceeds a limit, count nothing and
        return the refusal."""
        if self.under_way < MAX_INTAKE and self._rate.allow(address, now):
            return None
        return self._refuse_for_now(Drop.INTAKE_RATE, "too many messages")

    def charge(self, address: str, now: float) -> None:
        """Charge a malformed or wrongly signed message to its address as ``INVALID_MESSAGE_COST`` messages, because
        checking it was expensive."""
        self._rate.charge(address, INVALID_MESSAGE_COST, now)

    def _refuse(self, drop: Drop, status: int, text: str) -> Verdict:
        self._switch.rules.drops[drop] += 1
        return Verdict(status, text)

    def _refuse_for_now(self, drop: Drop, text: str, seconds: int = 1) -> Verdict:
        self._switch.rules.drops[drop] += 1
        return Verdict(503, text, seconds)

    async def take(self, data: bytes, *, only_connected: bool) -> tuple[Verdict, bool]:
        """Process one message until it is confirmed, stored or refused.

        :returns: the answer, and whether the message was malformed or wrongly signed.
        """
        self.under_way += 1
        try:
            return await self._process(data, only_connected)
        finally:
            self.under_way -= 1

    # This function exceeds Ruff's limit of return statements, because each verdict has its own.
    async def _process(self, data: bytes, only_connected: bool) -> tuple[Verdict, bool]:  # noqa: PLR0911
        switch = self._switch
        try:
            envelope = decode(data)
        except EnvelopeError as error:
            return self._refuse(Drop.BAD_INTAKE, 400, f"bad request: {error}"), True
        header = Header(envelope)
        if not (header.source.twin and header.destination.twin):
            return self._refuse(Drop.BAD_INTAKE, 400, "bad request: without source or destination"), True
        try:
            switch.rules.check_message(header, switch.now())
        except MessageRefused as refused:
            # The timestamp is ahead of this relay's clock, so the message may be acceptable soon.
            if refused.drop is Drop.BAD_TIMES:
                return self._refuse_for_now(refused.drop, f"bad request: {refused}", 10), False
            return self._refuse(refused.drop, 400, f"bad request: {refused}"), False
        try:
            await self._check_source(envelope)
            receiver = await self._twin(header.destination.twin)
        # The other relay's registry may know a twin that this relay's registry does not know yet.
        except TwinNotFound as error:
            return self._refuse_for_now(Drop.INTAKE_SIGNATURE, str(error), 5), False
        except SignatureInvalid as error:
            return self._refuse(Drop.INTAKE_SIGNATURE, 401, f"bad signature: {error}"), True
        except DmsgError as error:
            return self._refuse_for_now(Drop.REGISTRY_DOWN, f"failed to get twin: {error}"), False
        return await self._pass_on(envelope, header, data, receiver, only_connected), False

    async def _pass_on(
        self, envelope: Envelope, header: Header, data: bytes, receiver: Twin | None, only_connected: bool
    ) -> Verdict:
        """Pass a message whose signature was verified to its receiver, or refuse it."""
        switch = self._switch
        # Anyone who has seen a message can send it again. A repetition is answered as accepted, and is not delivered
        # again.
        key = hashlib.sha256(envelope.signature).digest()
        if self._accepted_until.get(key, 0.0) > switch.now():
            return TAKEN
        # The twin's limit is charged only after the signature was verified. Otherwise anybody could use up another
        # twin's limit.
        size, now = len(data), switch.now()
        if not self._of_twins.measure(header.source.twin, size, now, is_answer=header.is_answer):
            switch.limited.count(header.source.twin)
            return self._refuse_for_now(Drop.INTAKE_RATE, "too many messages of this twin", 10)
        try:
            receiver = await self._refetch_if_elsewhere(header.destination.twin, receiver)
            if receiver is not None:
                switch.rules.grant_answer(header, now)
            await self._intake.take(header, data, receiver, only_connected=only_connected)
        except MessageRefused as refused:
            if refused.drop is Drop.OFFLINE:
                return self._refuse(refused.drop, 404, OFFLINE)
            # The twin's entry in the registry may have changed, and the other relay may know this already. So the
            # refusal is temporary, and the other relay sends the message again after 5 seconds.
            return self._refuse_for_now(refused.drop, str(refused), 5)
        except DmsgError as error:
            return self._refuse_for_now(Drop.QUEUE_FAILED, f"switch error: {error}")
        self._accepted_until[key] = header.timestamp + header.expiration
        if len(self._accepted_until) > MAX_TAKEN:
            self._accepted_until.popitem(last=False)
        return TAKEN

    async def _check_source(self, envelope: Envelope) -> None:
        twin = await self._switch.registry.get(envelope.source.twin)
        verify(envelope.signature, challenge(envelope), twin.account)

    async def _refetch_if_elsewhere(self, number: int, twin: Twin | None) -> Twin | None:
        """Return the current entry of a twin. If the cached entry does not list this relay, ask the registry, because
        the twin may have moved here."""
        domains = self._switch.rules.domains
        if not domains or (twin is not None and twin.relays & domains):
            return twin
        self._switch.registry.mark_stale(number)
        try:
            return await self._twin(number)
        except DmsgError:
            return twin

    async def _twin(self, number: int) -> Twin | None:
        try:
            return await self._switch.registry.get(number)
        except TwinNotFound:
            return None
