"""Implementation of ``dmsg host``: a discovery and a server, each in a process of its own."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from twisted.internet.defer import Deferred

from dmsg.cli.network.supervisor import CannotStart, Supervised, is_serious
from dmsg.cli.output import notice, say, state
from dmsg.clients.address_book import check_name
from dmsg.clients.invitations import Invitation, at_port
from dmsg.directories import data_directory, make_directory
from dmsg.errors import WrongUse
from dmsg.keylock import KeyLock, hold_key
from dmsg.keys import SecKey, load_or_create_key
from dmsg.net.addresses import kind_of, parse_ip
from dmsg.net.reactor import Reactor

IN_USE = os.strerror(errno.EADDRINUSE)
KEY_FILE = "server.key"
STORE = "discovery.sqlite"
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation (RFC 5737, RFC 3849): a route towards them is the default route."""


class NotAHost(WrongUse):
    """A text cannot be the address of a host."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of ``dmsg host``.

    :ivar directory: directory of the server's key and of discovery's entries.
    :ivar key: secret key of the server.
    :ivar address: host at which others reach this machine.
    :ivar allow: file with the keys that the server admits; None for all keys.
    :ivar tls: files of the certificate and of its key; None for plain HTTP.
    :ivar proxy_url: URL of discovery behind a reverse proxy; None without a proxy.
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

    @classmethod
    def prepare(
        cls,
        directory: Path | None,
        *,
        name: str,
        public_address: str | None,
        discovery_port: int,
        server_port: int,
        status_port: int,
        allow: Path | None,
        tls: tuple[Path, Path] | None,
        proxy_url: str | None,
    ) -> HostSettings:
        """Make the directory and the key if they are absent, and find the address of this machine if none is named.

        :raises DmsgError: the name, the address or the key cannot be used.
        :raises OSError: the directory cannot be used.
        """
        directory = directory or data_directory() / "host"
        make_directory(directory)
        return cls(
            directory.absolute(),
            load_or_create_key(directory / KEY_FILE, create=True),
            check_name(name),
            own_address() if public_address is None else checked_host(public_address),
            discovery_port,
            server_port,
            status_port,
            allow,
            tls,
            proxy_url,
        )

    @property
    def invitation(self) -> Invitation:
        """Invitation, which others type to join."""
        scheme = "http" if self.tls is None else "https"
        url = self.proxy_url or f"{scheme}://{at_port(self.address, self.discovery_port)}"
        return Invitation(self.name, url, self.key.public, at_port(self.address, self.server_port))

    @property
    def status_url(self) -> str:
        """URL of the server's live page."""
        return f"http://127.0.0.1:{self.status_port}/"

    @property
    def local_url(self) -> str:
        """URL of discovery for the server, which is on the same machine."""
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def local_port(self) -> int:
        """Loopback port at which discovery serves plain HTTP: the discovery port, or the next one if that port serves
        TLS.
        """
        return self.discovery_port if self.tls is None else self.discovery_port + 1

    @property
    def admission_text(self) -> str:
        """Text that says who can reach the network, and who is admitted."""
        ports = f"TCP ports {self.discovery_port} and {self.server_port}"
        kind = self._kind
        if kind == "loopback":
            return "this network is for this machine alone"
        who = "anyone" if self.allow is None else f"the keys in {self.allow}"
        more = "" if self.allow is not None else "; --allow FILE admits only the keys in a file"
        text = f"open to {who} who can reach {self.address}, {ports}{more}"
        if kind == "private":
            text += (
                f". {self.address} is an address of a local network: for others, forward the {ports} of your router to "
                "this machine and name its address with --public-address"
            )
        return text

    @property
    def _kind(self) -> str:
        number = parse_ip(self.address)
        if number is None:
            return "loopback" if self.address == "localhost" else "public"
        return kind_of(number)

    def hold(self) -> KeyLock:
        """Lock the directory against a second ``dmsg host``.

        :raises KeyInUse: another ``dmsg host`` is running.
        """
        advice = "stop that, or name another --directory"
        return hold_key(
            self.directory / "host", "dmsg host", advice=advice, display_path=f"the directory {self.directory}"
        )

    def discovery_arguments(self) -> list[str]:
        """Return the arguments of ``twistd`` for discovery."""
        here = self.proxy_url is not None or self._kind == "loopback"
        if self.tls is None:
            listen = [self._listen(self.discovery_port, here=here)]
        else:
            certificate, key = (_escaped(str(file)) for file in self.tls)
            listen = [f"ssl:{self.discovery_port}:privateKey={key}:certKey={certificate}"]
        if self.tls is not None or listen[0].startswith("tcp6"):
            listen.append(self._listen(self.local_port, here=True))
        return [
            "dmsg-discovery",
            *(f"--listen={one}" for one in listen),
            f"--store=sqlite:{self.directory / STORE}",
            # A router often does not lead its own public address back to the machine behind it.
            f"--check-at={self.key.public}@127.0.0.1:{self.server_port}",
            f"--metrics=tcp:{self.status_port + 1}:interface=127.0.0.1",
            *(["--proxied"] if self.proxy_url is not None else []),
        ]

    def server_arguments(self) -> list[str]:
        """Return the arguments of ``twistd`` for the server."""
        return [
            "dmsg-server",
            f"--listen={self._listen(self.server_port, here=self._kind == 'loopback')}",
            f"--public-address={at_port(self.address, self.server_port)}",
            f"--discovery={self.local_url}",
            f"--key-file={self.directory / KEY_FILE}",
            f"--metrics=tcp:{self.status_port}:interface=127.0.0.1",
            *([f"--allow={self.allow}"] if self.allow is not None else []),
        ]

    def _listen(self, port: int, *, here: bool) -> str:
        if here:
            return f"tcp:{port}:interface=127.0.0.1"
        number = parse_ip(self.address)
        # This endpoint takes IPv4, too, unless the system was told otherwise.
        return f"tcp6:{port}:interface=\\:\\:" if number is not None and number.version == 6 else f"tcp:{port}"


class Host:
    """A discovery and a server under supervision."""

    def __init__(self, reactor: Reactor, settings: HostSettings) -> None:
        def supervised(name: str, arguments: list[str], ready: str) -> Supervised:
            return Supervised(
                reactor, name, arguments, ready, directory=settings.directory, log=_log_of(name), notice=notice
            )

        self._discovery = supervised("discovery", settings.discovery_arguments(), r"discovery listens on ")
        self._server = supervised("server", settings.server_arguments(), r"registered in discovery")

    async def run(self, ready: Callable[[], object]) -> None:
        """Start both entities, call ``ready``, and run until the call is cancelled.

        :raises DmsgError: one of them cannot start.
        """
        try:
            try:
                await self._discovery.start()
                await self._server.start()
            except CannotStart as error:
                if IN_USE not in str(error):
                    raise
                ports = "--discovery-port, --server-port and --status-port name other ports"
                raise CannotStart(f"{str(error).rstrip('.')}; {ports}") from None
            ready()
            await Deferred()
        finally:
            await self._server.stop()
            await self._discovery.stop()


def _log_of(name: str) -> Callable[[str], None]:
    """Return the function that prints lines of an entity's log: on a terminal only warnings and errors, elsewhere all
    lines.
    """
    whole = not sys.stderr.isatty()

    def log(line: str) -> None:
        if not state.quiet and (whole or is_serious(line)):
            say(f"{name}: {line}", err=True)

    return log


def own_address() -> str:
    """Return the address of this machine on its default route, or that of loopback without a route.

    Nothing is sent: connecting a UDP socket only looks up the route.
    """
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def checked_host(text: str) -> str:
    """Return the name or IP address of a host.

    :raises NotAHost: the text has a port or cannot be a host.
    """
    text = text.removeprefix("[").removesuffix("]")
    number = parse_ip(text)
    if number is not None and "%" not in text:
        return str(number)
    if not text.isascii() or not all(one.isalnum() or one in ".-_" for one in text) or len(text) > 253 or not text:
        raise NotAHost(f"{text[:80]!r} is not a host: a name or an IP address, without a port")
    return text.lower()


def _escaped(text: str) -> str:
    """Return a text as a value in an endpoint string."""
    return text.replace("\\", "\\\\").replace(":", "\\:").replace("=", "\\=")
