"""What all commands of ``dmsg analytics`` share: a session, options, errors of one line."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dmsg.errors import DmsgError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def errors_in_one_line(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is the user's to mend is one line, and the status 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except (DmsgError, OSError) as error:
            _say(error)
        raise SystemExit(1)

    return wrapped


def _say(error: Exception) -> None:
    click.echo(f"dmsg: {' '.join(str(error).split())}", err=True)


def needs_spark(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of one line, Spark's too; the word for those who have no Spark."""

    @functools.wraps(command)
    @errors_in_one_line
    def wrapped(*args: Any, **options: Any) -> Any:
        if importlib.util.find_spec("pyspark") is None:
            raise click.ClickException('Spark is not installed: pip install "dmsg[spark]"; it needs Java 17 too')
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from dmsg.analytics.main import Errors

        try:
            return command(*args, **options)
        except Errors as error:
            _say(error)
        except (PySparkException, Py4JError) as error:
            if click.get_current_context().find_root().params.get("verbose"):
                raise
            first = " ".join(str(error).splitlines()[:1])[:400]
            click.echo(f"dmsg: Spark failed: {first} (dmsg --verbose analytics ... shows all)", err=True)
        raise SystemExit(1)

    return wrapped


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
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


def out_option(text: str = "Directory or URI of the tables.") -> Callable[..., Any]:
    return click.option("--out", required=True, metavar="DIR", help=text)


@contextlib.contextmanager
def session(master: str | None, memory: str, conf: tuple[str, ...], *, quick: bool = True) -> Iterator[SparkSession]:
    settings = {}
    for one in conf:
        key, equals, value = one.partition("=")
        if not equals:
            raise DmsgError(f"--conf is KEY=VALUE, not {one!r}")
        settings[key] = value
    from dmsg.analytics.session import make_session

    with quiet():
        spark = make_session(master, memory=memory, settings=settings, quick=quick)
    try:
        yield spark
    finally:
        with quiet():
            spark.stop()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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


def local_directory(uri: str) -> Path | None:
    return Path(uri) if "://" not in uri else None
