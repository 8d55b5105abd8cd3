"""Options that the servers of the families v2019 and messaging share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.usage import UsageError

from dmsg.base.options import Option, Text, rows_of
from dmsg.net.descriptors import raise_descriptor_limit
from dmsg.net.reactor import Reactor
from dmsg.servers.admission import AdmissionSettings
from dmsg.servers.server import RelayServer
from dmsg.servers.settings import ServerSettings
from dmsg.tap import config
from dmsg.tap.options import LOG_FORMAT, KeyOptions, key_rows, listen_row

_log = Logger()


def relay_rows(key_name: str, limits: type[Any]) -> tuple[Option, ...]:
    """Return the declarations of a server's options.

    :param key_name: name of the default key file, without its suffix.
    :param limits: class of the limits of the protocol family.
    """
    return (
        listen_row("tcp:8080"),
        *key_rows("File with the secret key (mode 0600)", f"~/.config/dmsg/{key_name}.key, created if absent"),
        Option(
            name="config",
            short="c",
            help="TOML file with any of these options; SIGHUP reads it again",
            kind=Text("file"),
            in_file=False,
        ),
        *rows_of(ServerSettings),
        *rows_of(AdmissionSettings),
        *rows_of(limits),
        LOG_FORMAT,
    )


class RelayOptions(KeyOptions):
    """Base class of the options of servers.

    :cvar limits_class: class of the limits of the protocol family.
    """

    limits_class: ClassVar[type[Any]]

    def limits(self) -> Any:
        """Return the limits that the options set.  The maximum number of connections is also bounded by the file
        descriptors.
        """
        limits = self.make(self.limits_class)
        return replace(limits, max_connections=min(limits.max_connections, raise_descriptor_limit()))

    def reload_on_hangup(self, reactor: Reactor, server: RelayServer) -> None:
        """At SIGHUP, read the configuration file and the lists of keys again, and apply what can change without a
        restart.
        """

        def hung_up() -> None:
            limits = None
            try:
                fresh, needs_restart = self.read_again()
                limits = fresh.limits()
            except UsageError as error:
                _log.error(
                    "the changed settings cannot be used; those loaded before stay in use: {error}", error=str(error)
                )
            else:
                if needs_restart:
                    _log.warn(
                        "these changed settings take effect at the next start: {names}", names=", ".join(needs_restart)
                    )
            server.reload(limits)

        config.on_hangup(reactor, hung_up)

    def settings(self, reactor: IReactorTime) -> ServerSettings:
        """Return the settings that the servers of both families share."""
        return self.make(ServerSettings, admission=self.make(AdmissionSettings).admission(reactor))

    def finish(self) -> None:
        if (
            self["public-address"] is None
            and self["discovery"]
            and not any("interface=" in one for one in self["listen"])
        ):
            raise UsageError("--public-address is needed: the HOST:PORT at which clients reach this server")
        self.take_key()
