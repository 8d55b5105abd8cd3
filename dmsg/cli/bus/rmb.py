"""Command ``dmsg rmb``: calls twins of the message bus, and answers calls."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from dmsg.base.units import milliseconds
from dmsg.cli.bus.twin import key_option, registry_option
from dmsg.cli.demos.rmb import demo
from dmsg.cli.options import group
from dmsg.cli.output import say, tell
from dmsg.cli.params import Seconds

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor


def _relays(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    from dmsg.rmb.session.setup import relay_text

    try:
        relay_text(values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return values


def _text(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check that an argument is valid UTF-8.  The system also passes arguments that are not."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("the text is not UTF-8") from None
    if value == "" and param.name == "command":
        raise click.BadParameter("the command is empty")
    return value


relay_option = click.option(
    "--relay",
    "-r",
    multiple=True,
    required=True,
    envvar="RMB_RELAY",
    metavar="URL",
    callback=_relays,
    help="URL of the relay, ws:// or wss://; repeatable.  Environment: RMB_RELAY.",
)


@group()
def rmb() -> None:
    """Call twins over the message bus, and answer calls.

    \b
    Examples:
      dmsg rmb serve -k bob.twin -R http://127.0.0.1:9091 -r ws://127.0.0.1:8081 --command upper "tr a-z A-Z"
      dmsg rmb call 2 upper '"hello"' -k alice.twin -R http://127.0.0.1:9091 -r ws://127.0.0.1:8081
    """


rmb.add_command(demo)


def _twins(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    numbers = value.split(",")
    if not all(one.isascii() and one.isdigit() and len(one) < 11 and 0 < int(one) < 2**32 for one in numbers):
        raise click.BadParameter(f"{value[:40]!r} is not a twin's number, or several numbers separated by commas")
    return tuple(int(one) for one in numbers)


@rmb.command()
@click.argument("twins", metavar="TWIN[,TWIN...]", callback=_twins)
@click.argument("command", callback=_text)
@click.argument("payload", required=False, callback=_text)
@registry_option
@relay_option
@key_option
@click.option(
    "--timeout", default=30.0, show_default=True, type=Seconds(0.1, 1800), help="Seconds to wait for the answer."
)
@click.option("--session", metavar="NAME", callback=_text, help="Session of the called twin.")
@click.option("--keep", is_flag=True, help="Let the relay queue the request until the twin connects.")
@click.option("--schema", default="application/json", show_default=True, callback=_text, help="Media type of PAYLOAD.")
@click.option("--no-encryption", is_flag=True, help="Send the request without end-to-end encryption.")
@click.option("--no-update", is_flag=True, help="Do not update the twin's relays and keys in the registry.")
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
    """Call COMMAND of TWIN with PAYLOAD and print the answer.

    PAYLOAD is a text, ``@FILE`` for the content of a file, or ``-`` for standard input. If you call several twins, each
    answer is printed as one line of JSON.
    """

    from dmsg.cli.bus.rmb_run import client_for, line_of, online, own_session, payload_of
    from dmsg.cli.client_run import run
    from dmsg.rmb.client import Reply
    from dmsg.rmb.errors import RmbError

    async def main(reactor: Reactor) -> None:
        data = payload_of(payload)
        client = client_for(
            reactor,
            registry,
            relay,
            key_file,
            session=own_session("call"),
            encryption=not no_encryption,
            update=not no_update,
            # The strict signature is not declared in the registry, because some of the twin's other programs may not
            # support it.
            strict=None,
        )
        async with online(client, min(timeout, 15.0)):
            options: dict[str, Any] = {"timeout": timeout, "session": session, "keep": keep, "schema": schema}
            if len(twins) == 1:
                reply = await client.call(twins[0], command, data, **options)
                sys.stdout.buffer.write(reply.payload + (b"" if reply.payload.endswith(b"\n") else b"\n"))
                sys.stdout.flush()
                return
            answers = await client.call_all(twins, command, data, **options)
            for number, answer in answers.items():
                click.echo(json.dumps(line_of(number, answer)))
            if not any(isinstance(answer, Reply) for answer in answers.values()):
                raise RmbError("no twin answered: the reasons are in the lines above")

    run(main)


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
    help=(
        "Answer COMMAND with the output of this shell command, which reads the payload from standard input; repeatable."
    ),
)
@click.option(
    "--allow",
    multiple=True,
    type=click.IntRange(1, 2**32 - 1),
    metavar="TWIN",
    help="Answer only this twin; repeatable.  Default: every twin.",
)
@click.option("--session", metavar="NAME", callback=_text, help="Connect as this session of the twin.")
@click.option(
    "--no-encryption", is_flag=True, help="Publish no encryption key; callers then send without end-to-end encryption."
)
@click.option("--no-update", is_flag=True, help="Do not update the twin's relays and keys in the registry.")
def serve(
    registry: str,
    relay: tuple[str, ...],
    key_file: str | None,
    commands: tuple[tuple[str, str], ...],
    allow: tuple[int, ...],
    session: str | None,
    no_encryption: bool,
    no_update: bool,
) -> None:
    """Answer calls with the output of shell commands until stopped."""

    from twisted.internet.defer import Deferred

    from dmsg.cli.bus.rmb_run import ProgramTurns, client_for, handler_for, online
    from dmsg.cli.client_run import run
    from dmsg.rmb.peer.local_json import may_be_called

    for command, program in commands:
        if not may_be_called(command) or not program:
            raise click.BadParameter(
                f"{command!r} is not NAME=PROGRAM: it has no name, or no program", param_hint="--command"
            )

    async def main(reactor: Reactor) -> None:
        client = client_for(
            reactor, registry, relay, key_file, session=session, encryption=not no_encryption, update=not no_update
        )
        turns = ProgramTurns(reactor.seconds)
        for command, program in commands:
            client.serve(command, handler_for(reactor, program, turns, frozenset(allow)))
        async with online(client, 30.0):
            assert client.twin is not None
            names = [command for command, _ in commands]
            text = f"twin {client.twin.id} answers {', '.join(names)}"
            tell(text, twin=client.twin.id, answers=names, anyone=not allow, allow=sorted(allow))
            who = f"twins {', '.join(map(str, sorted(allow)))}" if allow else "every twin; --allow TWIN to restrict"
            say(f"dmsg: open to {who}", err=True)
            await Deferred()

    run(main)


@rmb.command()
@registry_option
@relay_option
@key_option
@click.option("--count", "-c", default=4, show_default=True, type=click.IntRange(1, 1000), help="Number of pings.")
def ping(registry: str, relay: tuple[str, ...], key_file: str | None, count: int) -> None:
    """Measure round-trip times to the relay."""

    from dmsg.cli.bus.rmb_run import client_for, online, own_session
    from dmsg.cli.client_run import run

    async def main(reactor: Reactor) -> None:
        client = client_for(reactor, registry, relay, key_file, session=own_session("ping"), update=False)
        async with online(client, 15.0):
            for number in range(count):
                seconds = await client.ping()
                tell(f"pong {number + 1}: {milliseconds(seconds)}", number=number + 1, seconds=seconds)

    run(main)
