"""Implementation of ``dmsg rmb call``, ``serve`` and ``ping``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, fail
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

    :ivar ended: Deferred that fires with the output, or fails if the command fails.
    """

    def __init__(self, data: bytes) -> None:

        self._data = data
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


def handler_for(
    reactor: Reactor, shell: str, allow: frozenset[int] = frozenset()
) -> Callable[[Request], Deferred[bytes]]:
    """Return a handler of calls that runs a shell command for each call.  The command reads the payload from standard
    input, and its output is the answer.

    :param shell: shell command.
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
        program = _Program(request.payload)
        reactor.spawnProcess(program, "/bin/sh", ["/bin/sh", "-c", shell], env=environment)
        program.ended.addTimeout(SERVE_TIMEOUT, reactor, no_answer)
        return program.ended

    return handle
