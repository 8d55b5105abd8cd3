"""Settings and key of a command's client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import click
from click.core import ParameterSource

from dmsg.base.cipher_names import AUTO
from dmsg.cli.loading import load
from dmsg.cli.output import notice
from dmsg.clients.server_choice import ServerChoice
from dmsg.keylock import hold_key, this_program
from dmsg.keys import SecKey, load_or_create_key

if TYPE_CHECKING:
    from dmsg.agent.socket_path import FoundAgent
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


RESUME_OF_NEW_KEYS = 30.0
"""Default seconds for which a stream of a client with a temporary key may be resumed."""


def client_key(key_file: str | None, *, create: bool = False, share: bool = False) -> SecKey:
    """Load the key of a file and lock it for this process; without a file return a temporary key.

    :param create: whether to create the file if it does not exist.
    :param share: whether another program on this machine may use the key at the same time.
    :raises KeyFileError: the file cannot be used, or another program uses the key.
    """
    if not key_file:
        return SecKey.generate()
    key = load_or_create_key(key_file, create=create)
    hold_key(key_file, this_command(), share=share)
    return key


def this_command() -> str:
    return this_program(*click.get_current_context().command_path.split()[1:])


@dataclass(frozen=True)
class ClientSettings:
    """Settings of a client, which the options of a command set."""

    discovery: tuple[str, ...]
    key_file: str | None
    choice: ServerChoice
    encryption: str
    resume_timeout: float
    receipts: bool
    create: bool = False
    share: bool = False
    cipher: str = AUTO
    agent: FoundAgent | None = None
    """Agent whose key and connections are used; None if the command is a client of its own."""

    def with_own_key(self) -> ClientSettings:
        """Return settings with a temporary key and without an agent.

        If the program is killed and started again, it gets another temporary key and cannot resume its streams.  The
        default time for resuming is therefore shorter. --resume overrides it.
        """
        ctx = click.get_current_context(silent=True)
        chosen = ctx is not None and ctx.get_parameter_source("resume_timeout") is not ParameterSource.DEFAULT
        resume_timeout = self.resume_timeout if chosen else min(self.resume_timeout, RESUME_OF_NEW_KEYS)
        return replace(self, key_file=None, agent=None, resume_timeout=resume_timeout)

    def load(self) -> None:
        """Import the modules that the client needs."""
        load("dmsg.cli.client_run", "dmsg.v2019.client" if self.agent is None else "dmsg.agent.client")

    def make(self, reactor: Reactor) -> Client:
        """Create the client: one of the command's own, or one that works through the agent.  It is not started yet."""
        if self.agent is not None:
            from dmsg.agent.client import AgentClient

            return cast("Client", AgentClient(reactor, self.agent, this_command(), on_warning=notice))
        from dmsg.v2019.client import Client

        return Client(
            reactor,
            client_key(self.key_file, create=self.create, share=self.share),
            self.discovery,
            self.choice,
            encryption=self.encryption,
            cipher=self.cipher,
            resume_timeout=self.resume_timeout,
            receipts=self.receipts,
            on_warning=notice,
        )
