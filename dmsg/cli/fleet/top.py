"""Command ``dmsg top``: watches entities by their metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.cli.loading import load
from dmsg.cli.options import command
from dmsg.cli.params import Seconds, URLType

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor

SORTS = ("problem", "name", "clients", "rate", "bytes", "refused", "slowest", "memory")


@command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True, type=URLType(by_name=False))
@click.option("--every", default=2.0, show_default=True, type=Seconds(0.5, 3600), help="Seconds between two queries.")
@click.option("--once", is_flag=True, help="Query twice, print the table and exit.")
@click.option("--sort", default="problem", show_default=True, type=click.Choice(SORTS), help="Column to sort by.")
@click.option("--only", "wanted", default="", metavar="TEXT", help="Show only rows that contain this text.")
@click.option("--timeout", default=3.0, show_default=True, type=Seconds(0.1, 60), help="Seconds to wait for an answer.")
def top(urls: tuple[str, ...], every: float, once: bool, sort: str, wanted: str, timeout: float) -> None:
    """Watch servers, discoveries and other entities, problems first.

    URL is the --metrics endpoint of a server, a discovery, a collector or a relay of the bus. With --json each
    query prints one object per entity.

    \b
    Examples:
      dmsg top http://127.0.0.1:9100 http://relay2.example.org:9100
      dmsg top --once --sort bytes http://127.0.0.1:9100
    """
    load("dmsg.cli.client_run", "dmsg.cli.fleet.top_run")

    from dmsg.cli.client_run import run
    from dmsg.cli.fleet.top_run import watch

    async def main(reactor: Reactor) -> None:
        flat = list(dict.fromkeys(url.rstrip("/") for one in urls for url in one.split()))
        await watch(reactor, flat, every=every, once=once, sort=sort, name_filter=wanted, timeout=timeout)

    run(main)
