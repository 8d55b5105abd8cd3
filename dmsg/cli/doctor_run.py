"""Implementation of ``dmsg doctor``: a series of checks, each with advice for its failure."""

from __future__ import annotations

import platform
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from enum import Enum
from importlib.metadata import version

from twisted.internet.defer import CancelledError
from twisted.web.iweb import IResponse

from dmsg.base.printable import shorten, without_userinfo
from dmsg.base.units import milliseconds
from dmsg.cli.carrier_text import describe_carrier
from dmsg.cli.config_file import ConfigError, config_path, read_config
from dmsg.cli.hosted_network import HostedNetwork, hosted_network
from dmsg.cli.networks import joined_networks
from dmsg.cli.output import columns, say, state, tell, wrap
from dmsg.cli.params import ways_to_a_discovery
from dmsg.clients.address_book import AddressBook
from dmsg.discovery.entries.entry import Entry, features
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.errors import DmsgError, EntryNotFound
from dmsg.keys import PubKey, SecKey, read_key_file
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.pending import cancellable
from dmsg.net.proxies import VARIABLES, ProxyError, proxy_for
from dmsg.net.reactor import Reactor
from dmsg.net.streams.transports import stream_of
from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import WebClient, make_pool
from dmsg.v2019.client import Client

CHECK_TIMEOUT = 10.0
"""Seconds that each step of a check may wait, for example for the answer of a discovery or server."""
CLOCK_OFF = 30.0
"""Seconds by which the local clock may differ from that of a discovery."""
SLOW_ROUND_TRIP = 1.0
"""Seconds of a round trip above which a server is reported as slow."""
MAX_ANSWER_SIZE = 64 * 1024
"""Maximum bytes of the answer of a discovery to ``/health``."""
REFUSED_ENTRIES_ADVICE = (
    "update dmsg here and where that discovery and its servers run; if they are all new, do not trust that discovery"
)
"""Advice for a discovery whose entries this program refuses.  A discovery verifies each entry itself before it stores
the entry."""
INDENT = " " * 7
"""Text before the further lines of a result, as wide as the verdict before its first line."""


class Verdict(Enum):
    """Result of one check."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


class Examination:
    """Record of the checks so far, which prints the result of each.

    :ivar well: whether no check has failed.
    """

    def __init__(self) -> None:
        self.well = True

    def print_result(self, verdict: Verdict, check: str, text: str, advice: str = "") -> None:
        """Print the result of a check.

        :param check: name of the check for ``--json``.
        :param advice: what the user can do about it.
        """
        self.well = self.well and verdict is not Verdict.WRONG
        text = without_userinfo(text)
        if state.json:
            tell("", check=check, verdict=verdict.value, text=text, **({"advice": advice} if advice else {}))
        elif not (state.quiet and verdict is Verdict.OK):
            say(wrap(f"{verdict.value:{len(INDENT) - 2}}  {text}", columns(), INDENT))
            if advice:
                say(wrap(f"{INDENT}{advice}", columns(), ""))


async def examine(
    reactor: Reactor, urls: Sequence[str], key_file: str | None, limit: int, *, with_hosted: bool
) -> bool:
    """Do all checks, and return whether none of them failed.

    :param urls: URLs of the discoveries to check.
    :param key_file: key file to check, or None.
    :param limit: maximum number of servers to check.
    :param with_hosted: whether to check the network that this user hosts on this machine, too.
    """
    examination = Examination()
    _versions(examination)
    _config(examination)
    _book(examination)
    _proxy(examination)
    key = _key(examination, key_file)
    hosted = hosted_network() if with_hosted else None
    if hosted is not None:
        found = await _hosted(reactor, examination, hosted, is_only=not urls)
        if not urls and not found:
            return examination.well
        urls = urls or found
    if not urls:
        ways = "; ".join(f"{what}: {line}" for what, line in ways_to_a_discovery())
        examination.print_result(Verdict.WRONG, "discovery", "no discovery is set", ways)
        return examination.well
    servers: dict[str, Entry] = {}
    for url in urls:
        await _discovery(reactor, examination, url, servers)
    if servers:
        await _network(reactor, examination, urls, list(servers.values())[:limit])
    if key is not None:
        await _entry(reactor, examination, urls, key)
    return examination.well


# --- this machine ---


def _versions(examination: Examination) -> None:
    names = ("dmsg", "twisted", "cryptography", "coincurve")
    text = ", ".join(f"{name} {version(name)}" for name in names)
    text += f", Python {platform.python_version()}, {ssl.OPENSSL_VERSION}"
    examination.print_result(Verdict.OK, "versions", text)


def _config(examination: Examination) -> None:
    try:
        content = read_config()
    except DmsgError as error:
        examination.print_result(Verdict.WRONG, "config", str(error), "correct that line, or use `dmsg config`")
        return
    what = f"the settings in {config_path()} are valid" if content else f"no settings in {config_path()}"
    examination.print_result(Verdict.OK, "config", what)


def _proxy(examination: Examination) -> None:
    """Check the proxy that the environment sets.  All connections use it, except those to this machine."""
    try:
        proxy = proxy_for("relay.example")
    except ProxyError as error:
        examination.print_result(Verdict.WRONG, "proxy", str(error), f"correct the variable: {', '.join(VARIABLES)}")
        return
    if proxy is not None:
        examination.print_result(Verdict.OK, "proxy", f"connections go through the proxy {proxy.display_url}")


def _book(examination: Examination) -> None:
    names = AddressBook()
    try:
        number = len(names.all())
    except DmsgError as error:
        examination.print_result(Verdict.WRONG, "names", str(error), "correct that line, or move the file away")
        return
    examination.print_result(
        Verdict.OK,
        "names",
        f"{number} name{'s' * (number != 1)} in {names.path}" if number else f"no names in {names.path} yet",
    )


def _key(examination: Examination, key_file: str | None) -> SecKey | None:
    if key_file is None:
        examination.print_result(Verdict.NOTE, "key", "no key file is set: each command creates a new key for its run")
        return None
    try:
        key = read_key_file(key_file)
    except DmsgError as error:
        examination.print_result(
            Verdict.WRONG, "key", str(error), "create one with `dmsg key new FILE`, or add --create to the command"
        )
        return None
    examination.print_result(Verdict.OK, "key", f"{key_file} holds the key {key.public.text}")
    return key


# --- discovery ---


async def _hosted(reactor: Reactor, examination: Examination, hosted: HostedNetwork, *, is_only: bool) -> Sequence[str]:
    """Check the network that this user hosts, from inside and at the address of its invitation.

    :param is_only: whether the user has set no discovery. If so, the check fails if the hosted network is not up;
        otherwise this is only a note, because the user may have ended that network.
    :returns: URL at which its discovery answers from here; empty if the discovery does not answer.
    """
    invitation = hosted.invitation
    name = f"network {invitation.name}, which you host"
    if why := await _failure(reactor, hosted.local_url, invitation.server):
        advice = "start it with `dmsg host` and the options that you have used before"
        verdict = Verdict.WRONG if is_only else Verdict.NOTE
        examination.print_result(verdict, "host", f"{name}, is not up: {why}", advice)
        return ()
    if why := await _failure(reactor, invitation.discovery, invitation.server):
        advice = (
            "many routers do not forward connections from inside: try `dmsg doctor` on another machine that has joined"
        )
        text = f"{name}, is up, but its invitation leads nowhere from this machine: {why}"
        examination.print_result(Verdict.NOTE, "host", text, advice)
        return (hosted.local_url,)
    examination.print_result(Verdict.OK, "host", f"{name}, is up; others type: dmsg join {invitation.text}")
    return (invitation.discovery,)


async def _failure(reactor: Reactor, url: str, server: PubKey) -> str:
    """Return why a discovery does not answer with the entry of a server; empty if it does."""
    lookup = Lookup(reactor, url, timeout=CHECK_TIMEOUT)
    try:
        await lookup.entry(server)
    except EntryNotFound:
        return f"the discovery at {url} does not know its server"
    except DmsgError as error:
        return str(error)
    finally:
        await lookup.close()
    return ""


async def _discovery(reactor: Reactor, examination: Examination, url: str, servers: dict[str, Entry]) -> None:
    await _time_there(reactor, examination, url)
    lookup = Lookup(reactor, url, timeout=CHECK_TIMEOUT)
    try:
        began = reactor.seconds()
        listed = await lookup.available_servers()
        took = reactor.seconds() - began
        await _invitation(examination, lookup)
    except DmsgError as error:
        examination.print_result(
            Verdict.WRONG,
            "discovery",
            str(error),
            "check the URL, that the discovery runs, and that this machine may connect to it",
        )
        return
    finally:
        await lookup.close()
    if listed.refusal:
        verdict = Verdict.NOTE if listed else Verdict.WRONG
        examination.print_result(verdict, "discovery", listed.refusal, REFUSED_ENTRIES_ADVICE)
        if not listed:
            return
    what = f"discovery {url} answers in {milliseconds(took)}"
    if not listed:
        advice = "start a server with --discovery and this URL: servers register themselves"
        examination.print_result(Verdict.WRONG, "discovery", f"{what}, but lists no server", advice)
        return
    ours = [entry for entry in listed if not any(mark.startswith("messaging-") for mark in features(entry.version))]
    others = len(listed) - len(ours)
    what += f", and lists {len(ours)} server{'s' * (len(ours) != 1)}"
    if others:
        what += f" of dmsg and {others} of the Messaging System, which this command does not check"
    if ours:
        examination.print_result(Verdict.OK, "discovery", what)
    else:
        examination.print_result(
            Verdict.WRONG, "discovery", what, "commands other than `dmsg messaging` need a dmsg-server there"
        )
    servers.update({entry.static: entry for entry in ours})


async def _invitation(examination: Examination, lookup: Lookup) -> None:
    """Check, for each joined network, that its discovery still has the entry of the server in the invitation."""
    try:
        networks = [one for one in joined_networks().values() if one.discovery.rstrip("/") == lookup.url]
    except ConfigError:
        return  # The check of the configuration file has already reported this error.
    for network in networks:
        if not network.server:
            continue
        try:
            await lookup.entry(PubKey.from_text(network.server))
        except EntryNotFound:
            text = f"network {network.name}: discovery does not know the server of its invitation any more"
            advice = f"ask its host for a new invitation, then: dmsg leave {network.name}; dmsg join INVITATION"
            examination.print_result(Verdict.WRONG, "network", text, advice)
        else:
            text = f"network {network.name}: discovery knows the server of its invitation"
            examination.print_result(Verdict.OK, "network", text)


async def _time_there(reactor: Reactor, examination: Examination, url: str) -> None:
    began, wall = reactor.seconds(), time.time()
    client = WebClient(reactor, make_pool(reactor, persistent=False), CHECK_TIMEOUT)
    asking = client.request("GET", f"{url.rstrip('/')}/health", reactor=reactor)
    try:
        response = await cancellable(add_fair_timeout(asking, CHECK_TIMEOUT, reactor))
        took = reactor.seconds() - began
        await cancellable(add_fair_timeout(read_body(response, MAX_ANSWER_SIZE), CHECK_TIMEOUT, reactor))
    except CancelledError:
        raise
    except Exception:  # The next check reports why discovery does not answer.
        return
    _clock(examination, url, response, wall, took)


def _clock(examination: Examination, url: str, response: IResponse, asked_at: float, seconds: float) -> None:
    said = response.headers.getRawHeaders("date", [None])[0]
    try:
        there = parsedate_to_datetime(said).timestamp()
    except (TypeError, ValueError):
        examination.print_result(
            Verdict.NOTE, "clock", f"discovery {url} does not send its time, so the clock is not checked"
        )
        return
    # The discovery read its clock at some time between request and answer, and reports whole seconds. The computed
    # difference may therefore be wrong by the duration of the request and one second.
    off = there + 0.5 - (asked_at + seconds / 2)
    if abs(off) <= CLOCK_OFF:
        examination.print_result(Verdict.OK, "clock", f"the clock agrees with that of {url}")
    else:
        ahead = "behind" if off > 0 else "ahead of"
        examination.print_result(
            Verdict.WRONG,
            "clock",
            f"the clock is {abs(off):.0f} s {ahead} that of {url}",
            "set the clock, with NTP if possible (`timedatectl set-ntp true`): entries and tokens contain the time",
        )


# --- servers and streams ---


async def _network(reactor: Reactor, examination: Examination, urls: Sequence[str], servers: Sequence[Entry]) -> None:
    asking, answering = (Client(reactor, SecKey.generate(), list(urls), on_warning=lambda text: None) for _ in range(2))
    for client in (asking, answering):
        client.startService()
    try:
        reached = 0
        for entry in servers:
            reached += await _server(reactor, examination, asking, entry)
        if not reached:
            ports = sorted({str(entry.server.address).rpartition(":")[2] for entry in servers if entry.server})
            examination.print_result(
                Verdict.WRONG,
                "servers",
                "no server can be reached",
                f"check that no firewall blocks outgoing TCP to port {', '.join(ports)}",
            )
            return
        await _stream(reactor, examination, asking, answering)
    finally:
        for client in (asking, answering):
            await client.stopService()


async def _server(reactor: Reactor, examination: Examination, client: Client, entry: Entry) -> bool:
    assert entry.server is not None
    name = f"server {entry.key.short} at {entry.server.address}"
    try:
        began = reactor.seconds()
        session = await add_fair_timeout(client.server_session(entry.key), CHECK_TIMEOUT, reactor)
        took = reactor.seconds() - began
        if session.pings.known:
            took = min([await session.ping(CHECK_TIMEOUT) for _ in range(3)])
    except CancelledError:
        raise
    except Exception as error:
        why = shorten(str(error)) or f"no answer within {CHECK_TIMEOUT:g} s"
        advice = "clients use other servers; if the server is yours, read its log and check that its port is open"
        examination.print_result(Verdict.NOTE, "server", f"{name} cannot be reached: {why}", advice)
        return False
    far = " (slow: other servers may be nearer, see --prefer)" if took > SLOW_ROUND_TRIP else ""
    by = describe_carrier(session.carrier, session.carriers_failed)
    examination.print_result(Verdict.OK, "server", f"{name}: {milliseconds(took)}, {by}{far}")
    return True


async def _stream(reactor: Reactor, examination: Examination, asking: Client, answering: Client) -> None:
    try:
        await answering.when_published(CHECK_TIMEOUT)
        stream = stream_of(await asking.probe(answering.public_key, timeout=CHECK_TIMEOUT))
        began = reactor.seconds()
        await stream.send(b"", CHECK_TIMEOUT)
        took = reactor.seconds() - began
        stream.loseConnection()
    except CancelledError:
        raise
    except Exception as error:
        examination.print_result(
            Verdict.WRONG,
            "stream",
            f"a stream from this machine through a server and back failed: {shorten(str(error))}",
            "the servers themselves can be reached: `dmsg trace KEY` tests each server of a peer",
        )
        return
    examination.print_result(Verdict.OK, "stream", f"a stream through a server and back takes {milliseconds(took)}")


# --- the entry of a key ---


async def _entry(reactor: Reactor, examination: Examination, urls: Sequence[str], key: SecKey) -> None:
    client = Client(reactor, SecKey.generate(), list(urls))
    try:
        try:
            entry = await client.entry(key.public)
        except EntryNotFound:
            text = "discovery has no entry of this key: peers cannot reach it now"
            examination.print_result(
                Verdict.NOTE,
                "entry",
                text,
                "the entry exists while a program runs with this key: start it, if peers are to reach it",
            )
            return
        except DmsgError as error:
            examination.print_result(Verdict.WRONG, "entry", str(error))
            return
        if entry.client is None and entry.server is not None:
            examination.print_result(Verdict.NOTE, "entry", f"this key belongs to a server, at {entry.server.address}")
            return
        if entry.client is None or not entry.client.delegated_servers:
            examination.print_result(
                Verdict.WRONG, "entry", "the entry of this key names no server", "restart its program"
            )
            return
        client.startService()
        ways = 0
        for server in map(PubKey.from_hex, entry.client.delegated_servers):
            try:
                probed = await client.probe(key.public, timeout=CHECK_TIMEOUT, via=server)
            except CancelledError:
                raise
            except Exception as error:
                why = shorten(str(error))
                examination.print_result(
                    Verdict.NOTE, "entry", f"this key cannot be reached through server {server.short}: {why}"
                )
            else:
                stream_of(probed).loseConnection()
                ways += 1
        number = len(entry.client.delegated_servers)
        if ways:
            examination.print_result(
                Verdict.OK, "entry", f"this key can be reached through {ways} of its {number} servers"
            )
        else:
            advice = (
                "perhaps its program was killed: start it, or withdraw the entry with `dmsg discovery delete -k FILE`"
            )
            examination.print_result(
                Verdict.WRONG, "entry", f"this key can be reached through none of its {number} servers", advice
            )
    finally:
        await client.stopService()
