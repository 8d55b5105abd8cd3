"""``twistd rmb-peer``."""

from __future__ import annotations

from pathlib import Path

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.errors import DmsgError, needs_extra
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.net.redis import redis_address
from dmsg.tap.options import own_pid_file, set_log_format
from dmsg.tap.running import StopOnFailure

try:
    from dmsg.rmb.peer.service import PeerSettings, RmbPeer
    from dmsg.rmb.session.setup import relay_text
    from dmsg.rmb.twins.identity import KEY_TYPES
    from dmsg.rmb.twins.secrets import SECRET, read_secret
    from dmsg.tap.rmb_options import REGISTRY_OPTION, RmbOptions
except ModuleNotFoundError as error:
    raise SystemExit(f"rmb-peer: {error}; {needs_extra('rmb')}") from None


class Options(RmbOptions):
    """Options of ``twistd rmb-peer``."""

    synopsis = "[options]"
    longdesc = (
        "The gateway of a twin: services and clients speak JSON over Redis, the peer speaks for them to its relays. "
        "Example: twistd -n rmb-peer --key-file twin.key --registry https://registry.example.org "
        "--relay wss://relay.example.org"
    )
    optParameters = [
        ["key-file", None, None, f"file of mode 0600 with the words or the 0x seed; else {SECRET} has them", str],
        ["key-type", "k", None, "sr25519 or ed25519 [default: what the file says, else sr25519]", str],
        REGISTRY_OPTION,
        ["redis", "r", "redis://localhost:6379", "where services and clients are", str],
        ["uploads", "u", None, "directory for files that other twins upload; without one they cannot", str],
        ["log-format", None, "text", "text or json", str],
    ]
    optFlags = [
        ["no-update", None, "leave the registry as it is: relays and key of this twin are set elsewhere"],
        [
            "strict",
            None,
            "let the registry say that every program of this twin signs with borders",
        ],
        ["no-strict", None, "the default; it was an option of earlier versions"],
    ]

    def __init__(self) -> None:
        super().__init__()
        self["relay"] = []
        self["debug"] = 0

    def opt_debug(self) -> None:
        """Log also what is said for debugging"""
        self["debug"] = 1

    opt_d = opt_debug

    def opt_relay(self, value: str) -> None:
        """URL of a relay, wss:// or ws://; may be repeated, at most four"""
        self["relay"].append(value)

    def opt_mnemonic(self, value: str) -> None:
        """Not taken: what is on a command line everybody can read who may list processes"""
        raise UsageError(
            "words on a command line are seen by everybody who may list processes: "
            f"put them into a file of mode 0600 and say --key-file FILE, or into {SECRET}"
        )

    def opt_mnemonics(self, value: str) -> None:
        """Not taken, as --mnemonic"""
        self.opt_mnemonic(value)

    def opt_seed(self, value: str) -> None:
        """Not taken, as --mnemonic"""
        self.opt_mnemonic(value)

    opt_m = opt_mnemonic

    def postOptions(self) -> None:
        own_pid_file(self, "rmb-peer")
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")
        self.check_registry()
        if not self["relay"]:
            raise UsageError("--relay is needed: through which relay is this twin reached?")
        if self["key-type"] is not None and self["key-type"].lower() not in KEY_TYPES:
            raise UsageError("key-type is sr25519 or ed25519")
        try:
            relay_text(self["relay"])
            redis_address(self["redis"])
            self["secret"] = read_secret(self["key-file"], self["key-type"])
        except (DmsgError, ValueError) as error:
            raise UsageError(str(error)) from None
        if self["uploads"] is not None:
            self["uploads"] = Path(self["uploads"]).absolute()
            if not self["uploads"].is_dir():
                raise UsageError(f"{self['uploads']}: no directory")

    def settings(self) -> PeerSettings:
        """What the peer is told."""
        return PeerSettings(
            secret=self["secret"].secret,
            registry=self["registry"],
            relays=self["relay"],
            redis=self["redis"],
            key_type=self["secret"].key_type,
            uploads=self["uploads"],
            update=not self["no-update"],
            strict=bool(self["strict"]),
        )


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """A peer as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"], debug=bool(options["debug"]))
    service: IService = StopOnFailure(reactor, RmbPeer(reactor, options.settings()), options)
    return service
