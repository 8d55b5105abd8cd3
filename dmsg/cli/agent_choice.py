"""Decision whether a command works through the agent.  The agent must be running, with settings that suit the
command.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dmsg.agent.socket_path import AgentError, FoundAgent, find_agent
from dmsg.base.cipher_names import AUTO
from dmsg.base.timeouts import RESUME_TIMEOUT
from dmsg.cli.output import fail, notice
from dmsg.clients.server_choice import ServerChoice
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, read_key_file

if TYPE_CHECKING:
    from dmsg.agent.wire import Answer
    from dmsg.cli.client_settings import ClientSettings


def through_agent(settings: ClientSettings, *, able: bool = True) -> ClientSettings:
    """Return the settings of a command, with the running agent added if the command can work through the agent.

    :param able: whether the command can work through the agent.  If it cannot, it starts its own client.
        The client uses the agent's discovery if none is set.  If the agent already uses the client's key, the client
        gets a temporary key.
    """
    try:
        found = find_agent()
    except AgentError as error:
        notice(f"{error}; the command works without the agent")
        return settings
    if found is None:
        return settings
    named = key_in(settings.key_file)
    mine = (named is None and settings.key_file is None) or named == found.key
    if mine and not settings.discovery:
        settings = replace(settings, discovery=found.discovery)
    if not able:
        return settings.with_own_key() if named == found.key else settings
    return replace(settings, agent=found) if mine and _is_suitable(settings, found) else settings


def ask_agent(agent: FoundAgent, request: dict[str, object], timeout: float) -> Iterator[Answer]:
    """Send a request to the agent, and yield the lines of its answer.  No reactor is needed, so Ctrl-C ends the call at
    once.

    :param timeout: seconds to wait for each line of the answer.
    :raises SystemExit: the request failed; an error line was printed.
    """
    from dmsg.agent.socket_path import lines
    from dmsg.keylock import this_program

    try:
        yield from lines(agent.path, {**request, "program": this_program()}, timeout=timeout)
    except (DmsgError, OSError) as error:
        fail(error)


def key_in(path: str | None) -> PubKey | None:
    """Return the public key of a key file; None if the file is absent or is not a key file."""
    if path is not None:
        with suppress(DmsgError, OSError):
            return read_key_file(path).public
    return None


def _is_suitable(settings: ClientSettings, agent: FoundAgent) -> bool:
    """Whether the agent's connections satisfy the settings.

    They do if discovery and encryption in the settings are those of the agent, and the other settings are the defaults.
    """
    usual = (ServerChoice(), RESUME_TIMEOUT, False, False, AUTO)
    asked = (settings.choice, settings.resume_timeout, settings.receipts, settings.share, settings.cipher)
    same_network = set(settings.discovery) == set(agent.discovery)
    return same_network and asked == usual and settings.encryption == agent.encryption
