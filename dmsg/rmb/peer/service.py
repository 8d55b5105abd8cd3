"""Peer entity: gateway between the relays of a twin and Redis, through which the twin's local services and clients
exchange messages."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from uuid import uuid4

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.logger import Logger

from dmsg.base.log_throttle import LogThrottle
from dmsg.errors import DmsgError
from dmsg.net.reactor import Reactor
from dmsg.rmb.envelope.envelope_pb2 import Backlog, Envelope
from dmsg.rmb.envelope.wire import JSON, SENT_EXPIRATION, source_of, stamp, ttl
from dmsg.rmb.errors import CallTimeout, CipherError, Drop, RmbError, TwinNotFound
from dmsg.rmb.peer.files import FILE, FileUploads
from dmsg.rmb.peer.local_json import (
    LocalError,
    LocalRequest,
    LocalResponse,
    incoming_request,
    incoming_response,
    may_be_called,
    parse_request,
    parse_response,
)
from dmsg.rmb.peer.settings import PeerSettings
from dmsg.rmb.peer.store import LOCAL, QUEUE_TTL, REPLY, REQUESTS, RESPONSES, PeerStore
from dmsg.rmb.peer.version import version_text
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.registry.service import open_registry
from dmsg.rmb.session.participant import Participant, Profile, encryption_of
from dmsg.rmb.session.seal import E2E, OTHER, UNKNOWN_TWIN, VALIDATION, MessageRejected, ReceivedMessage
from dmsg.rmb.session.uplink import MessageTooLarge, Uplink
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

CACHE_TWINS = 5000
"""Maximum number of registry entries in a peer's cache."""
MAX_UNDER_WAY = 2000
"""Maximum number of messages of local programs that are waiting for a relay's confirmation. At the limit, the peer
takes no more messages from Redis."""
MAX_COMMANDS = 1000
"""Maximum number of different commands that one twin may request in an hour. Each command creates a list in Redis."""
RMB = "rmb"
LOCAL_ERROR = 101
"""Error code for a malformed message of a local program."""
RELAY_ERROR = 0
"""Error code with which the peer itself refuses a request. Relays use the same code."""

_log = Logger()


@dataclass(frozen=True)
class _Running:
    """Objects that exist while a peer runs."""

    store: PeerStore
    registry: CachedRegistry
    bus: Participant
    files: FileUploads


class RmbPeer(Service):
    """Gateway of a twin: runs the twin's unnamed session for any number of local services and clients.

    :param registry: registry to use instead of the one in the settings.
    :ivar ready: Deferred that fires when Redis is connected and the twin was found in the registry.
    """

    name = "rmb-peer"

    def __init__(
        self,
        reactor: Reactor,
        settings: PeerSettings,
        *,
        registry: TwinRegistry | None = None,
        wall_clock: Callable[[], float] | None = None,
        random: Random | None = None,
    ) -> None:
        """:raises IdentityError: the secret in ``settings`` is neither words nor a seed."""
        self._reactor = reactor
        self.settings = settings
        self._profile = Profile(
            identity=Identity(settings.secret, settings.key_type),
            encryption=encryption_of(settings.secret),
            relays=settings.relays,
            update=settings.update,
            strict=settings.strict,
        )
        self._given_registry = registry
        self._now = wall_clock or time.time
        self._random = random or Random()
        self._running: _Running | None = None
        self.drops: Counter[Drop] = Counter()
        self._under_way: dict[str, str] = {}
        self._no_room: list[Deferred[int]] = []
        self._leaving = self._stopping = False
        self._recording = 0
        """Number of confirmations that are being written to Redis."""
        self._commands: dict[int, dict[str, float]] = {}
        self._log_throttle = LogThrottle(reactor.seconds)
        self.ready: Deferred[None] = Deferred()

    @property
    def bus(self) -> Participant:
        """Participant that connects this twin to its relays. Available once the peer has started."""
        return self._running_parts.bus

    @property
    def _running_parts(self) -> _Running:
        assert self._running is not None
        return self._running

    @property
    def twin(self) -> Twin | None:
        """Registry entry of this peer's twin; None until the peer is ready."""
        running = self._running
        return running.bus.twin if running is not None and running.bus.is_open else None

    @property
    def uplink(self) -> Uplink | None:
        """Connections to the relays; None until the peer is ready."""
        running = self._running
        return running.bus.uplink if running is not None and running.bus.is_open else None

    # --- start and stop ---

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._leaving = self._stopping = False
        self.ready = Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        settings = self.settings
        store = PeerStore(self._reactor, settings.redis)
        registry = CachedRegistry(
            self._given_registry or open_registry(settings.registry, self._reactor), self._reactor, limit=CACHE_TWINS
        )
        bus = Participant(
            self._reactor,
            self._profile,
            registry,
            self._now,
            self._random,
            drops=self.drops,
            on_message=self._deliver,
            on_rejected=self._on_rejected,
        )
        files = FileUploads(self._reactor, settings.uploads, self._ask, store, self._now)
        self._running = _Running(store, registry, bus, files)
        await store.open()
        await bus.open()
        _log.info(
            "the peer of twin {twin} is online; local programs reach it through {redis}",
            twin=bus.twin.id,
            redis=settings.redis,
        )
        for name, outgoing, taken in ((LOCAL, REQUESTS, self._request_taken), (REPLY, RESPONSES, self._response_taken)):
            store.take_from(name, outgoing, self._now, lambda: str(uuid4()), self._room, taken)

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self._leaving = True
        self.ready.addErrback(lambda _: None)
        self.ready.cancel()
        running = self._running
        if running is None:
            return
        await running.bus.settle(lambda: not self._recording)
        self._stopping = True
        running.bus.disconnect()
        running.files.stop()
        running.bus.cancel()
        await running.store.close()
        if self._given_registry is None:
            await running.registry.close()

    def _room(self) -> Deferred[int]:
        if len(self._under_way) < MAX_UNDER_WAY and not self._leaving:
            return succeed(MAX_UNDER_WAY - len(self._under_way))
        waiting: Deferred[int] = Deferred()
        self._no_room.append(waiting)
        return waiting

    async def _finished(self, outgoing: str, uid: str) -> None:
        if self._stopping:
            # The shutdown has cancelled this message. The peer's next process finds it in Redis and sends it again.
            return
        self._recording += 1
        try:
            await self._running_parts.store.confirmed(outgoing, uid)
        finally:
            self._recording -= 1
        self._under_way.pop(uid, None)
        if len(self._under_way) < MAX_UNDER_WAY and self._no_room and not self._leaving:
            waiting, self._no_room = self._no_room, []
            for one in waiting:
                if not one.called:
                    one.callback(MAX_UNDER_WAY - len(self._under_way))

    # --- local programs: requests ---

    def _request_taken(self, uid: str, at: float, raw: bytes) -> None:
        if uid not in self._under_way:
            self._under_way[uid] = REQUESTS
            self.bus.run(self._handle(REQUESTS, uid, self._request(uid, at, raw)))

    async def _handle(self, outgoing: str, uid: str, work: Coroutine[Deferred[object], object, None]) -> None:
        """Process a message, and delete it even if this fails. Otherwise a malformed message would be processed again
        after every restart."""
        try:
            await work
        except CancelledError:
            raise
        except Exception as error:
            self.drops[Drop.BAD_REQUEST] += 1
            _log.error(
                "a message in the Redis list {list} could not be processed and is dropped: {error!r}",
                list=outgoing,
                error=error,
            )
        await self._finished(outgoing, uid)

    async def _request(self, uid: str, at: float, raw: bytes) -> None:
        try:
            request = parse_request(raw)
        except LocalError as error:
            self.drops[Drop.BAD_REQUEST] += 1
            self._log_message(LOCAL, f"{LOCAL}: {error}")
            if error.reply_to is not None:
                await self._push_error(error.reply_to, error.reference, (LOCAL_ERROR, str(error)), once=(uid, "local"))
            return
        life = Envelope(timestamp=request.timestamp or int(at), expiration=request.expiration)
        stamp(life, int(at))
        left = ttl(life.timestamp, life.expiration, int(self._now()))
        if left is None:
            self.drops[Drop.EXPIRED] += 1
            error_text = "request has expired" if request.expiration else "request has no expiration (exp is 0)"
            if request.expiration and ttl(life.timestamp, life.expiration, int(at)) is None:
                # The request had expired before the peer read it from Redis.
                error_text += (
                    f": it was made {int(at) - request.timestamp} s before the peer read it; is a clock wrong?"
                )
            await self._push_error(request.reply_to, request.reference, (VALIDATION, error_text), once=(uid, "expired"))
            return
        plugin, _, command = request.command.partition(".")
        if plugin == FILE and command == "upload":
            await self._running_parts.files.upload(uid, request, min(left, SENT_EXPIRATION))
            return
        await self._ask(uid, request, life.timestamp, min(life.expiration, SENT_EXPIRATION))

    async def _ask(self, uid: str, request: LocalRequest, timestamp: int, expiration: int, module: str = "") -> None:
        """Send a request to all its destinations. Return when each of these messages has been confirmed by a relay or
        has failed.

        :param module: name of the part of the peer that handles the answers; empty if they go to the client's reply
            list.
        """
        backlog = Backlog(
            uid=uid,
            reference=request.reference,
            reply_to=request.reply_to,
            module=module,
            ttl=expiration,
            destinations=request.destinations,
        )
        await self._running_parts.store.remember(backlog, expiration)
        under_way = [
            self.bus.run(self._send_to_one(uid, request, twin, timestamp, expiration)) for twin in request.destinations
        ]
        for one in under_way:
            await one

    async def _receiver(self, twin: int, until: float) -> Twin:
        return await self.bus.ask(functools.partial(self.bus.registry.get, twin), until)

    async def _send_to_one(self, uid: str, request: LocalRequest, twin: int, timestamp: int, expiration: int) -> None:
        error: tuple[int, str] | None = None
        try:
            receiver = await self._receiver(twin, timestamp + expiration)
            envelope = Envelope(uid=uid, timestamp=timestamp, expiration=expiration)
            envelope.request.command = request.command
            if request.tags is not None:
                envelope.tags = request.tags
            if request.schema is not None:
                envelope.schema = request.schema
            await self.bus.send(envelope, request.data, receiver, Session(twin), timestamp + expiration)
        except TwinNotFound:
            error = (UNKNOWN_TWIN, f"unknown twin id '{twin}'")
        except CipherError as wrong:
            error = (E2E, f"e2e error: {wrong}")
        except CallTimeout:
            error = (VALIDATION, "request has expired before it could be sent")
        except RmbError as wrong:
            error = (OTHER, f"other: {wrong}")
        if error is not None:
            await self._push_error(request.reply_to, request.reference, error, once=(uid, str(twin), "error"))

    async def _push_error(
        self, reply_to: str, reference: str | None, error: tuple[int, str], *, once: tuple[str, ...] = ()
    ) -> None:
        """Push an error to a client's reply list. The error has no source, because the peer itself made it."""
        await self._running_parts.store.hand_over(
            reply_to, incoming_response(reference, b"", "", None, 0, error), once=once
        )

    # --- local programs: responses ---

    def _response_taken(self, uid: str, at: float, raw: bytes) -> None:
        if uid not in self._under_way:
            self._under_way[uid] = RESPONSES
            self.bus.run(self._handle(RESPONSES, uid, self._response(at, raw)))

    async def _response(self, at: float, raw: bytes) -> None:
        try:
            response = parse_response(raw)
        except LocalError as error:
            self.drops[Drop.BAD_REQUEST] += 1
            self._log_message(REPLY, f"{REPLY}: {error}")
        else:
            await self._send_answer(response, int(at))

    async def _send_answer(self, response: LocalResponse, at: int, tags: str | None = None) -> None:
        answer = Envelope(uid=response.uid, timestamp=at, expiration=SENT_EXPIRATION)
        if response.schema is not None:
            answer.schema = response.schema
        if tags is not None:
            answer.tags = tags
        payload: bytes | None = response.data
        if response.error is not None:
            answer.error.code, answer.error.message = response.error
            answer.error.SetInParent()
            payload = None
        else:
            answer.response.SetInParent()
        to = response.destination
        try:
            receiver = await self._receiver(to.twin, at + SENT_EXPIRATION)
            await self.bus.send(answer, payload, receiver, to, at + SENT_EXPIRATION)
        except MessageTooLarge as error:
            self.drops[Drop.BAD_REQUEST] += 1
            failed = LocalResponse(response.uid, b"", to, None, 0, (LOCAL_ERROR, str(error)))
            await self._send_answer(failed, at)
        except RmbError as error:
            self.drops[Drop.UNKNOWN_REPLY] += 1
            self._log_message("answer", f"an answer to {to} was not sent: {error}")

    # --- messages from relays ---

    async def _on_rejected(self, rejection: MessageRejected) -> None:
        self._log_message(rejection.drop, f"dropped: {rejection}")
        if rejection.wants_answer is not None:
            code, request = rejection.wants_answer
            self._answer(request, b"", (code, str(rejection)))

    async def _deliver(self, received: ReceivedMessage) -> None:
        """Push a received message to the list of a service or client. Return when the message is in Redis."""
        if received.kind == "request":
            await self._requested(received)
        elif received.kind in ("response", "error"):
            await self._on_answer(received)

    def _log_message(self, kind: object, text: str) -> None:
        """Log a line about a message. The lines of each kind are throttled, because anyone can send many messages."""
        more = self._log_throttle.suffix(str(kind))
        if more is not None:
            _log.info("{text}{more}", text=text, more=more)

    def _answer(
        self, request: Envelope, data: bytes, error: tuple[int, str] | None = None, *, tags: str | None = None
    ) -> None:
        """Send an answer that the peer makes itself, without a service."""
        answer = LocalResponse(request.uid, data, source_of(request), JSON if error is None else None, 0, error)
        self.bus.run(self._send_answer(answer, int(self._now()), tags))

    async def _requested(self, received: ReceivedMessage) -> None:
        envelope = received.envelope
        command = envelope.request.command
        plugin, dot, rest = command.partition(".")
        if dot and plugin == FILE:
            await self._running_parts.files.requested(received, rest, functools.partial(self._answer, envelope))
            return
        if dot and plugin == RMB:
            if rest == "version":
                self._answer(envelope, version_text())
            else:
                self._answer(envelope, b"", (RELAY_ERROR, f"unknown command '{command}'"))
            return
        if not may_be_called(command):
            self.drops[Drop.BAD_REQUEST] += 1
            self._answer(envelope, b"", (RELAY_ERROR, f"no service can have the name '{command[:80]}'"))
            return
        if not self._may_request(received.source.twin, command):
            self.drops[Drop.RATE_LIMITED] += 1
            self._answer(envelope, b"", (RELAY_ERROR, f"more than {MAX_COMMANDS} different commands in an hour"))
            return
        message = incoming_request(
            envelope.uid,
            received.source,
            command,
            envelope.expiration,
            received.payload,
            envelope.tags if envelope.HasField("tags") else None,
            REPLY,
            envelope.schema if envelope.HasField("schema") else None,
            envelope.timestamp,
        )
        await self._hand_over_once(received, f"msgbus.{command}", message)

    def _may_request(self, twin: int, command: str) -> bool:
        """Whether ``twin`` may request this command. The number of a twin's commands is limited, because each command
        creates a list in Redis, even if no service reads it."""
        now = self._reactor.seconds()
        commands = self._commands.setdefault(twin, {})
        if command not in commands and len(commands) >= MAX_COMMANDS:
            commands = self._commands[twin] = {one: at for one, at in commands.items() if at > now - QUEUE_TTL}
            if len(commands) >= MAX_COMMANDS:
                return False
        commands[command] = now
        if len(self._commands) > CACHE_TWINS:
            self._commands.pop(next(iter(self._commands)))
        return True

    async def _hand_over_once(self, received: ReceivedMessage, key: str, message: bytes) -> None:
        envelope = received.envelope
        ttl_left = max(1, envelope.timestamp + envelope.expiration - int(self._now()) + 1)
        same = (str(received.source.twin), envelope.uid, received.kind)
        try:
            new = await self._running_parts.store.hand_over(key, message, once=same, ttl=ttl_left)
        except DmsgError:
            raise
        except Exception as error:
            # Redis refused this single message, for example because the key is not a list. Repeating the call would not
            # help.
            self._log_message(key, f"{key}: {error}")
            self.drops[Drop.BAD_REQUEST] += 1
            if received.kind == "request":
                self._answer(envelope, b"", (RELAY_ERROR, "the service cannot be reached"))
            return
        if not new:
            self.drops[Drop.REPLAYED] += 1

    async def _on_answer(self, received: ReceivedMessage) -> None:
        envelope = received.envelope
        backlog = await self._running_parts.store.recall(envelope.uid)
        if backlog is None:
            self.drops[Drop.UNKNOWN_REPLY] += 1
            self._log_message("expired", "received reply of an expired message")
            return
        if not received.by_relay and backlog.destinations and received.source.twin not in backlog.destinations:
            # The signature is valid, but the request was not sent to this twin.
            self.drops[Drop.UNKNOWN_REPLY] += 1
            return
        error = (envelope.error.code, envelope.error.message) if received.kind == "error" else None
        if backlog.module == FILE:
            self._running_parts.files.answered(envelope.uid, received.payload, error, envelope.tags)
            return
        reference = backlog.reference if backlog.HasField("reference") else None
        schema = envelope.schema if envelope.HasField("schema") else None
        source = "0" if received.by_relay else str(received.source)
        data = b"" if error is not None else received.payload
        message = incoming_response(reference, data, source, schema, envelope.timestamp, error)
        if received.by_relay and len(backlog.destinations) > 1:
            # A relay's error does not name the destination that it concerns. So several errors may arrive, and none is
            # a duplicate.
            await self._running_parts.store.hand_over(backlog.reply_to, message)
            return
        await self._hand_over_once(received, backlog.reply_to, message)
