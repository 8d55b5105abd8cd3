"""Text about the carrier of a connection to a server, for all commands that print it."""

from __future__ import annotations

from collections.abc import Mapping

from dmsg.net.carriers.names import Carrier


def describe_carrier(used: Carrier | str, failed: Mapping[Carrier, str] | Mapping[str, str]) -> str:
    """Return a text that names the carrier in use, and says why other carriers failed.

    :param failed: error messages by carrier.
    """
    return f"by {used}" + "".join(f"; {carrier} failed: {why}" for carrier, why in failed.items())
