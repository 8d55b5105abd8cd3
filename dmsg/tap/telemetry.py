"""Options of entities that write events, and the service that sends the event files to a collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twisted.python.usage import UsageError

from dmsg.base.options import TELEMETRY, Option, Text, rows_of
from dmsg.collector.wire import PORT, PORT_NUMBER
from dmsg.keys import PubKey, load_or_create_key
from dmsg.net.addresses import split_address
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.tap.options import EntityOptions
from dmsg.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from dmsg.collector.sender import SpoolSender
    from dmsg.telemetry.service import Telemetry


def collector_address(value: str) -> DmsgAddress:
    """Return the address of a collector from ``KEY[:PORT]``.

    :raises ValueError: the text is not such an address.
    """
    key, port = split_address(value)
    return DmsgAddress(PubKey.from_text(key), PORT if port is None else int(PORT_NUMBER.read(str(port))))


TELEMETRY_ROWS = (
    *rows_of(TelemetrySettings),
    Option(
        name="telemetry-to",
        help="KEY[:PORT] of the collector to which finished event files are sent over dmsg",
        kind=Text("KEY[:PORT]", collector_address),
        group=TELEMETRY,
    ),
)


def telemetry(options: EntityOptions) -> TelemetrySettings | None:
    """Return the settings of telemetry; None if ``--telemetry`` was not given.

    :raises UsageError: an option is invalid.
    :raises DmsgError: the directory or the secret cannot be used.
    """
    if options["telemetry"] is None:
        if options["telemetry-to"] is not None:
            raise UsageError("--telemetry-to needs --telemetry DIRECTORY, whose files it sends")
        return None
    settings = options.make(TelemetrySettings)
    settings.prepare()
    if options["telemetry-to"] is not None:
        from dmsg.telemetry.vouchers import SENDER_KEY_FILE

        load_or_create_key(settings.directory / SENDER_KEY_FILE)
    return settings


def sender(
    reactor: Reactor, options: EntityOptions, discovery: Callable[[], Sequence[str]], telemetry: Telemetry | None
) -> SpoolSender | None:
    """Return the service that sends finished event files to the collector, or None if no collector is configured.

    :param discovery: function that returns the URLs of the discoveries that know the collector.
    """
    if telemetry is None or options["telemetry-to"] is None:
        return None
    # The import is delayed, because the sender needs a whole client. The import of a client takes a third as long as
    # all other imports of an entity.
    from dmsg.collector.sender import SpoolSender

    directory: Path = options["telemetry-settings"].directory
    return SpoolSender(reactor, directory, options["telemetry-to"], discovery, sent=telemetry.sent)
