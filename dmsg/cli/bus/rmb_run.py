"""Implementation of ``dmsg rmb call``, ``serve`` and ``ping``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol

from dmsg.base.printable import shorten
from dmsg.net.deadlines import no_answer

if TYPE_CHECKING:
    from twisted.python.failure import Failure

    from dmsg.net.reactor import Reactor
    from dmsg.rmb.client import Reply, RmbClient
    from dmsg.rmb.session.handlers import Request


MAX_PAYLOAD = 8 * 1024 * 1024
"""Maximum bytes of a payload, and of an answer."""
SERVE_TIMEOUT = 300.0
"""Seconds that a shell command may take to answer a call."""
MAX_PROGRAMS, MAX_PROGRAMS_OF_TWIN = 64, 16
"""Maximum number of shell commands that run at the same time: for all twins, and for one twin.  Further calls wait, and
the twins take turns.  Otherwise a stranger could use up the processes and the memory of this machine.
"""
MAX_WAITING_OF_TWIN = 200
"""Maximum number of calls of one twin that wait for a shell command; further ones are refused."""


def client_for(
    reactor: Reactor, registry: str, relays: tuple[str, ...], key_file: str | None, **options: Any
) -> RmbClient:
    """Return a client of the bus with the secret of a key file.

    :param options: further arguments of the client.
    """
    from dmsg.cli.output import notice
    from dmsg.rmb.client import RmbClient
    from dmsg.rmb.twins.secrets import read_secret

    secret = read_secret(key_file)
    return RmbClient(reactor, secret.secret, registry, relays, key_type=secret.key_type, on_warning=notice, **options)


@contextlib.asynccontextmanager
async def online(client: RmbClient, timeout: float) -> AsyncIterator[None]:
    """Context manager inside which a client of the bus is connected.

    :param timeout: seconds to wait for the connection.
    """
    client.startService()
    try:
        await client.when_online(timeout)
        yield
    finally:
        await client.stopService()


def own_session(command: str) -> str:
    """Return the name for a session of one run of a command.

    The relay closes the older of two connections with the same session name. So other programs of the same twin stay
    connected.
    """
    return f"{command}-{os.getpid()}-{os.urandom(3).hex()}"


def payload_of(text: str | None) -> bytes:
    """Return the payload that an argument describes: the content of a file for ``@FILE``, standard input for ``-``,
    else the text itself.
    """

    from dmsg.rmb.errors import RmbError

    if text is None:
        return b""
    if text == "-":
        data = sys.stdin.buffer.read(MAX_PAYLOAD + 1)
    elif text.startswith("@"):
        with Path(text[1:]).open("rb") as file:
            data = file.read(MAX_PAYLOAD + 1)
    else:
        data = text.encode()
    if len(data) > MAX_PAYLOAD:
        raise RmbError(f"the payload has {len(data)} bytes, and the limit is {MAX_PAYLOAD}: send it in parts")
    return data


def line_of(number: int, answer: Reply | Exception) -> dict[str, object]:
    """Return the JSON object that is printed for the answer of one of several twins."""
    from dmsg.rmb.client import Reply

    if isinstance(answer, Reply):
        return {"twin": number, "data": answer.payload.decode(errors="replace")}
    return {"twin": number, "error": str(answer), "code": getattr(answer, "code", None)}


class _Program(ProcessProtocol):
    """Process protocol of a shell command that answers a call: writes the payload to it, and collects its output.

    :param on_exited: callback invoked when the process has ended, and all its children that could write output.
    :ivar ended: Deferred that fires with the output, or fails if the command fails.
    """

    def __init__(self, data: bytes, on_exited: Callable[[], None]) -> None:

        self._data = data
        self._on_exited = on_exited
        self._out: list[bytes] = []
        self._errors = b""
        self._size = 0
        self.ended: Deferred[bytes] = Deferred(lambda _: self.kill())

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self._data)
        self.transport.closeStdin()

    def outReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_PAYLOAD:
            self.kill()
            self._fail(f"the answer has more than {MAX_PAYLOAD} bytes")
        else:
            self._out.append(data)

    def errReceived(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-4096:]

    def _fail(self, text: str) -> None:
        from dmsg.rmb.session.handlers import HandlerError

        if not self.ended.called:
            self.ended.errback(HandlerError(text))

    def processEnded(self, reason: Failure) -> None:
        self._on_exited()
        if reason.check(ProcessDone):
            if not self.ended.called:
                self.ended.callback(b"".join(self._out))
            return
        last = self._errors.decode(errors="replace").strip().splitlines()[-1:]
        self._fail(shorten((last or [f"the program failed: {reason.value}"])[0]))

    def kill(self) -> None:
        """Kill the shell command, because it took too long or wrote too much."""

        assert self.transport is not None
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")


class ProgramTurns:
    """Queue of the calls whose shell commands have to wait, because as many as permitted run.  Twins take turns.

    :param seconds: function that returns the seconds of a monotonic clock.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._running: Counter[int] = Counter()
        self._waiting: OrderedDict[int, deque[tuple[float, Deferred[None]]]] = OrderedDict()
        self._is_starting = False

    def acquire(self, twin: int, left: float) -> Deferred[None]:
        """Return a Deferred that fires when a shell command may run for a twin.  The caller then calls :meth:`release`
        when the command has ended.

        :param left: seconds after which the twin does not wait any more.  The Deferred then fails.
        """
        from dmsg.rmb.session.handlers import HandlerError

        if self._running.total() < MAX_PROGRAMS and self._running[twin] < MAX_PROGRAMS_OF_TWIN:
            self._running[twin] += 1
            return succeed(None)
        if len(self._waiting.get(twin, ())) >= MAX_WAITING_OF_TWIN:
            return fail(HandlerError("too many calls of this twin are waiting here"))
        turn: Deferred[None] = Deferred()
        self._waiting.setdefault(twin, deque()).append((self._seconds() + left, turn))
        return turn

    def release(self, twin: int) -> None:
        """Record that a shell command of a twin has ended, and let waiting calls proceed."""
        self._running[twin] -= 1
        if not self._running[twin]:
            del self._running[twin]
        # If a command cannot be started, its place is released inside this loop, which then gives it to the next call.
        if not self._is_starting:
            self._is_starting = True
            try:
                self._start_waiting()
            finally:
                self._is_starting = False

    def _start_waiting(self) -> None:
        from dmsg.rmb.session.handlers import HandlerError

        while self._running.total() < MAX_PROGRAMS:
            found = next((one for one in self._waiting if self._running[one] < MAX_PROGRAMS_OF_TWIN), None)
            if found is None:
                return
            until, turn = self._waiting[found].popleft()
            self._waiting.move_to_end(found)
            if not self._waiting[found]:
                del self._waiting[found]
            if until <= self._seconds():
                turn.errback(HandlerError("the call expired while it waited for others"))
            else:
                self._running[found] += 1
                turn.callback(None)


def handler_for(
    reactor: Reactor, shell: str, turns: ProgramTurns, allow: frozenset[int] = frozenset()
) -> Callable[[Request], Deferred[bytes]]:
    """Return a handler of calls that runs a shell command for each call.  The command reads the payload from standard
    input, and its output is the answer.

    :param shell: shell command.
    :param turns: queue that limits the number of shell commands; the handlers of all commands share it.
    :param allow: numbers of the twins whose calls are answered; empty for all twins.
    """

    from dmsg.rmb.session.handlers import HandlerError
    from dmsg.rmb.twins.secrets import SECRET

    def handle(request: Request) -> Deferred[bytes]:
        if allow and request.source.twin not in allow:
            return fail(HandlerError("this twin is not answered here"))
        told = {"SOURCE": str(request.source), "COMMAND": request.command, "SCHEMA": request.schema or ""}
        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        environment.update({f"RMB_{name}": value.replace("\0", "") for name, value in told.items()})
        twin = request.source.twin

        def run(_: None) -> Deferred[bytes]:
            program = _Program(request.payload, partial(turns.release, twin))
            try:
                reactor.spawnProcess(program, "/bin/sh", ["/bin/sh", "-c", shell], env=environment)
            except OSError as error:
                turns.release(twin)
                raise HandlerError(f"the program cannot be started: {error.strerror}") from None
            program.ended.addTimeout(SERVE_TIMEOUT, reactor, no_answer)
            return program.ended

        return turns.acquire(twin, request.left).addCallback(run)

    return handle
