"""Implementation of ``dmsg host``: a discovery and a server, each in a process of its own."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from dmsg.apps.exposure import record_own_files
from dmsg.cli.hosted_network import LOCK_NAME, RECORD_NAME, HostedNetwork, hold_directory, write_record
from dmsg.cli.network.own_address import LOOPBACK, own_addresses
from dmsg.cli.network.supervisor import CannotStart, Supervised, is_serious
from dmsg.cli.output import describe, notice, say, state
from dmsg.clients.address_book import check_name
from dmsg.clients.invitations import Invitation, at_port
from dmsg.databases import DATABASE_FILE_SUFFIXES
from dmsg.directories import host_directory
from dmsg.directory_checks import make_directory
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.service.reached_at import REACHED_AT
from dmsg.errors import DmsgError, WrongUse
from dmsg.filelock import LOCK_SUFFIX
from dmsg.keylock import KeyLock
from dmsg.keys import SecKey, load_or_create_key
from dmsg.net.addresses import kind_of, parse_ip
from dmsg.net.carriers.names import Carrier
from dmsg.net.reactor import Reactor
from dmsg.pages.access import ensure_token

SHOWN_ADDRESSES = 4
"""Maximum number of other addresses of this machine that a message names."""
LISTED_WITHIN = 15.0
"""Seconds within which discovery is expected to list the server.  Discovery gives the server 8 s to answer its first
check."""
LISTED_POLL_INTERVAL = 0.05
"""Seconds between two requests for the list of servers, until the list contains the server."""
IN_USE = os.strerror(errno.EADDRINUSE)
KEY_FILE = "server.key"
STORE = "discovery.sqlite"
PAGE_ACCESS_FILE = "page.token"
"""Name of the file with the token that opens the status pages."""
_REACHED_AS = re.compile(rf"(\S+) {REACHED_AT} (\S+)$")
"""Regular expression for the line of discovery's log that says at which address a peer has reached it."""


class NotAHost(WrongUse):
    """Error: a text is not the name or IP address of a host."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of ``dmsg host``.

    :ivar directory: directory of the server's key and of discovery's entries.
    :ivar key: secret key of the server.
    :ivar name: name of the network in the invitation.
    :ivar address: name or IP address at which others reach this machine.
    :ivar discovery_port: TCP port of discovery.
    :ivar server_port: TCP port of the server.
    :ivar status_port: TCP port of the server's status page.  Discovery's status page has the next port.
    :ivar allow: file with the keys that the server admits; None for all keys.
    :ivar tls: files of the TLS certificate and of its key, for discovery; None for plain HTTP.
    :ivar proxy_url: URL at which a reverse proxy offers discovery; None without a proxy.
    :ivar carriers: further carriers by which clients reach the server.
    :ivar is_found: whether this program, and not the user, has chosen the address.
    :ivar others: further addresses of this machine, if this program has chosen the address.
    """

    directory: Path
    key: SecKey
    name: str
    address: str
    discovery_port: int
    server_port: int
    status_port: int
    allow: Path | None = None
    tls: tuple[Path, Path] | None = None
    proxy_url: str | None = None
    carriers: Sequence[Carrier] = ()
    is_found: bool = False
    others: tuple[str, ...] = ()

    @classmethod
    def prepare(
        cls,
        directory: Path,
        *,
        name: str,
        public_address: str | None,
        discovery_port: int,
        server_port: int,
        status_port: int,
        allow: Path | None,
        tls: tuple[Path, Path] | None,
        proxy_url: str | None,
        carriers: Sequence[Carrier] = (),
    ) -> HostSettings:
        """Create the directory and the key if they do not exist, and return the settings.

        :param directory: absolute path of the directory to use.
        :param public_address: address at which others reach this machine; None to find it.
        :raises DmsgError: the name, the address or the key cannot be used.
        :raises OSError: the directory cannot be used.
        """
        make_directory(directory)
        own = own_addresses() if public_address is None else []
        address = checked_host(public_address) if public_address is not None else (own or [LOOPBACK])[0]
        return cls(
            directory,
            load_or_create_key(directory / KEY_FILE, create=True),
            check_name(name),
            address,
            discovery_port,
            server_port,
            status_port,
            allow,
            tls,
            proxy_url,
            carriers=carriers,
            is_found=public_address is None,
            others=tuple(own[1:]),
        )

    @property
    def invitation(self) -> Invitation:
        """Invitation to the network, which others pass to ``dmsg join``."""
        scheme = "http" if self.tls is None else "https"
        url = self.proxy_url or f"{scheme}://{at_port(self.address, self.discovery_port)}"
        return Invitation(self.name, url, self.key.public, at_port(self.address, self.server_port))

    @property
    def status_url(self) -> str:
        """URL of the server's status page."""
        return f"http://127.0.0.1:{self.status_port}/"

    @property
    def page_token(self) -> Path:
        """File with the token that opens the status pages.  Other users of this machine cannot read the file."""
        return self.directory / PAGE_ACCESS_FILE

    @property
    def local_url(self) -> str:
        """URL at which the server, on the same machine, reaches discovery."""
        # If the address is IPv6, discovery listens on [::], and the same port cannot be opened on 127.0.0.1, too.
        by_ipv6 = self._is_ipv6 and self.tls is None and self.proxy_url is None
        return f"http://{at_port(self._loopback if by_ipv6 else '127.0.0.1', self.local_port)}"

    @property
    def local_port(self) -> int:
        """Port at which discovery serves plain HTTP on loopback: the discovery port, or the next port if that port
        serves TLS.
        """
        return self.discovery_port if self.tls is None else self.discovery_port + 1

    @property
    def admission_text(self) -> str:
        """Text that says who can reach the network, and which keys are admitted."""
        ports = f"TCP ports {self.discovery_port} and {self.server_port}"
        kind = self._kind
        if kind == "loopback":
            alone = "this network is for this machine alone"
            return f"{alone}; no other address was found: name one with --public-address" if self.is_found else alone
        who = "anyone" if self.allow is None else f"the keys in {self.allow}"
        more = "" if self.allow is not None else "; --allow FILE admits only the keys in a file"
        text = f"open to {who} who can reach {self.address}, {ports}{more}"
        if kind == "private":
            text += (
                f". {self.address} is an address of a local network: for others, forward the {ports} of your router to "
                "this machine and name its address with --public-address"
            )
        if self.others:
            shown, hidden = self.others[:SHOWN_ADDRESSES], len(self.others) - SHOWN_ADDRESSES
            text += f". Other addresses of this machine: {', '.join(shown)}"
            text += f" and {hidden} more" if hidden > 0 else ""
        return text

    def address_advice(self, line: str) -> str:
        """Return advice if a line of discovery's log says that a peer has reached this machine at another address.

        Any peer can cause such a line, so the user has to check the advice.

        :returns: advice for the user; empty if there is none.
        """
        found = _REACHED_AS.search(line)
        if found is None or not self.is_found or found[2] in (self.address, *self.others):
            return ""
        return (
            f"a peer, {found[1]}, has reached discovery at {found[2]}: if that address is yours, --public-address "
            f"{found[2]} puts it into the invitation in place of {self.address}"
        )

    @property
    def _kind(self) -> str:
        number = parse_ip(self.address)
        if number is None:
            return "loopback" if self.address == "localhost" else "public"
        return kind_of(number)

    def hold(self) -> KeyLock:
        """Lock the directory, so that no second ``dmsg host`` uses it, and write the record of the network there, and
        the token of the status pages if it does not exist.

        :raises KeyInUse: another ``dmsg host`` uses the directory.
        :raises DmsgError: the token cannot be written or used.
        :raises OSError: the record cannot be written.
        """
        lock = hold_directory(self.directory)
        try:
            self._protect_files()
            ensure_token(str(self.page_token))
            write_record(self.directory, HostedNetwork(self.invitation, self.local_url))
        except BaseException:
            lock.release()
            raise
        return lock

    def _protect_files(self) -> None:
        """Record the files of the network as files of dmsg, so that no command sends or overwrites them.  The default
        directory needs no record.  If the record cannot be written, as in a container whose home directory is
        read-only, the network runs all the same.
        """
        if self.directory == host_directory().absolute():
            return
        stores = [f"{STORE}{suffix}" for suffix in DATABASE_FILE_SUFFIXES]
        locks = [f"{name}{LOCK_SUFFIX}" for name in (KEY_FILE, LOCK_NAME)]
        files = [self.directory / name for name in (KEY_FILE, PAGE_ACCESS_FILE, RECORD_NAME, *stores, *locks)]
        if self.tls is not None:
            files.append(self.tls[1].absolute())
        try:
            record_own_files(files)
        except (DmsgError, OSError) as error:
            notice(
                f"dmsg commands could send or overwrite the files in {self.directory}, because the list of dmsg's own "
                f"files cannot be changed: {describe(error)}"
            )

    def discovery_arguments(self) -> list[str]:
        """Return the arguments of ``twistd`` for discovery."""
        if self.proxy_url is not None:
            listen = [f"tcp:{self.discovery_port}:interface=127.0.0.1"]
        elif self.tls is None:
            listen = [self._listen(self.discovery_port)]
        else:
            certificate, key = (_escape(str(file)) for file in self.tls)
            interface = f":interface={_escape('::')}" if self._is_ipv6 else ""
            listen = [f"ssl:{self.discovery_port}:privateKey={key}:certKey={certificate}{interface}"]
            listen.append(f"tcp:{self.local_port}:interface=127.0.0.1")
        return [
            "dmsg-discovery",
            *(f"--listen={one}" for one in listen),
            f"--store=sqlite:{self.directory / STORE}",
            # Discovery checks the server at its loopback address, because many routers do not forward connections from
            # inside to their own public address.
            f"--check-at={self.key.public}@{at_port(self._loopback, self.server_port)}",
            f"--metrics=tcp:{self.status_port + 1}:interface=127.0.0.1",
            f"--page-token={self.page_token}",
            *(["--proxied"] if self.proxy_url is not None else []),
        ]

    def server_arguments(self) -> list[str]:
        """Return the arguments of ``twistd`` for the server."""
        return [
            "dmsg-server",
            f"--listen={self._listen(self.server_port)}",
            f"--public-address={at_port(self.address, self.server_port)}",
            f"--discovery={self.local_url}",
            f"--key-file={self.directory / KEY_FILE}",
            f"--metrics=tcp:{self.status_port}:interface=127.0.0.1",
            f"--page-token={self.page_token}",
            *(f"--carrier={carrier}" for carrier in self.carriers),
            # The reverse proxy may forward websockets to the server. It connects from the loopback address, so this
            # address is trusted.
            *(["--trusted-proxy=127.0.0.1"] if self.proxy_url is not None else []),
            *([f"--allow={self.allow}"] if self.allow is not None else []),
        ]

    @property
    def _is_ipv6(self) -> bool:
        number = parse_ip(self.address)
        return number is not None and number.version == 6

    @property
    def _loopback(self) -> str:
        """Loopback address at which this machine reaches the ports that it opens for others."""
        return "::1" if self._is_ipv6 else "127.0.0.1"

    def _listen(self, port: int) -> str:
        """Return the endpoint string that listens at a port on all interfaces, or on loopback if the network is for
        this machine only.
        """
        if self._is_ipv6:
            # Unless the system is configured otherwise, this endpoint accepts IPv4, too.
            interface = "::1" if self._kind == "loopback" else "::"
            return f"tcp6:{port}:interface={_escape(interface)}"
        return f"tcp:{port}:interface=127.0.0.1" if self._kind == "loopback" else f"tcp:{port}"


class Host:
    """Discovery and server of the network, each in a process that is started again when it ends."""

    def __init__(self, reactor: Reactor, settings: HostSettings) -> None:
        def log_of(name: str) -> Callable[[str], None]:
            log = _log_of(name)

            def logged(line: str) -> None:
                log(line)
                if advice := settings.address_advice(line):
                    notice(advice)

            return logged

        def supervised(name: str, arguments: list[str], ready: str) -> Supervised:
            return Supervised(
                reactor, name, arguments, ready, directory=settings.directory, log=log_of(name), notice=notice
            )

        self._reactor = reactor
        self._settings = settings
        self._discovery = supervised("discovery", settings.discovery_arguments(), r"discovery listens on ")
        self._server = supervised("server", settings.server_arguments(), r"registered in discovery")

    async def run(self, ready: Callable[[], object]) -> None:
        """Start discovery and the server, call ``ready``, and wait until the call is cancelled.  Then stop both.

        :raises DmsgError: discovery or the server cannot start.
        """
        try:
            try:
                # The server's process imports its modules while discovery starts. It opens no port and sends nothing
                # before discovery runs, because discovery's port might belong to another program.
                self._server.load()
                await self._discovery.start()
                await self._server.start()
            except CannotStart as error:
                if IN_USE not in str(error):
                    raise
                ports = "--discovery-port, --server-port and --status-port name other ports"
                raise CannotStart(f"{str(error).rstrip('.')}; {ports}") from None
            await self._until_listed()
            ready()
            await Deferred()
        finally:
            await self._server.stop()
            await self._discovery.stop()

    async def _until_listed(self) -> None:
        """Wait until discovery lists the server, so that whoever reads the invitation can use the network at once.

        Discovery first checks that the server can be reached. If the server is not listed in time, only a notice says
        so, because the server goes on posting its entry.
        """
        deadline = self._reactor.seconds() + LISTED_WITHIN
        lookup = Lookup(self._reactor, self._settings.local_url, timeout=LISTED_WITHIN)
        try:
            while True:
                why = "discovery checks that servers can be reached, and has not reached it"
                try:
                    listed = await lookup.available_servers()
                    if any(entry.key == self._settings.key.public for entry in listed):
                        return
                except DmsgError as error:
                    why = str(error)
                if self._reactor.seconds() >= deadline:
                    notice(f"discovery does not list the server yet, so clients cannot use it: {why}")
                    return
                await deferLater(self._reactor, LISTED_POLL_INTERVAL)
        finally:
            await lookup.close()


def _log_of(name: str) -> Callable[[str], None]:
    """Return a function that prints lines of an entity's log.  On a terminal it prints only warnings and errors.

    :param name: name of the entity, which precedes each line.
    """
    whole = not sys.stderr.isatty()

    def log(line: str) -> None:
        if not state.quiet and (whole or is_serious(line)):
            say(f"{name}: {line}", err=True)

    return log


def checked_host(text: str) -> str:
    """Return the name or IP address of a host in its normal form.

    :raises NotAHost: the text contains a port, or is neither.
    """
    text = text.removeprefix("[").removesuffix("]")
    number = parse_ip(text)
    if number is not None and "%" not in text:
        return str(number)
    if not text.isascii() or not all(one.isalnum() or one in ".-_" for one in text) or len(text) > 253 or not text:
        raise NotAHost(f"{text[:80]!r} is not a host: a name or an IP address, without a port")
    return text.lower()


def _escape(text: str) -> str:
    """Return a text as a value inside an endpoint string."""
    return text.replace("\\", "\\\\").replace(":", "\\:").replace("=", "\\=")
