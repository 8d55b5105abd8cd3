"""Command ``dmsg demo``: runs a whole network on this machine.

Discovery with a SQLite store and two servers run as processes of their own.  Three clients run in this process.  All
use TCP.  The clients send each other files through each server.  One server is killed during a transfer, and the
transfer continues through the other server.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.cli.options import command

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor


FILE_SIZE = 4 * 1024 * 1024


@command()
@click.option(
    "--size", default=FILE_SIZE, show_default=True, type=click.IntRange(1024 * 1024, 2**30), help="Bytes per file."
)
def demo(size: int) -> None:
    """Run a whole network on this machine, in under a minute.

    The demo starts a discovery, two servers and three clients on loopback, sends files through each server,
    kills a server during a transfer, and prints what happened. It leaves no files and no processes behind.

    \b
    Example:
      dmsg demo
    """

    import tempfile

    from dmsg.cli.client_run import run
    from dmsg.cli.demos.network_run import Demo

    async def main(reactor: Reactor) -> None:
        with tempfile.TemporaryDirectory(prefix="dmsg-demo-") as directory:
            await Demo(reactor, Path(directory), size).run()

    run(main)
