"""Running a command: a reactor, a client, one line for an error."""

from __future__ import annotations

import functools
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
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

from dmsg.cli import output
from dmsg.clients.choice import MIN_SERVERS, ServerChoice
from dmsg.clients.client import DelegatedClient
from dmsg.clients.names import Names, UnknownName
from dmsg.discovery.lookup import check_url
from dmsg.errors import DmsgError, EntryNotFound
from dmsg.keylock import hold, this_program
from dmsg.keys import PubKey, SecKey, load_or_create_key
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.v2019.client import Client
from dmsg.v2019.streams import RESUME_TIMEOUT
from dmsg.v2019.strings import parse_port

T = TypeVar("T")
C = TypeVar("C", bound=DelegatedClient)
C_co = TypeVar("C_co", bound=DelegatedClient, covariant=True)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 and SIGINT."""
EXIT_TERMINATED = 143
"""128 and SIGTERM."""
EXIT_HUNG_UP = 129
"""128 and SIGHUP."""
ONLINE_TIMEOUT = 15.0
"""Seconds to find a server."""
NOTICE_AFTER = 1.5
"""Seconds after which a command says what it waits for."""


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


class WhoType(click.ParamType[tuple[PubKey, int | None]]):
    """A public key or a name, with or without a port after a colon."""

    name = "public key"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[PubKey, int | None]:
        if isinstance(value, tuple):
            return value
        who, colon, port = str(value).removeprefix("dmsg:").partition(":")
        try:
            return Names().find(who), parse_port(port) if colon else None
        except ValueError as error:
            self.fail(str(error), param, ctx)
        except DmsgError as error:
            self.fail(str(error), param, ctx)


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
WHO = WhoType()


def client_key(key_file: str | None, *, create: bool = False, share: bool = False) -> SecKey:
    """The one in the file, which is in use from now on; without a file one for this run.

    :param create: make the file if it is absent.
    :param share: another program on this machine may use it too.
    :raises KeyFileError: it cannot be used, or another program uses it.
    """
    if not key_file:
        return SecKey.generate()
    key = load_or_create_key(key_file, create=create)
    hold(key_file, this_program(*click.get_current_context().command_path.split()[1:]), share=share)
    return key


def split_urls(discovery: tuple[str, ...]) -> tuple[str, ...]:
    """Each may be several, separated by blanks."""
    return tuple(url for one in discovery for url in one.split())


@dataclass(frozen=True)
class ClientSettings:
    """What the options say of the client to run."""

    discovery: tuple[str, ...]
    key_file: str | None
    choice: ServerChoice
    encryption: str
    resume_timeout: float
    receipts: bool
    create: bool = False
    share: bool = False

    def make(self, reactor: Reactor) -> Client:
        """A client, not started."""
        return Client(
            reactor,
            client_key(self.key_file, create=self.create, share=self.share),
            self.discovery,
            self.choice,
            encryption=self.encryption,
            resume_timeout=self.resume_timeout,
            receipts=self.receipts,
        )


def make_discovery_option(*short: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--discovery``, by a short name too."""
    return click.option(
        "--discovery",
        *short,
        "discovery",
        multiple=True,
        required=True,
        type=URLType(),
        envvar="DMSG_DISCOVERY",
        metavar="URL",
        help="Discovery to ask; may be repeated.  Also: DMSG_DISCOVERY.",
    )


discovery_option = make_discovery_option("-d")
key_option = click.option(
    "--key-file",
    "-k",
    "key_file",
    envvar="DMSG_KEY_FILE",
    metavar="FILE",
    help="Secret key; without one a new key for this run.  Also: DMSG_KEY_FILE.",
)
create_option = click.option("--create", is_flag=True, help="Make the key file if it is absent.")
share_option = click.option(
    "--share", is_flag=True, help="Use the key though another program uses it: others reach only the newest."
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
    return client_options_of()(command)


def client_options_of(*, short_discovery: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same; :param short_discovery: ``-d`` is discovery's."""
    return functools.partial(_with_client_options, short_discovery)


def _with_client_options(short_discovery: bool, command: Callable[..., Any]) -> Callable[..., Any]:

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
        create: bool,
        share: bool,
        **others: Any,
    ) -> Any:
        urls = split_urls(discovery)
        choice = ServerChoice(min_servers=min_servers, prefer=prefer, only=only)
        settings = ClientSettings(urls, key_file, choice, encryption, resume_timeout, receipts, create, share)
        return command(settings=settings, **others)

    options = (
        discovery_option if short_discovery else make_discovery_option(),
        key_option,
        create_option,
        share_option,
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

    def start(reactor: Reactor) -> Deferred[None]:
        return _Run(reactor, main).ended

    task.react(start)
    raise SystemExit(0)


class _Run:
    """One command in its reactor.

    :ivar ended: fires when all is put away; fails with the status to end with.
    """

    def __init__(self, reactor: Reactor, main: Callable[[Any], Coroutine[Any, Any, T]]) -> None:
        self._reactor = reactor
        self._stopped_with = EXIT_INTERRUPTED
        self._over: Deferred[None] = Deferred()
        self._running = Deferred.fromCoroutine(self._guarded(main))
        output.state.ended = self._give_up
        if output.state.status is not None:
            self._give_up()
        reactor.callWhenRunning(self._tell_signals_apart)
        reactor.addSystemEventTrigger("before", "shutdown", self._interrupted)
        self.ended = self._running.addBoth(self._end)

    async def _guarded(self, main: Callable[[Any], Coroutine[Any, Any, T]]) -> None:
        try:
            await main(self._reactor)
        except CancelledError:
            raise SystemExit(self._stopped_with if output.state.status is None else output.state.status) from None
        except BrokenPipeError as error:
            output.failed(error, err=False)
            raise SystemExit(output.EXIT_PIPE) from None
        except UnknownName as error:
            output.say(f"dmsg: {error}", err=True)
            raise SystemExit(EXIT_USAGE) from None
        except (DmsgError, OSError, ConnectionLost, CannotListenError) as error:
            output.say(f"dmsg: {_named(error)}{output.describe(error)}", err=True)
            raise SystemExit(EXIT_FAILED) from None
        if output.state.status is not None:
            raise SystemExit(output.state.status)

    def _give_up(self) -> None:
        """In a turn of its own: who writes may be in the middle of something."""
        self._reactor.callLater(0, self._running.cancel)

    def _interrupted(self) -> Deferred[None] | None:
        """Ctrl-C, SIGTERM: what is running puts away its things first."""
        if self._over.called:
            return None
        self._running.cancel()
        return self._over

    def _end(self, result: Any) -> Any:
        self._over.callback(None)
        return result

    def _tell_signals_apart(self) -> None:
        """The reactor stops for either in the same way; who started the command sees by which one."""
        before: Any = signal.getsignal(signal.SIGTERM)

        def terminated(number: int, frame: Any) -> None:
            self._stopped_with = EXIT_TERMINATED if number == signal.SIGTERM else EXIT_HUNG_UP
            before(number, frame)

        signal.signal(signal.SIGTERM, terminated)
        # the terminal was closed: others are to hear of it as well; not under nohup
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, terminated)


class Settings(Protocol[C_co]):
    """What options say of a client of some family."""

    def make(self, reactor: Reactor) -> C_co:
        """A client, not started."""


async def with_client(
    reactor: Reactor,
    settings: Settings[C],
    use: Callable[[C], Awaitable[T]],
    *,
    published: bool = False,
) -> T:
    """``use`` a client that is online, then stop it.

    :param published: wait until others can find it.
    """
    client = settings.make(reactor)
    client.warned = output.notice
    client.startService()
    waiting = reactor.callLater(NOTICE_AFTER, _tell_of_waiting, reactor, client)
    try:
        await client.when_online(ONLINE_TIMEOUT)
        if published:
            await client.when_published(ONLINE_TIMEOUT)
        if waiting.active():
            waiting.cancel()
        return await use(client)
    finally:
        if waiting.active():
            waiting.cancel()
        await client.stopService()


def _tell_of_waiting(reactor: Reactor, client: DelegatedClient) -> None:
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + ONLINE_TIMEOUT - NOTICE_AFTER))
    output.notice(f"waiting for {client.waiting_for.rstrip('.')}; at the latest until {until}")


def _named(error: BaseException) -> str:
    """The name by which a key is called that an error is about."""
    if isinstance(error, EntryNotFound) and error.key:
        with suppress(DmsgError):
            name = Names().name_of(PubKey.from_hex(error.key))
            return f"{name}: " if name else ""
    return ""


async def serve_until_interrupted(port: IListeningPort, *others: IListeningPort) -> None:
    """Listen until the command is ended."""
    try:
        await Deferred()
    finally:
        for one in (port, *others):
            await maybeDeferred(one.stopListening)
