"""Record of the network that ``dmsg host`` runs for this user.  Other commands read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dmsg.base.urls import check_url
from dmsg.clients.invitations import Invitation, parse_invitation
from dmsg.directories import host_directory
from dmsg.errors import DmsgError
from dmsg.keylock import KeyLock, hold_key, is_held
from dmsg.shared_files import replace_file

RECORD_NAME = "network.json"
"""Name of the record in the directory of ``dmsg host``."""
LOCK_NAME = "host"
"""Name of the lock in the directory of ``dmsg host``, without the suffix of lock files."""


class NoRecord(DmsgError):
    """Error: the record of a running ``dmsg host`` cannot be read."""


@dataclass(frozen=True, slots=True)
class HostedNetwork:
    """Network that this user hosts on this machine.

    :ivar invitation: invitation to the network.
    :ivar local_url: URL at which discovery answers on this machine.
    """

    invitation: Invitation
    local_url: str


def hold_directory(directory: Path) -> KeyLock:
    """Lock the directory of a ``dmsg host``, so that no second one uses it.

    :raises KeyInUse: another ``dmsg host`` uses the directory.
    """
    advice = "stop that, or name another --directory"
    return hold_key(directory / LOCK_NAME, "dmsg host", advice=advice, display_path=f"the directory {directory}")


def running_network(directory: Path) -> HostedNetwork | None:
    """Return the network of the ``dmsg host`` that runs with a directory; None if none runs.

    :raises NoRecord: a ``dmsg host`` runs, but its record is missing or damaged.
    :raises OSError: the lock file in the directory cannot be read.
    """
    if not is_held(directory / LOCK_NAME):
        return None
    network = hosted_network(directory)
    if network is None:
        raise NoRecord(
            f"a dmsg host runs with the directory {directory}, but its record {RECORD_NAME} there cannot be read: "
            "restart that dmsg host"
        )
    return network


def write_record(directory: Path, network: HostedNetwork) -> None:
    """Write the record of a network into the directory of its ``dmsg host``.

    :raises OSError: the file cannot be written.
    """
    content = {"invitation": network.invitation.text, "local": network.local_url}
    replace_file(directory / RECORD_NAME, json.dumps(content) + "\n", mode=0o600)


def hosted_network(directory: Path | None = None) -> HostedNetwork | None:
    """Return the network in a directory of ``dmsg host``, whether it runs or not; None if there is no record, or a
    damaged one, which the next start of ``dmsg host`` replaces.

    :param directory: directory of ``dmsg host``; None for the default.
    """
    try:
        content = json.loads(((directory or host_directory()) / RECORD_NAME).read_text())
        return HostedNetwork(parse_invitation(str(content["invitation"])), check_url(str(content["local"])))
    except (OSError, ValueError, KeyError, TypeError, DmsgError):
        return None
