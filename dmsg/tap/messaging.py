"""``twistd dmsg-messaging-server``."""

from __future__ import annotations

from twisted.application.service import IService

from dmsg.messaging.core.policing import MAX_CONNECTIONS, MAX_PER_ADDRESS, MAX_PER_PAIR, OPEN_RATE, Limits
from dmsg.messaging.core.wire import ID_COUNT, Profile
from dmsg.messaging.server import Server
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.servers.settings import DRAIN_TIMEOUT
from dmsg.tap.options import descriptors, set_log_format
from dmsg.tap.relay import RelayOptions, relay_parameters
from dmsg.tap.running import StopOnFailure

IDS = {"auto": None, "one": False, "two": True}


def _two_ids(text: str, profile: str) -> bool | None:
    if text not in IDS:
        raise ValueError(f"{text!r} is neither auto, one nor two")
    if text != "auto" and profile != Profile.SKYWIRE.value:
        raise ValueError("is a setting of --profile skywire")
    return IDS[text]


class Options(RelayOptions):
    """Options of ``twistd dmsg-messaging-server``."""

    plugin = "dmsg-messaging-server"
    key_name = "messaging-server"
    longdesc = (
        "A server of the Messaging System, the protocol before dmsg, relays channels between clients. "
        "Example: twistd -n dmsg-messaging-server --listen tcp:8081 --public-address relay.example.org:8081 "
        "--discovery http://discovery.example.org:9090 --key-file messaging.key"
    )
    optParameters = [
        *relay_parameters("messaging-server", DRAIN_TIMEOUT),
        ["profile", None, Profile.SEED.value, "seed, or skywire for clients of the Go code of March 2019", str],
        ["ids", None, "auto", "with skywire: one or two ids in the answer to a client that has given none yet", str],
        ["max-connections", None, str(MAX_CONNECTIONS), "clients at a time", str],
        ["max-per-pair", None, str(MAX_PER_PAIR), "channels between one client and another", str],
        ["max-per-address", None, str(MAX_PER_ADDRESS), "connections from one address; 0 means no limit", str],
        ["open-rate", None, str(int(OPEN_RATE)), "OpenChannels a second of one link; 0 means no limit", str],
    ]

    def limits(self) -> Limits:
        """What one client may have."""
        return Limits(
            max_connections=min(self.number("max-connections", 1, 10**6), descriptors()),
            max_per_pair=self.number("max-per-pair", 1, ID_COUNT),
            max_per_address=self.number("max-per-address", 0, 10**6),
            open_rate=self.number("open-rate", 0, 10**6),
        )

    def check_own(self) -> None:
        self.checked("profile", Profile)
        self.two_ids()

    def two_ids(self) -> bool | None:
        """What ``--ids`` says."""
        return self.checked("ids", _two_ids, self["profile"])


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """The server as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"])
    server = Server(
        reactor,
        options["key"],
        options["listen"],
        options.settings(reactor),
        profile=Profile(options["profile"]),
        two_ids=options.two_ids(),
        limits=options.limits(),
    )
    options.reload_on_hangup(reactor, server)
    service: IService = StopOnFailure(reactor, server, options, options.hold_key)
    return service
