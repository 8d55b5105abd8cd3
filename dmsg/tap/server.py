"""``twistd dmsg-server``."""

from __future__ import annotations

from typing import Any

from twisted.application.service import IService
from twisted.python.usage import Options as UsageOptions
from twisted.python.usage import UsageError

from dmsg.errors import DmsgError
from dmsg.keys import load_or_create_key
from dmsg.tap.options import default_key_file, descriptors, endpoint, number, own_pid_file, set_log_format, url
from dmsg.tap.running import StopOnFailure
from dmsg.transport.dial import parse_address
from dmsg.transport.protocol import MAX_CONNECTIONS
from dmsg.transport.relay import MAX_TRANSPORTS
from dmsg.transport.server import Server
from dmsg.transport.wire import IDS_PER_SIDE

DEFAULT_LISTEN = "tcp:8080"


class Options(UsageOptions):
    """Options of ``twistd dmsg-server``."""

    synopsis = "[options]"
    longdesc = (
        "A dmsg server relays frames between clients that know each other by public key. "
        "Example: twistd -n dmsg-server --listen tcp:8080 --public-address relay.example.org:8080 "
        "--discovery http://discovery.example.org:9090 --key-file server.key"
    )
    optParameters = [
        ["public-address", None, None, "HOST:PORT at which clients reach this server", str],
        ["key-file", None, None, "secret key, made if absent [default: ~/.config/dmsg/server.key]", str],
        ["max-connections", None, str(MAX_CONNECTIONS), "clients at a time", str],
        ["max-transports", None, str(MAX_TRANSPORTS), "transports of one client", str],
        ["metrics", None, None, "endpoint string for /metrics and /health, as in tcp:9100:interface=127.0.0.1", str],
        ["log-format", None, "text", "text or json", str],
    ]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["listen"] = []
        self["discovery"] = []

    def opt_listen(self, value: str) -> None:
        """Endpoint string to listen on; may be repeated [default: tcp:8080]"""
        self["listen"].append(endpoint(value))

    def opt_discovery(self, value: str) -> None:
        """URL of a discovery to register in; may be repeated"""
        self["discovery"].append(url(value))

    def postOptions(self) -> None:
        own_pid_file(self, "dmsg-server")
        self["listen"] = self["listen"] or [DEFAULT_LISTEN]
        self["max-connections"] = number(self["max-connections"], 1, 10**6)
        self["max-transports"] = number(self["max-transports"], 1, IDS_PER_SIDE)
        if self["metrics"] is not None:
            endpoint(self["metrics"])
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")
        try:
            if self["public-address"] is not None:
                parse_address(self["public-address"])
            elif self["discovery"] and not any("interface=" in one for one in self["listen"]):
                raise DmsgError("--public-address is needed: where do clients reach this server?")
            self["key"] = load_or_create_key(self["key-file"] or default_key_file("server"))
        except (DmsgError, OSError) as error:
            raise UsageError(str(error)) from None


def makeService(options: Options, reactor: Any = None) -> IService:
    """The server as a Twisted service."""
    if reactor is None:
        from twisted.internet import reactor
    set_log_format(options["log-format"])
    server = Server(
        reactor,
        options["key"],
        options["listen"],
        public_address=options["public-address"],
        discovery=options["discovery"],
        max_connections=min(options["max-connections"], descriptors()),
        max_transports=options["max-transports"],
        metrics=options["metrics"],
    )
    service: IService = StopOnFailure(reactor, server)
    return service
