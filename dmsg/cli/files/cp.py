"""Command ``dmsg cp``: copies files to and from a peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.cli.access import (
    Access,
    AllowOption,
    accepting_options,
    check_offered,
    check_takes,
    hidden_option,
    max_total_option,
)
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.completion_values import complete_copied
from dmsg.cli.options import DIRECTORY, command
from dmsg.cli.output import tell
from dmsg.cli.params import Seconds, client_options, port_option

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


PORT = 24
"""Default port of ``dmsg cp --listen``."""


@command()
@click.argument("sources", nargs=-1, shell_complete=complete_copied)
@click.argument("target", required=False, shell_complete=complete_copied)
@click.option("--recursive", "-r", is_flag=True, help="Copy directories and their contents.")
@click.option(
    "--listen",
    "-l",
    "directory",
    type=DIRECTORY,
    help="Offer the files of this directory to peers; the directory is created if its parent exists.",
)
@click.option("--writable", is_flag=True, help="With --listen: accept files from peers.")
@click.option("--overwrite", is_flag=True, help="With --listen: overwrite existing files.")
@click.option("--max-size", type=click.IntRange(0), metavar="BYTES", help="With --listen: refuse larger files.")
@max_total_option
@port_option(PORT, "dmsg cp --listen")
@click.option(
    "--retry",
    default=60.0,
    show_default=True,
    type=Seconds(0, 86400),
    metavar="SECONDS",
    help="Seconds to keep trying when the peer is unreachable.",
)
@hidden_option
@accepting_options
@client_options
def cp(
    sources: tuple[str, ...],
    target: str | None,
    recursive: bool,
    directory: Path | None,
    writable: bool,
    overwrite: bool,
    max_size: int | None,
    max_total: int | None,
    port: int,
    retry: float,
    hidden: bool,
    allow: tuple[AllowOption, ...],
    anyone: bool,
    anything: bool,
    settings: ClientSettings,
) -> None:
    """Copy files to and from a peer where ``dmsg cp --listen`` runs.

    Files whose names begin with a dot are not copied in either direction without --hidden. Keys and settings of
    dmsg are never copied.

    Repeat the command to resume an interrupted copy: both ends compare the SHA-256 of the part that exists. A
    fetched file overwrites a local file of the same name, as with cp(1). A copy from peer to peer goes through
    this machine, which needs free space for the files.

    \b
    Examples:
      dmsg cp --listen inbox --writable --allow bob --key-file alice.key
      dmsg cp film.mkv alice:
      dmsg cp alice:notes/today.txt .
      dmsg cp -r photos alice:
      dmsg cp alice:film.mkv bob:
    """

    from dmsg.apps.copy_listener import CopyPeer
    from dmsg.apps.intake import intake_of
    from dmsg.cli.client_run import listening_at, run, serve_until_interrupted, with_client
    from dmsg.cli.files.cp_run import CopyFactory, copy_one, jobs_of
    from dmsg.cli.files.staging import stage, stage_of
    from dmsg.clients.address_book import AddressBook

    if (directory is None) == (target is None):
        raise click.UsageError("either SOURCE... TARGET or --listen DIRECTORY is needed")
    access = Access(allow)
    if directory is not None:
        check_offered(directory, any_directory=anything)
        if writable:
            check_takes(access, anyone=anyone, option="--writable")

    async def main(reactor: Reactor) -> None:
        async def listen(client: Client) -> None:
            assert directory is not None
            busy: dict[Path, CopyPeer] = {}
            intake = intake_of(reactor, max_total, AddressBook().has_key, anyone=anyone) if writable else None

            def make() -> CopyPeer:
                return CopyPeer(
                    reactor,
                    directory,
                    writable=writable,
                    overwrite=overwrite,
                    hidden=hidden,
                    max_size=max_size,
                    busy=busy,
                    intake=intake,
                )

            offers = f"files of {directory.absolute()}" + (", and accepts files" if writable else "")
            listening = await listening_at(
                client, CopyFactory(make, access, intake, reactor.seconds), port, access=access, offers=offers
            )
            at = str(client.public_key)
            tell(
                f"{directory} is at {client.public_key.text}:",
                directory=str(directory),
                at=at,
                writable=writable,
                **access.fields,
            )
            access.show()
            if intake is not None:
                intake.start()
            try:
                await serve_until_interrupted(listening)
            finally:
                if intake is not None:
                    intake.stop()

        if directory is not None:
            await with_client(reactor, settings, listen, published=True)
            return
        assert target is not None
        place = stage_of(sources, target)

        async def copy(client: Client) -> None:
            for job in jobs:
                await copy_one(reactor, client, job, port, retry)

        with stage(place):
            jobs = jobs_of(sources, target, recursive=recursive, stage=place, hidden=hidden)
            await with_client(reactor, settings, copy, peer=jobs[0].peer)

    run(main)
