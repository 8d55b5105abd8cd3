"""``dmsg rmb demo``: a whole message bus on this machine.

A registry, two relays that federate, a Redis and three peers, each a process
of its own; a service that is plain Python over Redis; calls across relays,
encrypted; and one relay that is stopped and started with nothing lost.
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
