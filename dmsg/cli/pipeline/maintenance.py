"""Commands of ``dmsg analytics`` that maintain the tables: ``install``, ``optimize`` and ``forget``."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import click

from dmsg.base.units import counted
from dmsg.cli import output
from dmsg.cli.options import command
from dmsg.cli.pipeline.common import ARCHIVES, needs_spark, needs_tables, tables_option
from dmsg.directories import cache_directory
from dmsg.errors import DmsgError

SMALL_FILES = 2
"""Minimum number of small files of one table and day for which ``optimize`` merges them."""


@command()
@needs_spark
def install() -> None:
    """Make Spark start faster on this machine.

    Java writes an archive of the classes that Spark loads, about 180 MB in the cache directory. With the archive, a
    start takes half of the CPU time. Spark also works without it. Repeat the command after an update of Spark or Java.
    """
    from dmsg.analytics.class_archive import make_archive
    from dmsg.analytics.session import find_java

    archive = make_archive(cache_directory() / ARCHIVES, find_java())
    size = archive.stat().st_size
    output.tell(f"{archive}: {size // 1024**2:,} MiB", archive=str(archive), bytes=size)


@command()
@tables_option()
@needs_tables
def optimize(out: str) -> None:
    """Merge small files of the tables and remove unneeded ones; runs do this themselves from time to time."""
    from dmsg.analytics.store import LEFT_BEHIND_HOURS, Store

    store = Store(out)
    state = store.computed_state()
    with store.claim() as claim:
        removed = store.make_room(state, claim, SMALL_FILES, left_behind=LEFT_BEHIND_HOURS)
        store.finish(claim, replace(state, run=claim.number, at=claim.at))
    output.tell(f"{counted(removed, 'file')} removed", removed=removed)


@command()
@tables_option()
@click.option(
    "--before", required=True, type=click.DateTime(["%Y-%m-%d"]), metavar="DAY", help="Remove the days before this one."
)
@needs_tables
def forget(out: str, before: datetime) -> None:
    """Remove old days from all tables; needs no Java.

    Event files that were already read are not read again, even if they still exist. The disk space becomes free after
    eight days, when `--as-of` can no longer show the old state, or earlier with `dmsg analytics optimize`.
    """
    from dmsg.analytics.store import Store

    store = Store(out)
    state = store.computed_state()
    day = f"{before:%Y-%m-%d}"
    gone = [one for one in state.days if one < day]
    if len(gone) == len(state.days):
        raise DmsgError(
            f"nothing was removed: every day would be removed, because the newest is {max(state.days)}; name an "
            "earlier day, or delete the directory to remove all tables"
        )
    if gone:
        with store.claim() as claim:
            store.forget(claim, day)
    left = len(state.days) - len(gone)
    output.tell(f"{counted(len(gone), 'day')} forgotten, {counted(left, 'day')} left", forgotten=len(gone), left=left)
