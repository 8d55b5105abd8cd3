"""Parameters that several commands share: keys, addresses, and network options.

The help of a command imports this module, too, so the module must not import Twisted.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

import click
from click.shell_completion import CompletionItem

from dmsg.apps.codes.words import DEFAULT_WORDS, MAX_WORDS, MIN_WORDS
from dmsg.base.cipher_names import AUTO, CIPHER_SETTINGS
from dmsg.base.timeouts import CONNECT_TIMEOUT, RESUME_TIMEOUT
from dmsg.base.urls import check_url
from dmsg.cli.agent_choice import through_agent
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.completion_values import complete_names, complete_networks, complete_path
from dmsg.cli.config_file import ConfigError
from dmsg.cli.networks import find_network
from dmsg.cli.output import say
from dmsg.clients.address_book import AddressBook
from dmsg.clients.server_choice import MIN_SERVERS, ServerChoice
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.addresses import split_address

if TYPE_CHECKING:
    from dmsg.net.streams.address import DmsgAddress


class _Peer:
    """Base class of parameter types that accept names of the address book."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with the typed text."""
        return complete_names(incomplete)


class PublicKeyType(_Peer, click.ParamType[PubKey]):
    """Parameter type of a public key in either form, or a name of the address book."""

    name = "public key"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> PubKey:
        if isinstance(value, PubKey):
            return value
        try:
            return AddressBook().find(str(value).removeprefix("dmsg:"))
        except DmsgError as error:
            self.fail(str(error), param, ctx)


class AddressType(_Peer, click.ParamType["DmsgAddress"]):
    """Parameter type of a public key or a name, followed by a colon and a port."""

    name = "address"

    def __init__(self, default_port: int | None = None) -> None:
        """:param default_port: port if the value has none; None if a value must have a port."""
        self._default = default_port

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> DmsgAddress:
        if not isinstance(value, str):
            return cast("DmsgAddress", value)
        try:
            return parse_target(str(value), self._default)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_target(text: str, default_port: int | None = None) -> DmsgAddress:
    """Return the address in ``KEY:PORT`` or ``NAME:PORT``.  The text may begin with ``dmsg:``.

    :param default_port: port if the text has none; None if the text must have a port.
    :raises ValueError: the text is not such an address; the message has one line.
    """
    from dmsg.net.streams.address import DmsgAddress

    who, port = split_address(text)
    if port is None:
        port = default_port
    if port is None:
        raise ValueError(f"{text[:80]!r} has no port: write KEY:PORT or NAME:PORT")
    return DmsgAddress(AddressBook().find(who), port)


class WhoType(_Peer, click.ParamType[tuple[PubKey, int | None]]):
    """Parameter type of a public key or a name, which may be followed by a colon and a port."""

    name = "public key"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[PubKey, int | None]:
        if isinstance(value, tuple):
            return value
        try:
            who, port = split_address(str(value))
            return AddressBook().find(who), port
        except ValueError as error:
            self.fail(str(error), param, ctx)
        except DmsgError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.FloatRange):
    """Parameter type of a number of seconds within bounds.  NaN is refused."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(cast(float, value), param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


class URLType(click.ParamType[str]):
    """Parameter type of the URL of a discovery, or of several URLs separated by blanks.

    :param by_name: whether the name of a joined network is accepted in place of its discovery's URL.
    """

    name = "url"

    def __init__(self, *, by_name: bool = True) -> None:
        self._by_name = by_name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the networks whose names begin with the typed text."""
        return complete_networks(incomplete) if self._by_name else []

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            urls = str(value).split()
            if not urls:
                raise ValueError("the URL is empty")
            return " ".join(self._url(one) for one in urls)
        except (ValueError, ConfigError) as error:
            self.fail(str(error), param, ctx)

    def _url(self, text: str) -> str:
        return check_url(text) if "://" in text or not self._by_name else find_network(text).discovery


WAYS_TO_A_DISCOVERY = (
    ("the one of your friends", "dmsg join INVITATION"),
    ("by its URL", "dmsg config set discovery URL"),
    ("for one command", "--discovery URL, or DMSG_DISCOVERY=URL"),
    ("your own", "dmsg host"),
)
"""Advice for users who have set no discovery: pairs of a discovery, and the command or option that selects it."""
NO_DISCOVERY = (
    "no discovery is set. A discovery is the service that knows through which servers a key is reached; peers that "
    "want to meet use the same discovery:\n"
)

PUBLIC_KEY = PublicKeyType()
ADDRESS = AddressType()
ANY_PORT = AddressType(0)
WHO = WhoType()


def split_urls(discovery: tuple[str, ...]) -> tuple[str, ...]:
    """Return all URLs of a repeatable option.  One value may have several URLs, separated by blanks."""
    return tuple(url for one in discovery for url in one.split())


def ways_to_a_discovery() -> list[tuple[str, str]]:
    """Return advice for a user who has set no discovery: pairs of a discovery, and the text to type to use it."""
    from dmsg.cli.hosted_network import hosted_network

    hosted = hosted_network()
    own = [] if hosted is None else [("the one that you host", f"dmsg join {hosted.invitation.text}")]
    return [*own, *WAYS_TO_A_DISCOVERY]


class NoDiscovery(click.UsageError):
    """Error: no discovery is set."""

    def __init__(self, ctx: click.Context | None = None) -> None:
        ways = "\n".join(f"  {what + ':':<25}{line}" for what, line in ways_to_a_discovery())
        super().__init__(NO_DISCOVERY + ways, ctx)

    def show(self, file: IO[Any] | None = None) -> None:
        # click's usage line is not printed, because it would hide the advice.
        say(f"dmsg: {self.message}", err=True)


class _DiscoveryOption(click.Option):
    """Option whose error, if no value is given, contains advice."""

    def process_value(self, ctx: click.Context, value: object) -> object:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter:
            raise NoDiscovery(ctx) from None


def make_discovery_option(
    *short: str, required: bool = True
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator that adds the options ``--discovery`` and ``--proxy``.

    :param short: short names of ``--discovery``.
    """
    discovery = click.option(
        "--discovery",
        "--network",
        *short,
        "discovery",
        cls=_DiscoveryOption,
        multiple=True,
        required=required,
        type=URLType(),
        envvar="DMSG_DISCOVERY",
        metavar="URL",
        help="URL of a discovery, or name of a joined network; repeatable.  Environment: DMSG_DISCOVERY.",
    )
    return lambda command: discovery(proxy_option(command))


def _use_proxy(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Set a proxy for all connections of this process, and of an agent that it starts."""
    if not value or ctx.resilient_parsing:
        return
    from dmsg.net.proxies import VARIABLES, ProxyError, parse_proxy

    try:
        parse_proxy(value)
    except ProxyError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    os.environ[VARIABLES[0]] = value


proxy_option = click.option(
    "--proxy",
    metavar="URL",
    expose_value=False,
    callback=_use_proxy,
    help=(
        "Connect through a proxy: http://, https:// or socks5://HOST:PORT.  Environment: DMSG_PROXY, HTTPS_PROXY, "
        "ALL_PROXY, NO_PROXY."
    ),
)


discovery_option = make_discovery_option("-d")
key_option = click.option(
    "--key-file",
    "-k",
    "key_file",
    envvar="DMSG_KEY_FILE",
    metavar="FILE",
    shell_complete=complete_path,
    help=(
        "File with the secret key.  Default: the agent's key, or else a new key for this run. "
        " Environment: DMSG_KEY_FILE."
    ),
)
create_option = click.option("--create", is_flag=True, help="Create the key file if it does not exist.")
share_option = click.option(
    "--share",
    is_flag=True,
    help="Use the key even if another program uses it; peers then reach only the program that started last.",
)
servers_option = click.option(
    "--min-servers",
    default=MIN_SERVERS,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of servers to stay connected to.",
)
timeout_option = click.option(
    "--timeout",
    default=CONNECT_TIMEOUT,
    show_default=True,
    type=Seconds(0.1, 3600),
    help="Seconds to wait for a connection.",
)


encryption_option = click.option(
    "--encryption",
    default="require",
    show_default=True,
    type=click.Choice(["require", "prefer", "off"]),
    help="End-to-end encryption: require it, prefer it where the peer supports it, or turn it off.",
)
cipher_option = click.option(
    "--cipher",
    default=AUTO,
    show_default=True,
    type=click.Choice(CIPHER_SETTINGS),
    help="Cipher to prefer between clients; auto measures which one is faster here.",
)
prefer_option = click.option(
    "--prefer", multiple=True, type=PUBLIC_KEY, metavar="SERVER", help="Prefer this server to others; repeatable."
)
only_option = click.option(
    "--only", multiple=True, type=PUBLIC_KEY, metavar="SERVER", help="Use only this server; repeatable."
)
resume_option = click.option(
    "--resume",
    "resume_timeout",
    default=RESUME_TIMEOUT,
    show_default=True,
    type=Seconds(0, 86400),
    metavar="SECONDS",
    help="Seconds to keep trying to resume streams after their server is lost; 0 disables resuming.",
)

words_option = click.option(
    "--words",
    default=DEFAULT_WORDS,
    show_default=True,
    type=click.IntRange(MIN_WORDS, MAX_WORDS),
    help="Number of words in the code; more words are harder to guess.",
)


class DurationType(click.ParamType[float]):
    """Parameter type of a duration: a number and its unit, as in ``90s``, ``30m``, ``1h`` or ``2d``.  The value is in
    seconds.
    """

    name = "duration"
    _UNITS: ClassVar = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def __init__(self, longest: float) -> None:
        """:param longest: maximum duration in seconds."""
        self._longest = longest

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,9})([smhd])", str(value).strip().lower())
        seconds = float(int(found[1]) * self._UNITS[found[2]]) if found else 0.0
        if not 0 < seconds <= self._longest:
            self.fail(
                f"{str(value)[:80]!r} is not a duration such as 90s, 30m, 1h or 2d, of at most "
                f"{self._longest / 86400:g} days",
                param,
                ctx,
            )
        return seconds


MAX_EXPIRY = 7 * 86400.0
"""Maximum seconds that ``--expires`` accepts."""
expires_option = click.option(
    "--expires", type=DurationType(MAX_EXPIRY), metavar="TIME", help="End the code after this time, as in 30m or 1h."
)
lan_option = click.option(
    "--lan",
    default="off",
    show_default=True,
    type=click.Choice(["only", "also", "off"]),
    help="Find the other side on the local network ('only'), through servers ('off'), or in both ways ('also').",
)
qr_option = click.option("--no-qr", is_flag=True, help="Do not show a QR code.")

agent_option = click.option(
    "--agent/--no-agent",
    "agent",
    default=True,
    help="Use the agent's key and connections if 'dmsg up' runs with the same discovery and key.",
)
receipts_option = click.option(
    "--receipts/--no-receipts",
    default=False,
    help="Sign receipts for servers that ask for them; a receipt says how many bytes went between which keys.",
)


def port_option(default: int, listener: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator that adds the option --port to a command.

    :param default: default port.
    :param listener: command that listens at the port, for the help.
    """
    return click.option(
        "--port",
        "-p",
        default=default,
        show_default=True,
        type=click.IntRange(0, 65535),
        help=f"Port on which '{listener}' listens.",
    )


def client_options(command: Callable[..., object]) -> Callable[..., object]:
    """Decorate a command with the network options.  The command gets their values as the argument ``settings``."""
    return client_options_of()(command)


def client_options_of(
    *, short_discovery: bool = True, by_agent: bool | None = True, loads: bool = True
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator that adds the network options to a command.

    :param short_discovery: whether ``-d`` is short for ``--discovery``.
    :param by_agent: whether the command can work through the agent; None not to look for an agent.
    :param loads: whether to import the client's modules before the command runs.
    """
    return functools.partial(_with_client_options, short_discovery, by_agent, loads)


def _with_client_options(
    short_discovery: bool, by_agent: bool | None, loads: bool, command: Callable[..., object]
) -> Callable[..., object]:

    @functools.wraps(command)
    def with_settings(
        discovery: tuple[str, ...],
        key_file: str | None,
        min_servers: int,
        encryption: str,
        cipher: str,
        prefer: tuple[PubKey, ...],
        only: tuple[PubKey, ...],
        resume_timeout: float,
        receipts: bool,
        create: bool,
        share: bool,
        agent: bool,
        **others: object,
    ) -> object:
        urls = split_urls(discovery)
        choice = ServerChoice(min_servers=min_servers, prefer=prefer, only=only)
        settings = ClientSettings(urls, key_file, choice, encryption, resume_timeout, receipts, create, share, cipher)
        if agent and by_agent is not None:
            settings = through_agent(settings, able=by_agent)
        if not settings.discovery and others.get("lan") != "only":
            raise NoDiscovery(click.get_current_context())
        if loads:
            settings.load()
        return command(settings=settings, **others)

    options = (
        make_discovery_option(*(("-d",) if short_discovery else ()), required=False),
        key_option,
        create_option,
        share_option,
        servers_option,
        encryption_option,
        cipher_option,
        prefer_option,
        only_option,
        resume_option,
    )
    wrapped: Callable[..., object] = agent_option(receipts_option(with_settings))
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped
