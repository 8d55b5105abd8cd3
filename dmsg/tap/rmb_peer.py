"""Plugin ``twistd rmb-peer``: its options, and its service."""

from __future__ import annotations

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.base.options import FLAG, KEY, Option, Text, rows_of
from dmsg.errors import needs_extra
from dmsg.net.reactor import Reactor
from dmsg.tap.options import DEBUG, LOG_FORMAT
from dmsg.tap.running import StopOnFailure

try:
    from dmsg.rmb.peer.service import RmbPeer
    from dmsg.rmb.peer.settings import PeerSettings
    from dmsg.rmb.session.setup import relay_text
    from dmsg.rmb.twins.identity import KEY_TYPES
    from dmsg.rmb.twins.secrets import SECRET, read_secret
    from dmsg.tap.rmb_options import REGISTRY_ROW, RmbOptions
except ModuleNotFoundError as error:
    raise SystemExit(f"rmb-peer: {error}; {needs_extra('rmb')}") from None


def _key_type(text: str) -> str:
    if text.lower() not in KEY_TYPES:
        raise ValueError(f"{text!r} is not sr25519 or ed25519")
    return text


class Options(RmbOptions):
    """Options of ``twistd rmb-peer``."""

    plugin = "rmb-peer"
    longdesc = (
        "The gateway of a twin exchanges JSON with local programs over Redis, and messages with relays "
        "over websockets. "
        "Example: twistd -n rmb-peer --key-file twin.key --registry https://registry.example.org "
        "--relay wss://relay.example.org"
    )
    rows = (
        Option(
            name="key-file",
            help=f"File (mode 0600) with the twin's words or 0x seed. Default: the environment variable {SECRET}",
            kind=Text("file"),
            secret=True,
            group=KEY,
        ),
        Option(
            name="key-type",
            short="k",
            help="Kind of the key",
            kind=Text("`sr25519` or `ed25519`", _key_type),
            default_text="the type in the key file, else sr25519",
            group=KEY,
        ),
        REGISTRY_ROW,
        *rows_of(PeerSettings),
        Option(
            name="no-strict", help="Do nothing; kept for programs that still pass this option", kind=FLAG, group=KEY
        ),
        LOG_FORMAT,
        DEBUG,
    )

    def opt_mnemonic(self, value: str) -> None:
        """Refused, because every user of this machine can read command lines; use --key-file"""
        raise UsageError(
            "every user of this machine can see the words on a command line: put them into a file of mode 0600 "
            f"and use --key-file FILE, or put them into the environment variable {SECRET}"
        )

    def opt_mnemonics(self, value: str) -> None:
        """Refused, because every user of this machine can read command lines; use --key-file"""
        self.opt_mnemonic(value)

    def opt_seed(self, value: str) -> None:
        """Refused, because every user of this machine can read command lines; use --key-file"""
        self.opt_mnemonic(value)

    opt_m = opt_mnemonic

    def finish(self) -> None:
        self.check_registry()
        if not self["relay"]:
            raise UsageError("--relay is needed: the URL of a relay through which other twins reach this one")
        try:
            relay_text(self["relay"])
        except ValueError as error:
            raise UsageError(f"--relay is not valid: {error}") from None
        self["secret"] = read_secret(self["key-file"], self["key-type"])

    def settings(self) -> PeerSettings:
        """Return the settings of the gateway."""
        secret = self["secret"]
        return self.make(PeerSettings, secret=secret.secret, registry=self["registry"], key_type=secret.key_type)


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return the gateway of a twin as a Twisted service."""
    reactor = options.begin(reactor)
    return StopOnFailure(reactor, RmbPeer(reactor, options.settings()), options)
