"""Command ``dmsg bench``: measures the throughput of acknowledged messages through the client API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.cli.access import Access, AllowOption, allow_option
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.output import tell
from dmsg.cli.params import PUBLIC_KEY, Seconds, client_options, timeout_option
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


SIZES = (64, 1024, 16 * 1024, 60_000)


@command()
@click.argument("public_key", type=PUBLIC_KEY, required=False)
@click.option("--serve", is_flag=True, help="Receive the messages that other 'dmsg bench' commands send.")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.IntRange(1, 10**7),
    help=f"Bytes per message; repeatable.  Default: {', '.join(map(str, SIZES))}.",
)
@click.option(
    "--seconds", default=2.0, show_default=True, type=Seconds(0.1, 3600), help="Seconds to measure each size."
)
@click.option(
    "--in-flight",
    default=64,
    show_default=True,
    type=click.IntRange(1, 8192),
    help="Number of unacknowledged messages at any time.",
)
@allow_option
@client_options
@timeout_option
def bench(
    public_key: PubKey | None,
    serve: bool,
    sizes: tuple[int, ...],
    seconds: float,
    in_flight: int,
    allow: tuple[AllowOption, ...],
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Measure the throughput of acknowledged messages.

    The messages go to PUBLIC_KEY, which must run ``dmsg bench --serve``. Without PUBLIC_KEY they go between two
    clients of this process through the servers of the network.

    \b
    Examples:
      dmsg bench
      dmsg bench --serve --key-file bob.key
      dmsg bench bob --size 1024 --seconds 10
    """

    from twisted.internet.defer import Deferred

    from dmsg.cli.client_run import listening_at, run, with_client
    from dmsg.cli.peers.bench_run import discard_factory, run_bench

    access = Access(allow)

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            if serve:
                await listening_at(client, discard_factory(access), access=access, offers="measurements")
                key = str(client.public_key)
                tell(f"serving at {client.public_key.text}", serving=key, **access.fields)
                access.show()
                await Deferred()
            elif public_key is not None:
                await run_bench(reactor, client, public_key, sizes or SIZES, seconds, in_flight, timeout)
            else:
                other = settings.with_own_key().make(reactor)
                other.listen(discard_factory())
                other.startService()
                try:
                    await other.when_published(timeout)
                    await run_bench(reactor, client, other.public_key, sizes or SIZES, seconds, in_flight, timeout)
                finally:
                    await other.stopService()

        await with_client(reactor, settings, use, published=serve)

    run(main)
