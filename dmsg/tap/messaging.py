"""Plugin ``twistd dmsg-messaging-server``: its options, and its service."""

from __future__ import annotations

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.base.options import NETWORK, Choice, Option
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.server import Server
from dmsg.net.reactor import Reactor
from dmsg.tap.relay import RelayOptions, relay_rows
from dmsg.tap.running import StopOnFailure


class Options(RelayOptions):
    """Options of ``twistd dmsg-messaging-server``."""

    plugin = "dmsg-messaging-server"
    key_name = "messaging-server"
    longdesc = (
        "A server of the Messaging System, the protocol before dmsg, relays channels between clients. "
        "Example: twistd -n dmsg-messaging-server --listen tcp:8081 --public-address relay.example.org:8081 "
        "--discovery http://discovery.example.org:9090 --key-file messaging.key"
    )
    limits_class = Limits
    rows = (
        *relay_rows("messaging-server", Limits),
        Option(
            name="profile",
            help="Dialect: seed, for clients that follow the first description of the protocol, or skywire, for "
            "clients of the Go code of March 2019",
            kind=Choice({profile.value: profile for profile in Profile}),
            default=Profile.SEED,
            group=NETWORK,
        ),
        Option(
            name="ids",
            help="With --profile skywire: number of ids in a ChannelOpened to a client that has not answered an "
            "OpenChannel yet; with auto, as many as in the ChannelOpened of the client at the other end",
            kind=Choice({"auto": None, "one": False, "two": True}),
            default_text="auto",
            group=NETWORK,
        ),
    )

    def finish(self) -> None:
        if self["ids"] is not None and self["profile"] is not Profile.SKYWIRE:
            raise UsageError("--ids needs --profile skywire")
        super().finish()


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return the server as a Twisted service."""
    reactor = options.begin(reactor)
    server = Server(
        reactor,
        options["key"],
        options["listen"],
        options.settings(reactor),
        profile=options["profile"],
        two_ids=options["ids"],
        limits=options.limits(),
    )
    options.reload_on_hangup(reactor, server)
    return StopOnFailure(reactor, server, options, options.hold_key)
