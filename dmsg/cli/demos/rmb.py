"""Command ``dmsg rmb demo``: runs a whole message bus on this machine.

A registry, two federated relays, a Redis and three peers run as processes.  A service is plain Python over Redis.
Calls cross relays, encrypted, and one relay is stopped and restarted without losing a message.
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
