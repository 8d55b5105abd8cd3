"""Options that the relay and the peer of the bus share, some of them only for compatibility with rmb-rs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from twisted.application.app import ServerOptions
from twisted.python.usage import UsageError

from dmsg.base.options import NETWORK, Option
from dmsg.rmb.registry.service import REGISTRY, check_registry
from dmsg.tap.options import EntityOptions

REGISTRIES = "http://HOST:PORT of an rmb-registry, file:PATH, or tfchain:wss://HOST:PORT (the chain that rmb-rs uses)"
REGISTRY_ROW = Option(name="registry", help=f"Registry of the twins: {REGISTRIES}", kind=REGISTRY, group=NETWORK)


class RmbOptions(EntityOptions):
    """Options of a program of the bus that looks up twins in a registry.

    :cvar several: options that accept several values after one name, as in rmb-rs: ``-s A B``.
    """

    several: tuple[str, ...] = ("-s", "--substrate")

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[str] = []

    def opt_substrate(self, value: str) -> None:
        """Same as --registry tfchain:URL, for compatibility with rmb-rs; of several URLs only the first is used"""
        self._nodes.append(value)

    opt_s = opt_substrate

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        super().parseOptions(repeat_option(options or (), self.several))

    def note(self, text: str) -> None:
        """Print a note about an option, on standard error."""
        twistd: ServerOptions | None = getattr(self, "parent", None)
        name = "rmb" if twistd is None else f"twistd {twistd.subCommand}"
        sys.stderr.write(f"{name}: {text}\n")

    def check_registry(self) -> None:
        """Check that the options name exactly one registry.

        :raises UsageError: the options name no registry, or two.
        :raises RegistryUnavailable: the value does not describe a registry.
        """
        if self._nodes:
            if self["registry"] is not None:
                raise UsageError("--substrate URL means --registry tfchain:URL: give only one of the two options")
            self["registry"] = check_registry(f"tfchain:{self._nodes[0]}")
            if len(self._nodes) > 1:
                self.note(f"--substrate: of several URLs only the first is used, {self._nodes[0]}")
        if self["registry"] is None:
            raise UsageError(f"--registry is needed, to look up twins: {REGISTRIES}")


def repeat_option(words: Sequence[str], several: Sequence[str]) -> list[str]:
    """Return the arguments with ``-m a b`` replaced by ``-m a -m b``.

    The replacement is unambiguous, because each argument of these command lines is an option or the value of one.

    :param several: options that accept several values after one name.
    """
    found: list[str] = []
    repeated: str | None = None
    has_value = False
    for word in words:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            repeated = name if name in several else None
            has_value = bool(equals)
        elif repeated is not None:
            if has_value:
                found.append(repeated)
            has_value = True
        found.append(word)
    return found
