"""Handlers of requests: calls the function that a program has registered for a command, and sends its result as the
answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import iscoroutine

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import JSON, SENT_EXPIRATION, source_of
from dmsg.rmb.errors import Drop, RmbError
from dmsg.rmb.session.participant import Participant
from dmsg.rmb.session.seal import ReceivedMessage, ReplayWindow
from dmsg.rmb.session.uplink import MessageTooLarge
from dmsg.rmb.twins.address import Session

HANDLER_ERROR = 255
"""Error code for an exception in a handler, as in services that are written in Go."""
MAX_HANDLING = 1000
"""Maximum number of requests whose handlers run at the same time."""

_log = Logger()


@dataclass(frozen=True)
class Request:
    """Request that is passed to a handler.

    :ivar source: session that sent the request; its signature was verified.
    :ivar left: remaining lifetime of the request in seconds; the caller does not wait longer.
    """

    source: Session
    command: str
    payload: bytes
    schema: str | None
    tags: str
    uid: str
    left: float


class HandlerError(RmbError):
    """Exception that a handler raises to answer with an error code of its choice.

    :ivar code: error code for the caller; 255 by default.
    """

    def __init__(self, text: str, code: int = HANDLER_ERROR) -> None:
        super().__init__(text)
        self.code = code


Handler = Callable[[Request], "bytes | Awaitable[bytes | None] | Deferred[bytes | None] | None"]


class Handlers:
    """Registered handlers of one program.

    :param bus: participant that sends the answers.
    """

    def __init__(self, bus: Participant) -> None:
        self._bus = bus
        self._handlers: dict[str, Handler] = {}
        self._seen = ReplayWindow()
        self._handling = 0

    def add(self, command: str, handler: Handler) -> None:
        """Register a handler for a command. The command ``calculator.*`` stands for every command that begins with
        ``calculator.``."""
        self._handlers[command] = handler

    def _find(self, command: str) -> Handler | None:
        found = self._handlers.get(command)
        while found is None and "." in command:
            command = command.rpartition(".")[0]
            found = self._handlers.get(f"{command}.*")
        return found

    def requested(self, received: ReceivedMessage) -> None:
        """Start the handler of a request, unless the request is a duplicate or too many handlers are running."""
        now = int(self._bus.now())
        envelope = received.envelope
        until = envelope.timestamp + envelope.expiration
        new = self._seen.add(received.source.twin, envelope.uid, "request", until, now)
        if new:
            self._begin(received, now)
        elif new is None:
            self._bus.drops[Drop.BUSY] += 1
            self._reply(envelope, HandlerError("too many requests of this twin have not expired yet"))
        else:
            self._bus.drops[Drop.REPLAYED] += 1

    def _begin(self, received: ReceivedMessage, now: int) -> None:
        envelope = received.envelope
        handler = self._find(envelope.request.command)
        if self._handling >= MAX_HANDLING:
            self._bus.drops[Drop.BUSY] += 1
            self._reply(envelope, HandlerError("too many requests at once"))
            return
        if handler is None:
            self._reply(envelope, HandlerError(f"function not found: {envelope.request.command}"))
            return
        request = Request(
            received.source,
            envelope.request.command,
            received.payload,
            envelope.schema if envelope.HasField("schema") else None,
            envelope.tags,
            envelope.uid,
            envelope.timestamp + envelope.expiration - now,
        )
        self._handling += 1

        def ended(result: bytes | Failure | None) -> None:
            self._handling -= 1
            if not isinstance(result, Failure):
                self._reply(envelope, result)
                return
            if not result.check(RmbError):
                _log.failure("handler of {command!r} failed", result, command=request.command)
            value = result.value
            error = value if isinstance(value, HandlerError) else HandlerError(str(value) or type(value).__name__)
            self._reply(envelope, error)

        maybeDeferred(_run, handler, request).addBoth(ended)

    def _reply(self, request: Envelope, result: bytes | HandlerError | None) -> None:
        answer = Envelope(uid=request.uid, expiration=SENT_EXPIRATION)
        payload: bytes | None = None
        if isinstance(result, HandlerError):
            answer.error.code = result.code
            # A handler may quote JSON of the caller, which can contain lone surrogates. Protobuf refuses them.
            answer.error.message = str(result).encode("utf-8", "replace").decode()
            answer.error.SetInParent()
        else:
            answer.response.SetInParent()
            answer.schema = JSON
            payload = result or b""
        self._bus.run(self._send(request, answer, payload))

    async def answer_error(self, request: Envelope, code: int, text: str) -> None:
        """Answer a request with an error."""
        answer = Envelope(uid=request.uid, expiration=min(request.expiration, SENT_EXPIRATION))
        answer.error.code = code
        answer.error.message = text
        await self._send(request, answer, None)

    async def _send(self, request: Envelope, answer: Envelope, payload: bytes | None) -> None:
        bus, to = self._bus, source_of(request)
        try:
            receiver = await bus.registry.get(to.twin)
            await bus.send(answer, payload, receiver, to)
        except MessageTooLarge as error:
            await self.answer_error(request, HANDLER_ERROR, str(error))
        except RmbError as error:
            bus.drops[Drop.UNKNOWN_REPLY] += 1
            _log.info("an answer to twin {twin} was not sent: {error}", twin=to.twin, error=str(error))


def _run(handler: Handler, request: Request) -> bytes | Awaitable[bytes | None] | None:
    result = handler(request)
    return Deferred.fromCoroutine(result) if iscoroutine(result) else result
