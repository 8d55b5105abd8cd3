"""Options of entities that write events, and what sends them to a collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.python.usage import Options as UsageOptions, UsageError

from dmsg.collector.sender import KEY_FILE, SpoolSender
from dmsg.collector.wire import PORT
from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PubKey, load_or_create_key
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.tap.options import number
from dmsg.telemetry.service import Telemetry, TelemetrySettings

TELEMETRY_OPTIONS = [
    ["telemetry", None, None, "directory for events that the data pipeline reads (dmsg analytics)", str],
    ["telemetry-keys", None, "hashed", "how events name clients: hashed, or clear, by their keys", str],
    ["telemetry-secret", None, None, "file of 32 bytes that clients are named with, for servers of one operator", str],
    ["telemetry-rotate", None, "300", "seconds after which a file of events is finished", str],
    ["telemetry-limit", None, "1024", "MiB of finished files that are kept", str],
    ["telemetry-to", None, None, "KEY[:PORT] of a collector to which finished files go, over dmsg", str],
]


def telemetry(options: UsageOptions) -> TelemetrySettings | None:
    """What the options say of telemetry; None without a directory.

    :raises UsageError: one of them cannot be.
    """
    if options["telemetry"] is None:
        if options["telemetry-to"] is not None:
            raise UsageError("telemetry-to needs --telemetry: the files of which directory?")
        return None
    if options["telemetry-keys"] not in ("hashed", "clear"):
        raise UsageError("telemetry-keys is hashed or clear")
    settings = TelemetrySettings(
        Path(options["telemetry"]).absolute(),
        clear=options["telemetry-keys"] == "clear",
        rotate_seconds=number(options["telemetry-rotate"], 1, 86400),
        limit=number(options["telemetry-limit"], 1, 2**30) * 1024 * 1024,
        secret=None if options["telemetry-secret"] is None else Path(options["telemetry-secret"]).absolute(),
    )
    try:
        settings.prepare()
        if options["telemetry-to"] is not None:
            options["collector"] = collector_address(options["telemetry-to"])
            load_or_create_key(settings.directory / KEY_FILE)
    except DmsgError as error:
        raise UsageError(str(error)) from None
    return settings


def collector_address(value: str) -> DmsgAddress:
    """``KEY[:PORT]`` of a collector.

    :raises UsageError: it is none.
    """
    key, colon, port = value.partition(":")
    try:
        return DmsgAddress(PubKey.from_text(key), number(port, 1, 65535) if colon else PORT)
    except KeyFormatError as error:
        raise UsageError(f"telemetry-to: {error}") from None


def sender(
    reactor: Reactor, options: UsageOptions, discovery: Callable[[], Sequence[str]], telemetry: Telemetry | None
) -> SpoolSender | None:
    """What sends finished files to the collector of ``options``; None: there is none."""
    if telemetry is None or options["telemetry-to"] is None:
        return None
    directory: Path = options["telemetry-settings"].directory
    return SpoolSender(reactor, directory, options["collector"], discovery, sent=telemetry.sent)
