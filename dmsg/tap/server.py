"""Plugin ``twistd dmsg-server``: its options, and its service."""

from __future__ import annotations

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.base.cipher_names import AUTO, CIPHER_SETTINGS
from dmsg.base.options import NETWORK, Choice, Option
from dmsg.net.reactor import Reactor
from dmsg.tap.relay import RelayOptions, relay_rows
from dmsg.tap.running import StopOnFailure
from dmsg.tap.telemetry import TELEMETRY_ROWS, sender, telemetry
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.server import Server

CIPHER = Option(
    name="cipher",
    default=AUTO,
    help="Cipher to prefer for connections; auto measures which one is faster here",
    kind=Choice({word: word for word in CIPHER_SETTINGS}),
    group=NETWORK,
)


class Options(RelayOptions):
    """Options of ``twistd dmsg-server``."""

    plugin = "dmsg-server"
    key_name = "server"
    longdesc = (
        "A dmsg server relays frames between clients that know each other by public key. "
        "Example: twistd -n dmsg-server --listen tcp:8080 --public-address relay.example.org:8080 "
        "--discovery http://discovery.example.org:9090 --key-file server.key"
    )
    limits_class = Limits
    rows = (*relay_rows("server", Limits), CIPHER, *TELEMETRY_ROWS)

    def finish(self) -> None:
        self["telemetry-settings"] = telemetry(self)
        if self["telemetry-to"] is not None and not self["discovery"]:
            raise UsageError("--telemetry-to needs --discovery, to look up the collector")
        super().finish()


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return the server as a Twisted service."""
    reactor = options.begin(reactor)
    server = Server(
        reactor,
        options["key"],
        options["listen"],
        options.settings(reactor),
        limits=options.limits(),
        telemetry=options["telemetry-settings"],
        cipher=options["cipher"],
    )
    options.reload_on_hangup(reactor, server)
    follower = sender(reactor, options, lambda: options["discovery"], server.telemetry)
    return StopOnFailure(reactor, server, options, options.hold_key, follower)
