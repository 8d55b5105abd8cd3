"""Settings of a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dmsg.base.options import FLAG, KEY, NETWORK, STORAGE, Option, Text, checked_by, option, required_field
from dmsg.directory_checks import UnsafeDirectory, check_state_path
from dmsg.net.redis import redis_address


def _directory(text: str) -> Path:
    path = Path(text).absolute()
    if not path.is_dir():
        raise ValueError(f"{path}: not a directory")
    try:
        check_state_path(path)
    except UnsafeDirectory as error:
        raise ValueError(error.strerror) from None
    return path


@dataclass(frozen=True)
class PeerSettings:
    """Settings of a peer.

    :ivar secret: words or a seed.
    :ivar key_type: ``sr25519`` or ``ed25519``.
    """

    secret: str = field(repr=False)
    registry: str
    relays: Sequence[str] = field(
        metadata=required_field(
            Option(
                name="relay",
                help="URL of a relay, wss:// or ws://; repeatable, at most four",
                kind=Text("URL"),
                repeated=True,
                group=NETWORK,
            )
        )
    )
    redis: str = option(
        "redis://localhost:6379",
        "URL of the Redis that services and clients use",
        Text("URL", checked_by(redis_address)),
        short="r",
        group=NETWORK,
    )
    key_type: str = "sr25519"
    uploads: Path | None = option(
        None,
        "Directory for files that other twins upload; without a directory uploads are refused",
        Text("directory", _directory),
        short="u",
        group=STORAGE,
    )
    update: bool = option(
        True, "Do not update the relays and the key of this twin in the registry", FLAG, name="no-update", group=NETWORK
    )
    strict: bool = option(
        False,
        "Declare in the registry that all programs of this twin sign with the strict signature, too; receivers then "
        "refuse messages of this twin without it",
        FLAG,
        group=KEY,
    )
