"""``twistd dmsg-server``."""

from __future__ import annotations

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.net.reactor import Reactor, the_reactor
from dmsg.servers.settings import DRAIN_TIMEOUT
from dmsg.tap.options import descriptors, set_log_format
from dmsg.tap.relay import RelayOptions, relay_parameters
from dmsg.tap.running import StopOnFailure
from dmsg.tap.telemetry import TELEMETRY_OPTIONS, sender, telemetry
from dmsg.v2019.core.policing import (
    MAX_CONNECTIONS,
    MAX_PER_ADDRESS,
    MAX_PER_PAIR,
    MAX_TRANSPORTS,
    REQUEST_RATE,
    Limits,
)
from dmsg.v2019.core.wire import IDS_PER_SIDE
from dmsg.v2019.server import Server


class Options(RelayOptions):
    """Options of ``twistd dmsg-server``."""

    plugin = "dmsg-server"
    key_name = "server"
    longdesc = (
        "A dmsg server relays frames between clients that know each other by public key. "
        "Example: twistd -n dmsg-server --listen tcp:8080 --public-address relay.example.org:8080 "
        "--discovery http://discovery.example.org:9090 --key-file server.key"
    )
    optParameters = [
        *relay_parameters("server", DRAIN_TIMEOUT),
        ["max-connections", None, str(MAX_CONNECTIONS), "clients at a time", str],
        ["max-transports", None, str(MAX_TRANSPORTS), "transports of one connection", str],
        ["max-per-pair", None, str(MAX_PER_PAIR), "transports between one connection and another", str],
        ["max-per-address", None, str(MAX_PER_ADDRESS), "connections from one address; 0 means no limit", str],
        ["request-rate", None, str(int(REQUEST_RATE)), "REQUESTs a second of one connection; 0 means no limit", str],
        ["byte-rate", None, "0", "bytes a second read from one connection; 0 means no limit", str],
        *TELEMETRY_OPTIONS,
    ]

    def limits(self) -> Limits:
        """What one client may have."""
        return Limits(
            max_connections=min(self.number("max-connections", 1, 10**6), descriptors()),
            max_transports=self.number("max-transports", 1, IDS_PER_SIDE),
            max_per_pair=self.number("max-per-pair", 1, IDS_PER_SIDE),
            max_per_address=self.number("max-per-address", 0, 10**6),
            request_rate=self.number("request-rate", 0, 10**6),
            byte_rate=self.number("byte-rate", 0, 10**12),
        )

    def check_own(self) -> None:
        for name in ("max-connections", "max-transports", "max-per-pair", "max-per-address"):
            self[name] = int(self[name])
        self["telemetry-settings"] = telemetry(self)
        if self["telemetry-to"] is not None and not self["discovery"]:
            raise UsageError("telemetry-to needs --discovery: where is the collector found?")


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """The server as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"])
    server = Server(
        reactor,
        options["key"],
        options["listen"],
        options.settings(reactor),
        limits=options.limits(),
        telemetry=options["telemetry-settings"],
    )
    options.reload_on_hangup(reactor, server)
    follower = sender(reactor, options, lambda: options["discovery"], server.telemetry)
    service: IService = StopOnFailure(reactor, server, options, options.hold_key, follower)
    return service
