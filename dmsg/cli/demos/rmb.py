"""Command ``dmsg rmb demo``: runs a whole message bus on this machine.

A registry, two federated relays, a Redis and three peers run as processes of their own.  A service in plain Python
answers calls over Redis.  The calls are encrypted and cross both relays.  One relay is stopped and restarted, and no
message is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dmsg.cli.options import command

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor


@command()
def demo() -> None:
    """Run a whole message bus on this machine: registry, relays, peers and services; needs redis-server."""

    import tempfile

    from dmsg.cli.client_run import run
    from dmsg.cli.demos.rmb_run import Demo

    async def main(reactor: Reactor) -> None:
        with tempfile.TemporaryDirectory(prefix="dmsg-rmb-") as directory:
            await Demo(reactor, Path(directory)).run()

    run(main)
