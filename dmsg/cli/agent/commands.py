"""Commands ``dmsg up``, ``dmsg status`` and ``dmsg down``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.agent.socket_path import FoundAgent, agent_path, ask, find_agent, lines
from dmsg.cli.agent.log import CHECK_INTERVAL, Log, log_path
from dmsg.cli.agent.up_run import default_key_file, start
from dmsg.cli.agent_choice import key_in
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import WrittenPath, command
from dmsg.cli.output import EXIT_NOBODY, fail, say, state, tell
from dmsg.cli.params import client_options_of
from dmsg.errors import DmsgError, NobodyThere

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor

DOWN_TIME = 15.0
"""Seconds to wait until an agent has stopped."""


class NoAgent(NobodyThere):
    """Error: a command needs a running agent, and none is running."""


def _path() -> Path:
    path = agent_path()
    if path is None:
        raise click.UsageError("DMSG_AGENT is off, so agents are disabled: unset DMSG_AGENT to use one")
    return path


def _found() -> FoundAgent:
    try:
        found = find_agent(_path())
    except DmsgError as error:
        fail(error)
    if found is None:
        fail(NoAgent("no agent is up; start it with: dmsg up"))
    return found


@command()
@click.option("--foreground", "-f", is_flag=True, help="Stay in the foreground, for systemd and other supervisors.")
@click.option(
    "--log",
    "log_file",
    type=WrittenPath(dir_okay=False),
    help=(
        "File for the log.  Default in the background: ~/.local/state/dmsg/agent.log.  At 1 "
        "MiB the log is renamed FILE.1 and starts again."
    ),
)
@client_options_of(by_agent=None, loads=False)
def up(foreground: bool, log_file: str | None, settings: ClientSettings) -> None:
    """Start the agent: one process that holds your key and its connections.

    While the agent runs, other commands use its key and connections: they start faster, and several programs
    share one key, each with ports of its own. Without --key-file the agent uses the file `key` in the
    configuration directory, and creates it at its first start.

    \b
    Examples:
      dmsg up
      dmsg serve public &
      dmsg status
      dmsg down
    """
    path = _path()
    try:
        found = find_agent(path)
    except DmsgError as error:
        fail(error)
    if found is not None:
        named = key_in(settings.key_file)
        if settings.key_file is not None and named != found.key:
            fail(DmsgError(f"an agent is up with another key, {found.key.text}; stop it with: dmsg down"))
        tell(f"up already: {found.key.text} (process {found.pid})", up=str(found.key), pid=found.pid)
        return
    settings = default_key_file(settings)
    if not foreground:
        start(path, settings, Path(log_file or log_path()).absolute())
        return
    settings.load()
    try:
        log = None if log_file is None else Log(Path(log_file))
    except DmsgError as error:
        fail(error)

    from twisted.internet.defer import Deferred
    from twisted.internet.task import LoopingCall

    from dmsg.agent.service import Agent
    from dmsg.base.interpreter import return_freed_memory
    from dmsg.cli.client_run import run

    async def main(reactor: Reactor) -> None:
        down: Deferred[None] = Deferred()
        client = settings.make(reactor)

        def end() -> None:
            if not down.called:
                down.callback(None)

        agent = Agent(reactor, client, path, settings.discovery, end)
        agent.startService()
        return_freed_memory()  # The import of the modules left some free memory.
        if log is not None:
            looks = LoopingCall(log.rotate_if_long)
            looks.clock = reactor
            looks.start(CHECK_INTERVAL, now=False).addErrback(lambda _: None)
        tell(f"agent of {client.public_key.text} at {path}", agent=str(client.public_key), socket=str(path))
        try:
            await down
        finally:
            await agent.stopService()

    run(main, logs=True)


@command()
def down() -> None:
    """Stop the agent.  Commands that use the agent wait until it is started again."""
    found = _found()
    try:
        # The agent answers at once, but closes the connection only when it has stopped. list() reads until then.
        list(lines(found.path, {"do": "down"}, timeout=DOWN_TIME))
    except ConnectionError:
        pass
    except TimeoutError:
        fail(DmsgError(f"the agent (process {found.pid}) has not ended within {DOWN_TIME:g} s"))
    except (DmsgError, OSError) as error:
        fail(error)
    tell("down", down=str(found.key), pid=found.pid)


@command()
def status() -> None:
    """Show the agent's key, servers, services and streams.

    \b
    Examples:
      dmsg status
      watch dmsg status
    """
    found = _found()
    try:
        told = ask(found.path, {"do": "status"})
    except (DmsgError, OSError) as error:
        fail(error)
    if state.json:
        tell("", **told)
    else:
        from dmsg.cli.agent.status_run import show

        show(told)
    if told.get("state") != "online":
        say(f"dmsg: the agent is not online yet: {_text(told.get('waits_for'))}", err=True)
        raise SystemExit(EXIT_NOBODY)


def _text(value: object) -> str:
    return str(value or "a server")
