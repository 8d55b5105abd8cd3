"""``dmsg top``."""

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
@click.argument("urls", metavar="URL...", nargs=-1, required=True, type=URLType())
@click.option("--every", default=2.0, show_default=True, type=Seconds(0.5, 3600), help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Look twice, print the table, and end.")
@click.option("--sort", default="problem", show_default=True, type=click.Choice(SORTS), help="What comes first.")
@click.option("--only", "wanted", default="", metavar="TEXT", help="Only rows in which this text is.")
@click.option("--timeout", default=3.0, show_default=True, type=Seconds(0.1, 60), help="Seconds for an answer.")
def top(urls: tuple[str, ...], every: float, once: bool, sort: str, wanted: str, timeout: float) -> None:
    """Watch a fleet: what is wrong first.

    URL is where an entity has its --metrics: of servers, discovery, collectors
    and relays of the bus.  With --json each look is one object per entity.

    \b
    Examples:
      dmsg top http://127.0.0.1:9100 http://relay2.example.org:9100
      dmsg top --once --sort bytes http://127.0.0.1:9100
    """
    load("dmsg.cli.running", "dmsg.cli.fleet.watching")

    from dmsg.cli.fleet.watching import watch
    from dmsg.cli.running import run

    async def main(reactor: Reactor) -> None:
        flat = list(dict.fromkeys(url.rstrip("/") for one in urls for url in one.split()))
        await watch(reactor, flat, every=every, once=once, sort=sort, wanted=wanted, timeout=timeout)

    run(main)
