"""Command ``dmsg analytics send``: sends event files to a collector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.base.units import counted, human_size
from dmsg.cli.options import WrittenPath, command
from dmsg.cli.output import notice, tell
from dmsg.cli.params import AddressType, discovery_option, split_urls
from dmsg.collector.wire import PORT
from dmsg.errors import DmsgError

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.address import DmsgAddress


@command()
@click.argument("spool", type=WrittenPath(exists=True, file_okay=False, path_type=Path))
@click.argument("collector", metavar="PUBLIC_KEY[:PORT]", type=AddressType(PORT))
@discovery_option
def send(spool: Path, collector: DmsgAddress, discovery: tuple[str, ...]) -> None:
    """Send the finished event files in SPOOL to a collector, and remove those that it has stored.

    Servers send their files themselves with --telemetry-to. Use this command for the files of a server that no
    longer runs or that has no collector. The command signs with SPOOL/sender.key, which is created if it does
    not exist. The collector must have this key on its list (`dmsg key show` prints the key).

    \b
    Example:
      dmsg analytics send /var/lib/dmsg/spool akvy... -d http://discovery.example.org:9090
    """
    from dmsg.cli.client_run import run
    from dmsg.collector.sender import SpoolSender
    from dmsg.telemetry.spool import recover

    async def main(reactor: Reactor) -> None:
        recover(spool)
        sender = SpoolSender(reactor, spool, collector, lambda: split_urls(discovery), on_warning=notice)
        sent = await sender.send_once()
        if sent.delivered:
            tell(
                f"{counted(sent.delivered, 'file')}, {human_size(sent.delivered_bytes)}",
                files=sent.delivered,
                bytes=sent.delivered_bytes,
            )
        elif not sent.refused:
            tell("there is nothing to be sent", files=0, bytes=0)
        if sent.refused:
            raise DmsgError(
                f"files that the collector refused for the reasons above: {sent.refused}; they stay in {spool}"
            )

    run(main)
