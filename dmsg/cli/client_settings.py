"""Settings of the client that a command runs, and its key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import click
from click.core import ParameterSource

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
"""Seconds for which a stream between keys of one run waits for another way, unless --resume says otherwise."""


def client_key(key_file: str | None, *, create: bool = False, share: bool = False) -> SecKey:
    """The one in the file, which is in use from now on; without a file one for this run.

    :param create: make the file if it is absent.
    :param share: another program on this machine may use it too.
    :raises KeyFileError: it cannot be used, or another program uses it.
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
    """Settings of a client, taken from the options."""

    discovery: tuple[str, ...]
    key_file: str | None
    choice: ServerChoice
    encryption: str
    resume_timeout: float
    receipts: bool
    create: bool = False
    share: bool = False
    agent: FoundAgent | None = None
    """The agent whose key and connections are used; None: the command has its own."""

    def alone(self) -> ClientSettings:
        """The same with a key of its own, for this run: who was killed cannot come back with such a key."""
        ctx = click.get_current_context(silent=True)
        chosen = ctx is not None and ctx.get_parameter_source("resume_timeout") is not ParameterSource.DEFAULT
        patience = self.resume_timeout if chosen else min(self.resume_timeout, RESUME_OF_NEW_KEYS)
        return replace(self, key_file=None, agent=None, resume_timeout=patience)

    def load(self) -> None:
        """Load what the client needs."""
        load("dmsg.cli.client_run", "dmsg.v2019.client" if self.agent is None else "dmsg.agent.client")

    def make(self, reactor: Reactor) -> Client:
        """A client, not started: the command's own, or what it has of the agent, which does for it as well."""
        if self.agent is not None:
            from dmsg.agent.client import AgentClient

            return cast("Client", AgentClient(reactor, self.agent, this_command(), warned=notice))
        from dmsg.v2019.client import Client

        return Client(
            reactor,
            client_key(self.key_file, create=self.create, share=self.share),
            self.discovery,
            self.choice,
            encryption=self.encryption,
            resume_timeout=self.resume_timeout,
            receipts=self.receipts,
            warned=notice,
        )
