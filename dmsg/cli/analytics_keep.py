"""``dmsg analytics``: the commands that keep tables in order."""

from __future__ import annotations

from typing import Any

import click

from dmsg.cli.analytics_common import directory_option, needs_spark, out_option, progress, session, spark_options
from dmsg.cli.options import command

SMALL_FILES = 2
"""Of one kind and day, from which on they are merged when somebody asks for it."""


@command()
@out_option()
@needs_spark
def optimize(out: str) -> None:
    """Merge small files and remove what is not needed; runs do so themselves, now and then."""
    from dmsg.analytics.store import Store

    store = Store(out)
    state = store.computed()
    with store.claim():
        removed = store.tidy(state, SMALL_FILES) + store.sweep()
    click.echo(f"{removed:,} files removed")


@command()
@directory_option("--from", "Directory or URI of tables of an older dmsg; nothing in it is changed.")
@out_option("Where the new ones go.")
@spark_options
@needs_spark
def migrate(**options: Any) -> None:
    """Take over the tables of an older dmsg.

    What was read is copied, and everything else made anew from it.  --from may
    be removed afterwards.
    """
    from dmsg.analytics.migrate import migrate as take_over

    old, out = options["from"], options["out"]
    with progress() as tell:
        tell("starting Spark", 0, None)
        with session(options["master"], options["memory"], options["conf"], quick=False) as spark:
            outcome = take_over(spark, old, out, tell)
    click.echo(f"{outcome.events:,} events, {len(outcome.days)} days written to {out}")
