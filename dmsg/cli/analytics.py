"""``dmsg analytics``: the data pipeline."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from twisted.internet.threads import deferToThread

from dmsg.discovery.ranking import sign_ranking
from dmsg.errors import DmsgError
from dmsg.keys import load_or_create_key
from dmsg.telemetry.pseudonyms import Pseudonyms, load_or_create_secret
from dmsg.telemetry.verify import Checked, verify_spool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECEIPTS = "receipts"
"""Under the tables' directory: checked receipts."""
RANKING_HOURS = 24.0
TOP_ROWS = 15
SMALL_SPOOL = 64 * 1024 * 1024
"""Bytes of files up to which a run is short."""
SMALL_SIMULATION = 300_000
"""Transports likewise."""


class _Failed(Exception):
    """One line for the user."""


def _needs_spark(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of one line; the word for those who have no Spark."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        if importlib.util.find_spec("pyspark") is None:
            raise click.ClickException('Spark is not installed: pip install "dmsg[spark]"; it needs Java 17 too')
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from dmsg.analytics.main import Errors

        try:
            return command(*args, **options)
        except (*Errors, DmsgError, _Failed, OSError) as error:
            click.echo(f"dmsg: {' '.join(str(error).split())}", err=True)
        except (PySparkException, Py4JError) as error:
            if click.get_current_context().find_root().params.get("verbose"):
                raise
            first = " ".join(str(error).splitlines()[:1])[:400]
            click.echo(f"dmsg: Spark failed: {first} (dmsg --verbose analytics ... shows all)", err=True)
        raise SystemExit(1)

    return wrapped


def _spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeatable."),
        click.option("--memory", default="1g", show_default=True, help="Memory of Spark's driver."),
        click.option(
            "--master",
            envvar="DMSG_SPARK_MASTER",
            metavar="MASTER",
            help="local[N], spark://HOST:PORT, sc://HOST:PORT (Spark Connect) ...; default: this machine's cores.  "
            "Also: DMSG_SPARK_MASTER.",
        ),
    ):
        command = option(command)
    return command


def _out_option(text: str = "Directory or URI of the tables.") -> Callable[..., Any]:
    return click.option("--out", required=True, metavar="DIR", help=text)


@contextlib.contextmanager
def _session(master: str | None, memory: str, conf: tuple[str, ...], *, quick: bool = True) -> Iterator[SparkSession]:
    settings = {}
    for one in conf:
        key, equals, value = one.partition("=")
        if not equals:
            raise _Failed(f"--conf is KEY=VALUE, not {one!r}")
        settings[key] = value
    from dmsg.analytics.session import make_session

    with _quiet():
        spark = make_session(master, memory=memory, settings=settings, quick=quick)
    try:
        yield spark
    finally:
        with _quiet():
            spark.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Java's words at its start and end are nobody's business, unless asked for."""
    if click.get_current_context().find_root().params.get("verbose"):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _local(uri: str) -> Path | None:
    return Path(uri) if "://" not in uri else None


def _is_small(spool: str) -> bool:
    directory = _local(spool)
    return directory is not None and sum(path.stat().st_size for path in directory.rglob("*.gz")) < SMALL_SPOOL


def _check_receipts(spool: str, out: str, *, clear: bool) -> tuple[str | None, Checked]:
    """Check what is new; where the checked ones are."""
    source, tables = _local(spool), _local(out)
    if source is None or tables is None:
        return None, Checked()
    if not source.is_dir():
        raise _Failed(f"{spool} is no directory")
    tables.mkdir(parents=True, exist_ok=True)
    target = tables / RECEIPTS
    checked = verify_spool(source, target, Pseudonyms(load_or_create_secret(tables), clear=clear))
    return str(target), checked


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def analytics() -> None:
    """What the network did, computed on Spark.

    Entities write events with --telemetry DIR.  These commands read them, make
    tables, and show those.  They need Java 17 and dmsg's extra "spark".

    \b
    Examples:
      dmsg analytics simulate --out sim
      dmsg analytics run --spool sim/spool --receipts sim/checked --out tables
      dmsg analytics report --out tables --html report.html
      dmsg analytics top --out tables
    """


@analytics.command()
@click.option("--spool", required=True, metavar="DIR", help="What entities wrote: directory or URI, with all below.")
@_out_option()
@click.option(
    "--receipts",
    metavar="DIR",
    help="Receipts that were checked; default: those of the spool are checked now.",
)
@click.option("--clear-keys", is_flag=True, help="Name those who sign receipts by their keys.")
@_spark_options
@_needs_spark
def run(
    spool: str,
    out: str,
    receipts: str | None,
    clear_keys: bool,
    master: str | None,
    memory: str,
    conf: tuple[str, ...],
) -> None:
    """Read what is new and bring all tables up to date."""
    from dmsg.analytics import main as jobs

    started = time.monotonic()
    checked = Checked()
    if receipts is None:
        receipts, checked = _check_receipts(spool, out, clear=clear_keys)
    elif (there := _local(receipts)) is not None and not there.is_dir():
        raise _Failed(f"{receipts} is no directory")
    if (there := _local(spool)) is not None and not there.is_dir():
        raise _Failed(f"{spool} is no directory")
    bar = Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar, _lock(out):
        task = bar.add_task("starting Spark", total=None)
        with _session(master, memory, conf, quick=_is_small(spool)) as spark:
            outcome = jobs.run(
                spark,
                spool,
                receipts,
                out,
                lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
            )
    if checked.refused:
        click.echo(f"{checked.refused} receipts are not believed: see the reasons in quarantine of receipts", err=True)
    click.echo(_said(outcome) + f", {time.monotonic() - started:.0f} s")


def _said(outcome: Any) -> str:
    if not outcome.events and not outcome.quarantined and not outcome.torn_files:
        return f"run {outcome.state.run}: nothing is new"
    parts = [f"run {outcome.state.run}: {outcome.events:,} events", f"{len(outcome.days)} days written"]
    for count, text in (
        (outcome.duplicates, "events came twice"),
        (outcome.quarantined, "lines in quarantine"),
        (outcome.torn_files, "files with a problem"),
    ):
        if count:
            parts.append(f"{count:,} {text}")
    return ", ".join(parts)


@contextlib.contextmanager
def _lock(out: str) -> Iterator[None]:
    """One run at a time writes to a directory of this machine."""
    directory = _local(out)
    if directory is None:
        yield
        return
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _Failed(f"another run writes to {out}") from None
        yield


@analytics.command()
@click.option("--spool", required=True, metavar="DIR", help="What entities write.")
@_out_option()
@click.option("--receipts", metavar="DIR", help="Receipts that somebody checks; default: the spool's are checked here.")
@click.option("--clear-keys", is_flag=True, help="Name those who sign receipts by their keys.")
@click.option("--every", default=30, show_default=True, type=click.IntRange(1, 3600), help="Seconds between looks.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the report after each batch.")
@_spark_options
@_needs_spark
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
    """Go on reading what comes, until Ctrl-C; the tables follow each batch."""
    from dmsg.analytics import main as jobs

    stop = threading.Event()
    own = receipts is None
    if receipts is None:
        receipts, _ = _check_receipts(spool, out, clear=clear_keys)
    looked = time.monotonic()

    def check() -> None:
        nonlocal looked
        if own and receipts is not None and time.monotonic() - looked >= every:
            _check_receipts(spool, out, clear=clear_keys)
            looked = time.monotonic()

    with _lock(out), _session(master, memory, conf, quick=_is_small(spool)) as spark:
        for number in (signal.SIGINT, signal.SIGTERM):  # after Spark, which sets handlers of its own
            signal.signal(number, lambda *_: stop.set())

        def told(outcome: Any) -> None:
            click.echo(f"{datetime.now(UTC):%H:%M:%S} {_said(outcome)}")
            if html is not None and outcome.state.days:
                jobs.write_report(spark, out, html)

        jobs.stream(spark, spool, receipts, out, f"{every} seconds", told, stop, check)


@analytics.command()
@click.option("--spool", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--clear-keys", is_flag=True, help="Name those who sign receipts by their keys.")
def verify(spool: Path, out: Path, clear_keys: bool) -> None:
    """Check the signatures of receipts, for a run elsewhere.

    --out gets a file of checked receipts for each file of the spool; give it to
    run with --receipts.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        checked = verify_spool(spool, out, Pseudonyms(load_or_create_secret(out), clear=clear_keys))
    except (DmsgError, OSError) as error:
        click.echo(f"dmsg: {error}", err=True)
        raise SystemExit(1) from None
    click.echo(f"{checked.files} files: {checked.believed:,} receipts are believed, {checked.refused:,} are not")


@analytics.command()
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="For the spool."
)
@click.option("--transports", default=100_000, show_default=True, type=click.IntRange(1, 10**9))
@click.option("--servers", default=20, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--clients", default=2_000, show_default=True, type=click.IntRange(1, 10**7))
@click.option("--days", default=3, show_default=True, type=click.IntRange(1, 3650))
@click.option("--last-day", type=click.DateTime(["%Y-%m-%d"]), help="Default: yesterday.")
@click.option("--seed", default=1, show_default=True, type=int, help="The same seed makes the same events.")
@_spark_options
@_needs_spark
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
    """Make the events of a network that never was."""
    from datetime import timedelta

    from dmsg.analytics.simulate import Network, Simulation

    day = (last_day or datetime.now(UTC) - timedelta(1)).date()
    network = Network(transports, servers, clients, days, seed, day)
    with _session(master, memory, conf, quick=transports <= SMALL_SIMULATION) as spark:
        files = Simulation(spark, network).write(out)
    click.echo(
        f"{files['spool']} files in {out / 'spool'}, {files['checked']} files of checked receipts in {out / 'checked'}"
    )


@analytics.command()
@_out_option()
@click.option(
    "--html",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.",
)
@_spark_options
@_needs_spark
def report(out: str, html: Path, master: str | None, memory: str, conf: tuple[str, ...]) -> None:
    """Write one HTML file that shows the tables."""
    from dmsg.analytics import main as jobs

    with _session(master, memory, conf) as spark:
        jobs.write_report(spark, out, html)
    click.echo(f"wrote {html}")


@analytics.command()
@_out_option()
@click.argument("table", default="placement")
@click.option("--rows", default=TOP_ROWS, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--by", metavar="COLUMN", help="Sort by it, the largest first.")
@click.option("--day", metavar="DAY", help="Only this day, as 2026-01-31; default: the newest.")
@_spark_options
@_needs_spark
def top(
    out: str,
    table: str,
    rows: int,
    by: str | None,
    day: str | None,
    master: str | None,
    memory: str,
    conf: tuple[str, ...],
) -> None:
    """Show a gold table in the terminal; `dmsg analytics tables` names them."""
    from pyspark.sql import functions as F

    from dmsg.analytics.lake import Lake
    from dmsg.analytics.schemas import DAILY, GOLD

    if table not in GOLD:
        raise _Failed(f"there is no table {table}; there are {', '.join(GOLD)}")
    names = GOLD[table].schema.fieldNames()
    if by is not None and by not in names:
        raise _Failed(f"{table} has no column {by}; it has {', '.join(names)}")
    with _session(master, memory, conf) as spark:
        lake = Lake(spark, out)
        state = lake.state()
        if not state.days:
            raise _Failed(f"there are no tables in {out}: run `dmsg analytics run` first")
        if day is not None and day not in state.days:
            raise _Failed(f"nothing is known of {day}; the newest day is {max(state.days)}")
        shown = lake.read("gold", table, state, [day or max(state.days)] if table in DAILY else None)
        order = F.col(by).desc_nulls_last() if by else F.col(_first_number(table)).desc_nulls_last()
        found = shown.orderBy(order, *names[:3]).limit(rows).collect()
    grid = Table(title=f"{table}: {GOLD[table].text}", title_justify="left")
    for field in GOLD[table].schema.fields:
        text = field.dataType.simpleString() in ("string", "date", "boolean")
        grid.add_column(field.name, justify="left" if text else "right", overflow="ellipsis", no_wrap=text)
    for row in found:
        grid.add_row(*(_shown(row[name]) for name in names))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # for other programs, and for less -S
        grid.expand = False
    elif console.measure(grid, options=console.options.update(width=10_000)).maximum > console.width:
        grid = Table(title=f"{table}: {GOLD[table].text}", title_justify="left", show_header=False)
        for row in found:
            for name in names:
                grid.add_row(name, _shown(row[name]))
            grid.add_section()
    console.print(grid)


def _first_number(table: str) -> str:
    from dmsg.analytics.schemas import GOLD

    for field in GOLD[table].schema.fields:
        if field.dataType.simpleString() in ("double", "bigint") and field.name != "hour":
            return str(field.name)
    return str(GOLD[table].schema.fieldNames()[0])


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return text[:8] if len(text) in (16, 32, 66) and all(one in "0123456789abcdef" for one in text) else text


@analytics.command()
@_out_option()
@_spark_options
@_needs_spark
def tables(out: str, master: str | None, memory: str, conf: tuple[str, ...]) -> None:
    """Name the gold tables and their Parquet files, as JSON, for other programs."""
    from dmsg.analytics import main as jobs

    with _session(master, memory, conf) as spark:
        paths = jobs.table_paths(spark, out)
    click.echo(json.dumps(paths, indent=1))


@analytics.command()
@_out_option()
@click.option("--key-file", "-k", required=True, metavar="FILE", help="The operator's secret key, made if absent.")
@click.option("--ranking", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option(
    "--hours", default=RANKING_HOURS, show_default=True, type=click.FloatRange(0.01, 720), help="How long it holds."
)
@_spark_options
@_needs_spark
def rank(
    out: str, key_file: str, ranking: Path, hours: float, master: str | None, memory: str, conf: tuple[str, ...]
) -> None:
    """Sign the placement table, for `twistd dmsg-discovery --ranking FILE --ranking-key KEY`."""
    from dmsg.analytics.lake import Lake

    key = load_or_create_key(key_file)
    with _session(master, memory, conf) as spark:
        lake = Lake(spark, out)
        state = lake.state()
        if not state.days:
            raise _Failed(f"there are no tables in {out}: run `dmsg analytics run` first")
        rows = lake.read("gold", "placement", state).orderBy("server").collect()
    servers = [{"static": row.server, "weight": row.weight, "reasons": row.reasons.split(", ")} for row in rows]
    now = int(time.time())
    fresh = ranking.with_name(f".{ranking.name}.part")
    fresh.write_bytes(sign_ranking(servers, key, now, now + int(hours * 3600)))
    fresh.replace(ranking)
    click.echo(f"{len(servers)} servers, valid for {hours:g} h, signed by {key.public.hex()}")


@analytics.command()
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything goes; default: a new one under /tmp, which stays.",
)
@click.option(
    "--seconds", default=20.0, show_default=True, type=click.FloatRange(2, 3600), help="How long clients send."
)
@_needs_spark
def demo(directory: Path | None, seconds: float) -> None:
    """Real servers under load on this machine, then tables and a report."""
    import tempfile

    from dmsg.analytics.session import find_java
    from dmsg.cli.analytics_demo import PipelineDemo, compute
    from dmsg.cli.running import run as run_reactor

    find_java()  # before anything is started
    place = (directory or Path(tempfile.mkdtemp(prefix="dmsg-pipeline-"))).absolute()
    place.mkdir(parents=True, exist_ok=True)

    async def network(reactor: Any) -> None:
        shown = PipelineDemo(reactor, place, seconds)
        await shown.run()
        # after the network: Spark takes this process's place no more than a person's next command would
        await deferToThread(compute, shown, place)

    run_reactor(network)
