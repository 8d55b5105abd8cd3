"""Text about the carrier by which a server was reached, shared by all commands that show it."""

from __future__ import annotations

from collections.abc import Mapping

from dmsg.net.carriers.names import Carrier


def describe_carrier(used: Carrier | str, failed: Mapping[Carrier, str] | Mapping[str, str]) -> str:
    """Return the text that names the carrier in use, and why others failed.

    :param failed: error messages by carrier.
    """
    return f"by {used}" + "".join(f"; {carrier} failed: {why}" for carrier, why in failed.items())
