"""Running a command: a reactor, a client, one line for an error."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import click
from twisted.internet import task
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.logger import (
    FilteringLogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    globalLogBeginner,
    textFileLogObserver,
)

from dmsg.discovery.lookup import check_url
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey, load_or_create_key
from dmsg.transport.service import MIN_SERVERS, Client

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ONLINE_TIMEOUT = 15.0
"""Seconds to find a server."""


class PublicKeyType(click.ParamType[PubKey]):
    """66 hexadecimal characters."""

    name = "public key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PubKey:
        if isinstance(value, PubKey):
            return value
        try:
            return PubKey.from_hex(str(value).removeprefix("dmsg:"))
        except DmsgError as error:
            self.fail(str(error), param, ctx)


class URLType(click.ParamType[str]):
    """A discovery's URL, or several separated by blanks."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return " ".join(check_url(one) for one in str(value).split())
        except ValueError as error:
            self.fail(str(error), param, ctx)


PUBLIC_KEY = PublicKeyType()

discovery_option = click.option(
    "--discovery",
    "-d",
    "discovery",
    multiple=True,
    required=True,
    type=URLType(),
    envvar="DMSG_DISCOVERY",
    metavar="URL",
    help="Discovery to ask; may be repeated.  Also: DMSG_DISCOVERY.",
)
key_option = click.option(
    "--key-file",
    "-k",
    "key_file",
    envvar="DMSG_KEY_FILE",
    metavar="FILE",
    help="Secret key, made if absent; without one a new key for this run.  Also: DMSG_KEY_FILE.",
)
servers_option = click.option(
    "--min-servers",
    default=MIN_SERVERS,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Servers to stay connected to.",
)
timeout_option = click.option(
    "--timeout", default=10.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds to connect."
)


def client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--discovery, --key-file and --min-servers."""
    return discovery_option(key_option(servers_option(command)))


def run(main: Callable[[Any], Coroutine[Any, Any, T]]) -> NoReturn:
    """Run ``main(reactor)`` in a reactor; ends the process.

    Errors of dmsg and of the system are one line on standard error.
    """
    verbose = click.get_current_context().find_root().params.get("verbose", False)
    level = LogLevel.debug if verbose else LogLevel.critical
    observer = FilteringLogObserver(textFileLogObserver(sys.stderr), [LogLevelFilterPredicate(level)])
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)

    async def guarded(reactor: Any) -> None:
        try:
            await main(reactor)
        except CancelledError:
            raise SystemExit(EXIT_INTERRUPTED) from None
        except (DmsgError, OSError, ConnectionLost) as error:
            click.echo(f"dmsg: {' '.join(str(error).split()) or type(error).__name__}", err=True)
            raise SystemExit(EXIT_FAILED) from None

    def start(reactor: Any) -> Deferred[None]:
        ended: Deferred[None] = Deferred()
        running = Deferred.fromCoroutine(guarded(reactor))

        def interrupted() -> Deferred[None] | None:
            """Ctrl-C, SIGTERM: what is running puts away its things first."""
            if ended.called:
                return None
            running.cancel()
            return ended

        def end(result: Any) -> Any:
            ended.callback(None)
            return result

        reactor.addSystemEventTrigger("before", "shutdown", interrupted)
        return running.addBoth(end)

    task.react(start)
    raise SystemExit(0)


async def with_client(
    reactor: Any,
    discovery: Sequence[str],
    key_file: str | None,
    min_servers: int,
    use: Callable[[Client], Awaitable[T]],
    *,
    published: bool = False,
) -> T:
    """``use`` a client that is online, then stop it.

    :param published: wait until others can find it.
    """
    key = load_or_create_key(key_file) if key_file else SecKey.generate()
    urls = [url for one in discovery for url in one.split()]
    client = Client(reactor, key, urls, min_servers=min_servers)
    client.startService()
    try:
        await client.when_online(ONLINE_TIMEOUT)
        if published:
            await client.when_published(ONLINE_TIMEOUT)
        return await use(client)
    finally:
        await client.stopService()


def human_size(size: float) -> str:
    """As in ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def milliseconds(seconds: float) -> str:
    """As in ``1.23 ms``."""
    return f"{seconds * 1000:.2f} ms"
