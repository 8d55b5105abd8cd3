"""Command group ``dmsg analytics``: the commands that run the data pipeline."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.base.memory import usable_memory
from dmsg.base.units import counted
from dmsg.cli import output
from dmsg.cli.options import WRITTEN_DIRECTORY, WRITTEN_FILE, group
from dmsg.cli.params import Seconds
from dmsg.cli.pipeline.common import (
    directory_option,
    errors_in_one_line,
    local_directory,
    local_directory_option,
    make_output_directory,
    needs_spark,
    progress,
    session,
    session_on_demand,
    spark_options,
    spark_when_option,
    tables_option,
)
from dmsg.cli.pipeline.explain import explain
from dmsg.cli.pipeline.maintenance import forget, install, optimize
from dmsg.cli.pipeline.receipt_workers import spark_workers
from dmsg.cli.pipeline.self_dealing import self_dealing
from dmsg.cli.pipeline.send import send
from dmsg.cli.pipeline.show import name, rank, report, tables, top
from dmsg.cli.pipeline.sql import sql
from dmsg.cli.pipeline.statement import statement, verify_statement
from dmsg.cli.pipeline.watch import attention, watch
from dmsg.errors import DmsgError, WrongUse

RECEIPTS = "receipts"
"""Directory for verified receipts, inside the directory of the tables."""
SMALL_SIMULATION = 300_000
"""Maximum number of transports of a simulation for which Spark is configured for little work."""

receipts_option = directory_option(
    "--receipts", "Directory of verified receipts.  Default: verify the receipts in the spool.", required=False
)
clear_keys_option = click.option(
    "--clear-keys", is_flag=True, help="Store the public keys of receipt signers in the tables instead of pseudonyms."
)

if TYPE_CHECKING:
    from dmsg.analytics.jobs import RunOutcome
    from dmsg.analytics.session import Load, Spark
    from dmsg.net.reactor import Reactor
    from dmsg.telemetry.spool_listing import Left
    from dmsg.telemetry.verify import Verification


def _load_of(spool: str, receipts: str | None, out: str) -> Load:
    """Return the expected amount of work of a run, estimated from the sizes of the files that it may read.  Receipts
    that are not verified yet do not count.
    """
    from dmsg.analytics.listing import DirectoriesRead, recent_bytes
    from dmsg.analytics.main import sources
    from dmsg.analytics.session import Load
    from dmsg.analytics.store import Store

    tables = local_directory(out)
    if receipts is None and tables is not None and (tables / RECEIPTS).is_dir():
        receipts = str(tables / RECEIPTS)
    read = DirectoriesRead(tables, Store(out).state().run)
    sizes = [recent_bytes(source, read) for source in sources(spool, receipts)]
    return Load.of_files(None if None in sizes else sum(filter(None, sizes)))


def _check_receipts(spool: str, out: str, *, clear: bool, spark: Spark | None) -> tuple[str | None, Verification]:
    """Verify new receipts.

    :param spark: Spark whose tasks verify the signatures; None for processes of this machine.
    :param clear: whether to store public keys instead of pseudonyms.
    :returns: directory of the verified receipts, and the result of the verification.  If the spool or the directory of
        the tables is not on this machine, nothing is verified, and the directory is None.
    """
    from dmsg.telemetry.pseudonyms import Pseudonyms, load_or_create_secret
    from dmsg.telemetry.verify import Verification, verify_spool

    source, tables = local_directory(spool), local_directory(out)
    if source is None or tables is None:
        return None, Verification()
    make_output_directory(tables)
    target = tables / RECEIPTS
    names = Pseudonyms(load_or_create_secret(tables), clear=clear)
    checked = verify_spool(source, target, names, workers=None if spark is None else spark_workers(spark))
    return str(target), checked


def _check_separate(spool: str, out: str) -> None:
    """Check that the tables are not inside the spool, where their files would be read as events."""
    source, tables = local_directory(spool), local_directory(out)
    if source is not None and tables is not None and tables.resolve().is_relative_to(source.resolve()):
        raise WrongUse(f"--out {out} is inside --spool {spool}")


@group(context_settings={"help_option_names": ["-h", "--help"]})
def analytics() -> None:
    """Compute and show tables of what the network did, on Spark.

    Servers and other entities write events with --telemetry DIR. These commands compute tables from the events
    and show the tables. They need Java 17 and dmsg's extra "spark", unless their help says otherwise.

    \b
    Examples:
      dmsg analytics simulate --out sim
      dmsg analytics run --spool sim/spool --receipts sim/checked --out tables
      dmsg analytics report --out tables --html report.html
      dmsg analytics top --out tables
    """


@analytics.command()
@directory_option("--spool", "Directory or URI with the events of the entities; subdirectories are read too.")
@tables_option()
@receipts_option
@clear_keys_option
@spark_when_option
@spark_options
@needs_spark
def run(
    spool: str,
    out: str,
    receipts: str | None,
    clear_keys: bool,
    when: str,
    master: str | None,
    memory: str,
    conf: tuple[str, ...],
) -> None:
    """Read new events and update all tables."""
    from dmsg.analytics import main as jobs
    from dmsg.telemetry.verify import Verification

    started = time.monotonic()
    checked = Verification()
    for uri in (spool, receipts):
        if uri is not None and (there := local_directory(uri)) is not None and not there.is_dir():
            raise WrongUse(f"{uri} is not a directory")
    _check_separate(spool, out)
    jobs.check_free(out)
    load = _load_of(spool, receipts, out)
    with progress() as tell, session_on_demand(master, memory, conf, load, always=when == "always") as spark:
        tell("checking receipts", 0, None)
        if receipts is None:
            by_spark = not spark.is_local or spark.is_wanted
            receipts, checked = _check_receipts(spool, out, clear=clear_keys, spark=spark if by_spark else None)
        outcome = jobs.run(spark, spool, receipts, out, tell, checked.left, usable_memory())
    _say_left(outcome.left)
    if checked.refused:
        why = ", ".join(f"{count:,} {reason}" for reason, count in checked.reasons.most_common(5))
        click.echo(f"{checked.refused:,} receipts are not believed: {why}", err=True)
    seconds = time.monotonic() - started
    fields = {**_fields(outcome), "seconds": seconds, "receipts_refused": checked.refused}
    output.tell(f"{_outcome_text(outcome)}, {seconds:.0f} s", **fields)


def _fields(outcome: RunOutcome) -> dict[str, object]:
    """Return the fields of a run's result for ``--json``."""
    return {
        "run": outcome.state.run,
        "events": outcome.events,
        "days": len(outcome.days),
        "duplicates": outcome.duplicates,
        "quarantined": outcome.quarantined,
        "torn_files": outcome.torn_files,
        "files_not_read": sum(count for count, _ in outcome.left.values()),
    }


def _say_left(left: Left) -> None:
    """Print a line for each reason why files could not be read."""
    from dmsg.telemetry.spool_listing import left_lines

    for line in left_lines(left):
        output.say(f"dmsg: {line}", err=True)


def _outcome_text(outcome: RunOutcome) -> str:
    if not outcome.events and not outcome.quarantined and not outcome.torn_files:
        return f"run {outcome.state.run}: nothing is new"
    parts = [
        f"run {outcome.state.run}: {counted(outcome.events, 'event')}",
        f"{counted(len(outcome.days), 'day')} written",
    ]
    for count, text in (
        (outcome.duplicates, "events came twice"),
        (outcome.quarantined, "lines in quarantine"),
        (outcome.torn_files, "files with a problem"),
    ):
        if count:
            parts.append(f"{count:,} {text}")
    return ", ".join(parts)


@contextlib.contextmanager
def _one_stream(out: str) -> Iterator[None]:
    """Context manager that prevents a second stream over the same tables, because Spark's checkpoints allow only one.
    Only a stream on this machine is prevented, and only if the tables are in a local directory.

    Runs are still possible, between two batches of the stream.
    """
    directory = local_directory(out)
    if directory is None:
        yield
        return
    import fcntl

    make_output_directory(directory)
    with open(directory / ".stream.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DmsgError(f"another stream writes to {out}: stop it first, or name another directory") from None
        yield


@contextlib.contextmanager
def ends_with_java(stop: threading.Event) -> Iterator[None]:
    """Context manager that ignores the end of Spark's Java once ``stop`` is set. A service manager sends SIGTERM to all
    processes of a service, so Java can end first.
    """
    from py4j.protocol import Py4JError

    try:
        yield
    except (ConnectionError, Py4JError):
        if not stop.is_set():
            raise


@analytics.command()
@directory_option("--spool", "Directory or URI into which entities write events.")
@tables_option()
@receipts_option
@clear_keys_option
@click.option(
    "--every",
    default=30,
    show_default=True,
    type=click.IntRange(1, 3600),
    help="Seconds between two checks for new files.",
)
@click.option(
    "--html",
    type=WRITTEN_FILE,
    help="HTML file to which the report is written after each batch.",
)
@spark_options
@needs_spark
def stream(
    spool: str,
    out: str,
    receipts: str | None,
    clear_keys: bool,
    every: int,
    html: Path | None,
    master: str | None,
    memory: str,
    conf: tuple[str, ...],
) -> None:
    """Read new events continuously until Ctrl-C, and update the tables after each batch."""
    from dmsg.analytics import main as jobs

    stop = threading.Event()
    own = receipts is None
    if (there := local_directory(spool)) is not None:
        if not there.is_dir():
            raise WrongUse(f"{spool} is not a directory")
        if set(str(there.absolute())) & set("*?[]{}"):
            raise WrongUse(f"a stream cannot read from {spool}, because its path has one of * ? [ ] {{ }}")
    _check_separate(spool, out)
    looked = time.monotonic()

    def check() -> None:
        nonlocal looked
        if own and receipts is not None and time.monotonic() - looked >= every:
            _check_receipts(spool, out, clear=clear_keys, spark=spark)
            looked = time.monotonic()

    load = _load_of(spool, receipts, out)
    with _one_stream(out), ends_with_java(stop), session(master, memory, conf, load) as spark:
        if receipts is None:
            receipts, _ = _check_receipts(spool, out, clear=clear_keys, spark=spark)
        # The signal handlers are set after Spark has started, because Spark replaces them at its start. Before, a
        # signal ends the process at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())

        known: Left = {}

        def told(outcome: RunOutcome) -> None:
            nonlocal known
            if outcome.left != known:
                known = outcome.left
                _say_left(known)
            output.tell(f"{datetime.now(UTC):%H:%M:%S} {_outcome_text(outcome)}", **_fields(outcome))
            if html is not None and outcome.state.days:
                jobs.write_report(out, html)

        jobs.stream(spark, spool, receipts, out, f"{every} seconds", told, stop, check, usable_memory())


@analytics.command()
@local_directory_option("--spool", "Directory with the events and receipts of servers and other entities.", exists=True)
@local_directory_option("--out", "Directory for the verified receipts.")
@clear_keys_option
@errors_in_one_line
def verify(spool: Path, out: Path, clear_keys: bool) -> None:
    """Verify the signatures of receipts, for a later run on another machine.

    For each file of the spool, a file of verified receipts is written into --out. Use that directory as --receipts of
    `dmsg analytics run`.
    """
    from dmsg.telemetry.pseudonyms import Pseudonyms, load_or_create_secret
    from dmsg.telemetry.spool_listing import merge
    from dmsg.telemetry.verify import verify_spool

    make_output_directory(out)
    checked = verify_spool(spool, out, Pseudonyms(load_or_create_secret(out), clear=clear_keys))
    _say_left(merge([checked.left]))
    text = f"{checked.files} files: {checked.believed:,} receipts are valid, {checked.refused:,} are not"
    output.tell(text, files=checked.files, believed=checked.believed, refused=checked.refused)


@analytics.command()
@local_directory_option("--out", "Directory for the events.")
@click.option(
    "--transports",
    default=100_000,
    show_default=True,
    type=click.IntRange(1, 10**9),
    help="Number of transports to simulate.",
)
@click.option(
    "--servers", default=20, show_default=True, type=click.IntRange(1, 10_000), help="Number of servers to simulate."
)
@click.option(
    "--clients", default=2_000, show_default=True, type=click.IntRange(1, 10**7), help="Number of clients to simulate."
)
@click.option("--days", default=3, show_default=True, type=click.IntRange(1, 3650), help="Number of days to simulate.")
@click.option("--last-day", type=click.DateTime(["%Y-%m-%d"]), help="Last simulated day.  Default: yesterday.")
@click.option(
    "--seed",
    default=1,
    show_default=True,
    type=int,
    help="Seed of the random numbers; the same seed produces the same events.",
)
@spark_options
@needs_spark
def simulate(
    out: Path,
    transports: int,
    servers: int,
    clients: int,
    days: int,
    last_day: datetime | None,
    seed: int,
    master: str | None,
    memory: str,
    conf: tuple[str, ...],
) -> None:
    """Generate the events of an invented network."""
    from datetime import timedelta

    from dmsg.analytics.session import Load
    from dmsg.analytics.simulate import Network, Simulation

    make_output_directory(out)
    day = (last_day or datetime.now(UTC) - timedelta(1)).date()
    network = Network(transports, servers, clients, days, seed, day)
    load = Load.SMALL if transports <= SMALL_SIMULATION else Load.LARGE
    with session(master, memory, conf, load) as spark:
        files = Simulation(spark, network).write(out)
    output.tell(
        f"{files['spool']} files in {out / 'spool'}, {files['checked']} files of checked receipts in {out / 'checked'}",
        spool=str(out / "spool"),
        files=files["spool"],
        checked=str(out / "checked"),
        checked_files=files["checked"],
    )


@analytics.command()
@click.option(
    "--directory",
    type=WRITTEN_DIRECTORY,
    help="Directory for all files.  Default: a new directory in /tmp, which is kept.",
)
@click.option(
    "--seconds", default=20.0, show_default=True, type=Seconds(2, 3600), help="Seconds for which clients send."
)
@needs_spark
def demo(directory: Path | None, seconds: float) -> None:
    """Run real servers under load on this machine, then compute the tables and a report."""
    import tempfile

    from twisted.internet.threads import deferToThread

    from dmsg.analytics.session import find_java
    from dmsg.cli.client_run import run as run_reactor
    from dmsg.cli.demos.pipeline import PipelineDemo, compute

    find_java()  # If Java is missing, the command fails here, before it starts anything.
    place = (directory or Path(tempfile.mkdtemp(prefix="dmsg-pipeline-"))).absolute()
    make_output_directory(place)

    async def network(reactor: Reactor) -> None:
        shown = PipelineDemo(reactor, place, seconds)
        await shown.run()
        # Spark starts after the network has stopped, as for a user who runs one command after the other.
        await deferToThread(compute, shown, place)

    run_reactor(network)


for _command in (
    attention,
    watch,
    explain,
    report,
    top,
    sql,
    tables,
    rank,
    statement,
    verify_statement,
    self_dealing,
    name,
    send,
    install,
    optimize,
    forget,
):
    analytics.add_command(_command)
