"""``dmsg rmb``: calling twins of the message bus, and being called."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol

from dmsg.cli.bus.twin import key_option, registry_option
from dmsg.cli.demos.rmb import demo
from dmsg.cli.options import group
from dmsg.cli.params import Seconds
from dmsg.rmb.envelope.wire import JSON

if TYPE_CHECKING:
    from twisted.python.failure import Failure

    from dmsg.net.reactor import Reactor
    from dmsg.rmb.client import Reply, RmbClient
    from dmsg.rmb.session.handlers import Request


MAX_PAYLOAD = 8 * 1024 * 1024
"""Bytes of what is sent from a file."""
SERVE_TIMEOUT = 300.0
"""Seconds that a program may take for an answer."""


def _relays(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    from dmsg.rmb.session.setup import relay_text

    try:
        relay_text(values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return values


def _text(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Arguments are bytes, and need not be UTF-8."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("is not UTF-8") from None
    if value == "" and param.name == "command":
        raise click.BadParameter("is empty")
    return value


relay_option = click.option(
    "--relay",
    "-r",
    multiple=True,
    required=True,
    envvar="RMB_RELAY",
    metavar="URL",
    callback=_relays,
    help="Relay to connect to, ws:// or wss://; repeatable.  Also: RMB_RELAY.",
)


@group()
def rmb() -> None:
    """Call twins of the message bus, and be called.

    \b
    Examples:
      dmsg rmb serve -k bob.twin -R http://127.0.0.1:9091 -r ws://127.0.0.1:8081 --command upper "tr a-z A-Z"
      dmsg rmb call 2 upper '"hello"' -k alice.twin -R http://127.0.0.1:9091 -r ws://127.0.0.1:8081
    """


rmb.add_command(demo)


def _client(
    reactor: Reactor, registry: str, relays: tuple[str, ...], key_file: str | None, **options: Any
) -> RmbClient:
    from dmsg.rmb.client import RmbClient
    from dmsg.rmb.twins.secrets import read_secret

    secret = read_secret(key_file)
    return RmbClient(reactor, secret.secret, registry, relays, key_type=secret.key_type, **options)


def _payload(text: str | None) -> bytes:
    """``@FILE`` is a file, ``-`` standard input."""

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
        raise RmbError(f"more than {MAX_PAYLOAD} bytes")
    return data


def _twins(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    numbers = value.split(",")
    if not all(one.isascii() and one.isdigit() and len(one) < 11 and 0 < int(one) < 2**32 for one in numbers):
        raise click.BadParameter(f"{value[:40]!r} is no number of a twin, or several with commas between")
    return tuple(int(one) for one in numbers)


@rmb.command()
@click.argument("twins", metavar="TWIN[,TWIN...]", callback=_twins)
@click.argument("command", callback=_text)
@click.argument("payload", required=False, callback=_text)
@registry_option
@relay_option
@key_option
@click.option("--timeout", default=30.0, show_default=True, type=Seconds(0.1, 1800), help="Seconds to wait.")
@click.option("--session", metavar="NAME", callback=_text, help="The session of the twin that is asked.")
@click.option("--keep", is_flag=True, help="Let the relay keep the request while the twin is not connected.")
@click.option("--schema", default=JSON, show_default=True, callback=_text)
@click.option("--no-encryption", is_flag=True, help="Send it plain.")
@click.option("--no-update", is_flag=True, help="Leave the registry as it is.")
def call(
    twins: tuple[int, ...],
    command: str,
    payload: str | None,
    registry: str,
    relay: tuple[str, ...],
    key_file: str | None,
    timeout: float,
    session: str | None,
    keep: bool,
    schema: str,
    no_encryption: bool,
    no_update: bool,
) -> None:
    """Ask TWIN for COMMAND with PAYLOAD, and print the answer.

    PAYLOAD is a text, ``@FILE``, or ``-`` for standard input.  Of several twins
    each answer is a line of JSON.
    """

    from dmsg.cli.running import run
    from dmsg.rmb.client import Reply
    from dmsg.rmb.errors import RmbError

    async def main(reactor: Reactor) -> None:
        data = _payload(payload)
        client = _client(
            reactor,
            registry,
            relay,
            key_file,
            # so that it is not taken for the twin's own program
            session=f"call-{os.getpid()}-{os.urandom(3).hex()}",
            encryption=not no_encryption,
            update=not no_update,
            # other programs of the twin may be those of others, which know nothing of it
            strict=None,
        )
        client.startService()
        try:
            await client.when_online(min(timeout, 15.0))
            options: dict[str, Any] = {"timeout": timeout, "session": session, "keep": keep, "schema": schema}
            if len(twins) == 1:
                reply = await client.call(twins[0], command, data, **options)
                sys.stdout.buffer.write(reply.payload + (b"" if reply.payload.endswith(b"\n") else b"\n"))
                sys.stdout.flush()
                return
            answers = await client.call_all(twins, command, data, **options)
            for number, answer in answers.items():
                click.echo(json.dumps(_line(number, answer)))
            if not any(isinstance(answer, Reply) for answer in answers.values()):
                raise RmbError("none of them answered")
        finally:
            await client.stopService()

    run(main)


def _line(number: int, answer: Reply | Exception) -> dict[str, Any]:
    from dmsg.rmb.client import Reply

    if isinstance(answer, Reply):
        return {"twin": number, "data": answer.payload.decode(errors="replace")}
    return {"twin": number, "error": str(answer), "code": getattr(answer, "code", None)}


class _Program(ProcessProtocol):
    """One run of a program: what it writes, and how it ends."""

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
        self._fail((last or [f"the program failed: {reason.value}"])[0][:500])

    def kill(self) -> None:
        """It took too long, or wrote too much."""

        assert self.transport is not None
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")


def _handler(reactor: Reactor, shell: str) -> Callable[[Request], Deferred[bytes]]:
    """Runs a program for each request: its input is the payload, its output the answer."""

    from dmsg.rmb.twins.secrets import SECRET

    def handle(request: Request) -> Deferred[bytes]:
        told = {"SOURCE": str(request.source), "COMMAND": request.command, "SCHEMA": request.schema or ""}
        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        environment.update({f"RMB_{name}": value.replace("\0", "") for name, value in told.items()})
        program = _Program(request.payload)
        reactor.spawnProcess(program, "/bin/sh", ["/bin/sh", "-c", shell], env=environment)
        program.ended.addTimeout(SERVE_TIMEOUT, reactor)
        return program.ended

    return handle


@rmb.command()
@registry_option
@relay_option
@key_option
@click.option(
    "--command",
    "commands",
    nargs=2,
    multiple=True,
    required=True,
    metavar="COMMAND PROGRAM",
    help="Run PROGRAM (of the shell) for COMMAND: its input is the payload, its output the answer; repeatable.",
)
@click.option("--session", metavar="NAME", callback=_text, help="Be this session of the twin, not the twin itself.")
@click.option("--no-encryption", is_flag=True, help="Say no encryption key: others send plain.")
@click.option("--no-update", is_flag=True, help="Leave the registry as it is.")
def serve(
    registry: str,
    relay: tuple[str, ...],
    key_file: str | None,
    commands: tuple[tuple[str, str], ...],
    session: str | None,
    no_encryption: bool,
    no_update: bool,
) -> None:
    """Answer calls with the output of programs, until it is ended."""

    from dmsg.cli.running import run
    from dmsg.rmb.peer.local import may_be_called

    for command, program in commands:
        if not may_be_called(command) or not program:
            raise click.BadParameter(f"{command!r} is no command, or runs nothing", param_hint="--command")

    async def main(reactor: Reactor) -> None:
        client = _client(
            reactor, registry, relay, key_file, session=session, encryption=not no_encryption, update=not no_update
        )
        for command, program in commands:
            client.serve(command, _handler(reactor, program))
        client.startService()
        try:
            await client.when_online(30.0)
            assert client.twin is not None
            click.echo(f"twin {client.twin.id} answers {', '.join(command for command, _ in commands)}")
            await Deferred()
        finally:
            await client.stopService()

    run(main)


@rmb.command()
@registry_option
@relay_option
@key_option
@click.option("--count", "-c", default=4, show_default=True, type=click.IntRange(1, 1000))
def ping(registry: str, relay: tuple[str, ...], key_file: str | None, count: int) -> None:
    """Time the way to the relay and back."""

    from dmsg.cli.running import run

    async def main(reactor: Reactor) -> None:
        client = _client(
            reactor, registry, relay, key_file, session=f"ping-{os.getpid()}-{os.urandom(3).hex()}", update=False
        )
        client.startService()
        try:
            await client.when_online(15.0)
            for number in range(count):
                seconds = await client.ping()
                click.echo(f"pong {number + 1}: {seconds * 1000:.2f} ms")
        finally:
            await client.stopService()

    run(main)
