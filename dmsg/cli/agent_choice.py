"""Whether a command works through the agent: where one is up that has what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dmsg.agent.socket_path import AgentError, FoundAgent, find_agent
from dmsg.cli.output import fail, notice
from dmsg.clients.server_choice import ServerChoice
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, read_key_file
from dmsg.streams.timeouts import RESUME_TIMEOUT

if TYPE_CHECKING:
    from dmsg.agent.wire import Answer
    from dmsg.cli.client_settings import ClientSettings


def through_agent(settings: ClientSettings, *, able: bool = True) -> ClientSettings:
    """The settings with the agent that suits them; without one as they are.

    :param able: the agent can do what the command needs; else only what it knows of discovery is used, and a key of
        its own instead of the agent's, which is in use.
    """
    try:
        found = find_agent()
    except AgentError as error:
        notice(f"{error}; working without it")
        return settings
    if found is None:
        return settings
    named = key_in(settings.key_file)
    mine = (named is None and settings.key_file is None) or named == found.key
    if mine and not settings.discovery:
        settings = replace(settings, discovery=found.discovery)
    if not able:
        return settings.alone() if named == found.key else settings
    return replace(settings, agent=found) if mine and _suits(settings, found) else settings


def ask_agent(agent: FoundAgent, request: dict[str, object], patience: float) -> Iterator[Answer]:
    """Send a request to the agent and return its answer, without a reactor; Ctrl-C ends the call at once.

    :param patience: seconds without a word of it.
    :raises SystemExit: it failed; the line that says so is printed.
    """
    from dmsg.agent.socket_path import lines
    from dmsg.keylock import this_program

    try:
        yield from lines(agent.path, {**request, "program": this_program()}, patience=patience)
    except (DmsgError, OSError) as error:
        fail(error)


def key_in(path: str | None) -> PubKey | None:
    """The public key of a key file; None: there is no such file, or it is none."""
    if path is not None:
        with suppress(DmsgError, OSError):
            return read_key_file(path).public
    return None


def _suits(settings: ClientSettings, found: FoundAgent) -> bool:
    """Nothing is asked of the connection that the agent's may not have."""
    usual = (ServerChoice(), RESUME_TIMEOUT, False, False)
    asked = (settings.choice, settings.resume_timeout, settings.receipts, settings.share)
    same_network = set(settings.discovery) == set(found.discovery)
    return same_network and asked == usual and settings.encryption == found.encryption
