"""Running a command: a reactor, a client, one line for an error."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import click
from twisted.internet import task
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import CannotListenError, ConnectionLost
from twisted.internet.interfaces import IListeningPort
from twisted.logger import (
    FilteringLogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    globalLogBeginner,
    textFileLogObserver,
)

from dmsg.delegation.client import MIN_SERVERS, DelegatedClient
from dmsg.discovery.lookup import check_url
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey, load_or_create_key
from dmsg.names import Names
from dmsg.net.stream import DmsgAddress
from dmsg.transport.service import Client
from dmsg.transport.streams import RESUME_TIMEOUT
from dmsg.transport.strings import parse_port

T = TypeVar("T")
C = TypeVar("C", bound=DelegatedClient)
C_co = TypeVar("C_co", bound=DelegatedClient, covariant=True)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ONLINE_TIMEOUT = 15.0
"""Seconds to find a server."""


class PublicKeyType(click.ParamType[PubKey]):
    """66 hexadecimal characters, or a name from the address book."""

    name = "public key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PubKey:
        if isinstance(value, PubKey):
            return value
        try:
            return Names().find(str(value).removeprefix("dmsg:"))
        except DmsgError as error:
            self.fail(str(error), param, ctx)


class AddressType(click.ParamType[DmsgAddress]):
    """A public key or a name, with a port after a colon."""

    name = "address"

    def __init__(self, default_port: int | None = None) -> None:
        """:param default_port: when none is given; None makes it an error."""
        self._default = default_port

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DmsgAddress:
        if isinstance(value, DmsgAddress):
            return value
        try:
            return parse_target(str(value), self._default)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_target(text: str, default_port: int | None = None) -> DmsgAddress:
    """``KEY:PORT`` or ``NAME:PORT``, with or without ``dmsg:`` before it.

    :raises ValueError: it is none; the text says so in one line.
    """
    who, colon, port = text.removeprefix("dmsg:").partition(":")
    if not colon:
        if default_port is None:
            raise ValueError(f"{text[:80]!r} has no port: KEY:PORT is needed, or NAME:PORT")
        return DmsgAddress(Names().find(who), default_port)
    return DmsgAddress(Names().find(who), parse_port(port))


class Seconds(click.FloatRange):
    """A number within bounds, which nan is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


class URLType(click.ParamType[str]):
    """A discovery's URL, or several separated by blanks."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            urls = str(value).split()
            if not urls:
                raise ValueError("is empty")
            return " ".join(check_url(one) for one in urls)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PUBLIC_KEY = PublicKeyType()
ADDRESS = AddressType()
ANY_PORT = AddressType(0)


def client_key(key_file: str | None) -> SecKey:
    """The one in the file, made if absent; without a file one for this run."""
    return load_or_create_key(key_file) if key_file else SecKey.generate()


def split_urls(discovery: tuple[str, ...]) -> tuple[str, ...]:
    """Each may be several, separated by blanks."""
    return tuple(url for one in discovery for url in one.split())


@dataclass(frozen=True)
class ClientSettings:
    """What the options say of the client to run."""

    discovery: tuple[str, ...]
    key_file: str | None
    min_servers: int
    encryption: str
    prefer: tuple[PubKey, ...]
    only: tuple[PubKey, ...]
    resume_timeout: float
    receipts: bool

    def make(self, reactor: Any) -> Client:
        """A client, not started."""
        return Client(
            reactor,
            client_key(self.key_file),
            self.discovery,
            min_servers=self.min_servers,
            encryption=self.encryption,
            prefer=self.prefer,
            only=self.only,
            resume_timeout=self.resume_timeout,
            receipts=self.receipts,
        )


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
    "--timeout", default=10.0, show_default=True, type=Seconds(0.1, 3600), help="Seconds to connect."
)


encryption_option = click.option(
    "--encryption",
    default="require",
    show_default=True,
    type=click.Choice(["require", "prefer", "off"]),
    help="Secure transports: only these; these where the remote offers them; none.",
)
prefer_option = click.option(
    "--prefer", multiple=True, type=PUBLIC_KEY, metavar="SERVER", help="Take this server before others; repeatable."
)
only_option = click.option(
    "--only", multiple=True, type=PUBLIC_KEY, metavar="SERVER", help="Take no server but this; repeatable."
)
resume_option = click.option(
    "--resume",
    "resume_timeout",
    default=RESUME_TIMEOUT,
    show_default=True,
    type=Seconds(0, 86400),
    metavar="SECONDS",
    help="How long to look for another way when a server is lost; 0: do not.",
)

receipts_option = click.option(
    "--receipts/--no-receipts",
    default=False,
    help="Sign for servers that ask for it how much they delivered, and between whom.",
)


def client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that runs a client; it gets them as ``settings``."""

    @functools.wraps(command)
    def with_settings(
        discovery: tuple[str, ...],
        key_file: str | None,
        min_servers: int,
        encryption: str,
        prefer: tuple[PubKey, ...],
        only: tuple[PubKey, ...],
        resume_timeout: float,
        receipts: bool,
        **others: Any,
    ) -> Any:
        urls = split_urls(discovery)
        settings = ClientSettings(urls, key_file, min_servers, encryption, prefer, only, resume_timeout, receipts)
        return command(settings=settings, **others)

    options = (
        discovery_option,
        key_option,
        servers_option,
        encryption_option,
        prefer_option,
        only_option,
        resume_option,
    )
    wrapped: Callable[..., Any] = receipts_option(with_settings)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


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
        except (DmsgError, OSError, ConnectionLost, CannotListenError) as error:
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


class Settings(Protocol[C_co]):
    """What options say of a client of some family."""

    def make(self, reactor: Any) -> C_co:
        """A client, not started."""


async def with_client(
    reactor: Any,
    settings: Settings[C],
    use: Callable[[C], Awaitable[T]],
    *,
    published: bool = False,
) -> T:
    """``use`` a client that is online, then stop it.

    :param published: wait until others can find it.
    """
    client = settings.make(reactor)
    client.startService()
    try:
        await client.when_online(ONLINE_TIMEOUT)
        if published:
            await client.when_published(ONLINE_TIMEOUT)
        return await use(client)
    finally:
        await client.stopService()


async def serve_until_interrupted(port: IListeningPort, *others: IListeningPort) -> None:
    """Listen until the command is ended."""
    try:
        await Deferred()
    finally:
        for one in (port, *others):
            await maybeDeferred(one.stopListening)


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
