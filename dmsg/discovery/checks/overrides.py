"""Addresses that the operator sets for checks of certain servers, because the addresses in these servers' entries
cannot be reached from discovery's machine.
"""

from __future__ import annotations

from typing import NamedTuple

from dmsg.keys import PubKey
from dmsg.net.addresses import parse_address


class CheckTarget(NamedTuple):
    """Server, and the address at which discovery checks the server.

    :ivar key: public key of the server in hexadecimal, as in its entry.
    :ivar address: ``HOST:PORT``.
    """

    key: str
    address: str


def parse_check_target(text: str) -> CheckTarget:
    """Read ``KEY@HOST:PORT``.

    :raises DmsgError: the key or the address is malformed.
    """
    key, _, address = text.partition("@")
    parse_address(address)
    return CheckTarget(PubKey.from_text(key).hex(), address)
