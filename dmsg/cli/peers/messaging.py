"""Command ``dmsg messaging``: uses the Messaging System, the predecessor of dmsg."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import click

from dmsg.base.units import milliseconds
from dmsg.cli.access import Access, AllowOption, allow_option
from dmsg.cli.client_settings import client_key
from dmsg.cli.loading import load
from dmsg.cli.options import group
from dmsg.cli.output import notice, tell
from dmsg.cli.params import (
    PUBLIC_KEY,
    Seconds,
    create_option,
    discovery_option,
    key_option,
    only_option,
    prefer_option,
    servers_option,
    share_option,
    split_urls,
    timeout_option,
)
from dmsg.cli.peers.pipe import wait_option
from dmsg.clients.server_choice import ServerChoice
from dmsg.errors import ConnectFailed, DmsgTimeout
from dmsg.keys import PubKey
from dmsg.messaging.core.dialect import ACKS, IDS
from dmsg.messaging.core.wire import Profile

if TYPE_CHECKING:
    from dmsg.messaging.client import Client
    from dmsg.net.reactor import Reactor


@dataclass(frozen=True)
class MessagingSettings:
    """Settings of a client of the Messaging System, which the options of a command set."""

    discovery: tuple[str, ...]
    key_file: str | None
    choice: ServerChoice
    profile: Profile
    create: bool = False
    share: bool = False
    acks: str = "auto"
    ids: str = "one"

    def make(self, reactor: Reactor) -> Client:
        """Create the client.  It is not started yet."""
        from dmsg.messaging.client import Client

        return Client(
            reactor,
            client_key(self.key_file, create=self.create, share=self.share),
            self.discovery,
            self.choice,
            profile=self.profile,
            acks=ACKS[self.acks],
            two_ids=IDS[self.ids],
            on_warning=notice,
        )


profile_option = click.option(
    "--profile",
    default=Profile.SEED.value,
    show_default=True,
    type=click.Choice([one.value for one in Profile]),
    help="Dialect of the servers and of the peer; skywire is that of the Go code of March 2019.",
)


acks_option = click.option(
    "--acks",
    default="auto",
    show_default=True,
    type=click.Choice(list(ACKS)),
    help=(
        "With --profile skywire: whether the Go program acknowledges data, as Go programs did until "
        "2019-04-15; auto decides by its first frame."
    ),
)
ids_option = click.option(
    "--ids",
    default="one",
    show_default=True,
    type=click.Choice(list(IDS)),
    help="With --profile skywire: number of ids in ChannelOpened. Go programs since 2019-03-13 expect two.",
)


def messaging_options(command: Callable[..., object]) -> Callable[..., object]:
    """Decorate a command with the options that all commands of ``dmsg messaging`` share.  The command gets their values
    as the argument ``settings``.
    """

    @functools.wraps(command)
    def with_settings(
        discovery: tuple[str, ...],
        key_file: str | None,
        min_servers: int,
        profile: str,
        acks: str,
        ids: str,
        prefer: tuple[PubKey, ...],
        only: tuple[PubKey, ...],
        create: bool,
        share: bool,
        **others: object,
    ) -> object:
        if profile == Profile.SEED.value and (ACKS[acks] or IDS[ids]):
            raise click.UsageError("--acks and --ids need --profile skywire")
        load("dmsg.cli.client_run")
        choice = ServerChoice(min_servers=min_servers, prefer=prefer, only=only)
        settings = MessagingSettings(
            split_urls(discovery), key_file, choice, Profile(profile), create, share, acks, ids
        )
        return command(settings=settings, **others)

    wrapped: Callable[..., object] = with_settings
    for option in (
        only_option,
        prefer_option,
        ids_option,
        acks_option,
        profile_option,
        servers_option,
        share_option,
        create_option,
        key_option,
        discovery_option,
    ):
        wrapped = option(wrapped)
    return wrapped


@group()
def messaging() -> None:
    """Use the Messaging System, the predecessor of dmsg.

    Its servers run as `twistd dmsg-messaging-server`. Do not use the key of a dmsg client: the entry of a key in
    discovery can belong to only one of the two protocols.
    """


@messaging.command()
@allow_option
@messaging_options
@wait_option
def listen(allow: tuple[AllowOption, ...], settings: MessagingSettings, wait: float) -> None:
    """Accept one channel and connect it to standard input and output.

    \b
    Example:
      dmsg messaging listen --key-file bob.key -w 60 > received
    """

    from dmsg.cli.client_run import run, with_client
    from dmsg.cli.peers.pipe_run import take_one

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            await take_one(reactor, client, wait, Access(allow))

        await with_client(reactor, settings, use, published=True)

    run(main)


@messaging.command()
@click.argument("public_key", type=PUBLIC_KEY)
@messaging_options
@timeout_option
@wait_option
def connect(public_key: PubKey, settings: MessagingSettings, timeout: float, wait: float) -> None:
    """Open a channel to PUBLIC_KEY and connect it to standard input and output.

    \b
    Example:
      echo hello | dmsg messaging connect akvy...
    """

    from dmsg.cli.client_run import run, with_client
    from dmsg.cli.peers.pipe_run import open_one

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            await open_one(reactor, client, public_key, timeout, wait)

        await with_client(reactor, settings, use, peer=public_key)

    run(main)


@messaging.command()
@click.argument("public_key", type=PUBLIC_KEY)
@click.option("--count", "-c", default=5, show_default=True, type=click.IntRange(1, 10**6), help="Number of pings.")
@click.option("--interval", "-i", default=0.2, show_default=True, type=Seconds(0, 3600), help="Seconds between pings.")
@messaging_options
@timeout_option
def ping(public_key: PubKey, count: int, interval: float, settings: MessagingSettings, timeout: float) -> None:
    """Measure the time to open a channel to PUBLIC_KEY.

    The protocol has no acknowledgements, so the measured time is one round trip through the server plus the key
    agreement of both ends. The peer's client answers; its program need not listen. If the peer is a Go client, its
    program sees channels open and close.

    \b
    Example:
      dmsg messaging ping akvy... -c 10
    """

    from twisted.internet.task import deferLater

    from dmsg.cli.client_run import run, with_client
    from dmsg.net.streams.transports import stream_of

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            times = []
            for number in range(1, count + 1):
                started = reactor.seconds()
                try:
                    stream = stream_of(await client.probe(public_key, timeout=timeout))
                except (ConnectFailed, DmsgTimeout) as error:
                    tell(f"{number}: {error}", number=number, error=str(error))
                else:
                    times.append(reactor.seconds() - started)
                    server = cast(PubKey, stream.server)
                    text = f"{number}: {milliseconds(times[-1])} through {server.short}"
                    tell(text, number=number, seconds=times[-1], server=str(server))
                    stream.loseConnection()
                if number < count:
                    await deferLater(reactor, interval)
            lost = count - len(times)
            text = ""
            if times:
                low, mean, high = min(times), sum(times) / len(times), max(times)
                text = f"; min {milliseconds(low)}, mean {milliseconds(mean)}, max {milliseconds(high)}"
            tell(f"{count} tried, {lost} failed{text}", tried=count, failed=lost)
            if lost:
                raise SystemExit(1)

        await with_client(reactor, settings, use)

    run(main)
