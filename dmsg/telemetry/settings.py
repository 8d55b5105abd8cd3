"""Settings of telemetry, which are also the options of entities."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from dmsg.base.options import TELEMETRY, Choice, Number, Option, Text, option, required_field
from dmsg.directory_checks import UnsafeDirectory, check_state_path
from dmsg.errors import DmsgError
from dmsg.telemetry.spool import ROTATE_SECONDS, SPOOL_LIMIT


def _absolute(text: str) -> Path:
    return Path(text).absolute()


@dataclass(frozen=True)
class TelemetrySettings:
    """Settings of telemetry. ``limit`` is in bytes."""

    directory: Path = field(
        metadata=required_field(
            Option(
                name="telemetry",
                help="Directory for the events that the data pipeline reads (dmsg analytics)",
                kind=Text("directory", _absolute),
                group=TELEMETRY,
            )
        )
    )
    clear: bool = option(
        False,
        "Names of clients in events: hashed pseudonyms, or clear public keys",
        Choice({"hashed": False, "clear": True}),
        name="telemetry-keys",
        group=TELEMETRY,
    )
    rotate_seconds: float = option(
        ROTATE_SECONDS,
        "Seconds after which an event file is finished and a new one begins",
        Number(1, 86400, "seconds"),
        name="telemetry-rotate",
        group=TELEMETRY,
    )
    limit: int = option(
        SPOOL_LIMIT,
        "MiB of finished event files to keep",
        Number(1, 2**30, "MiB"),
        name="telemetry-limit",
        group=TELEMETRY,
    )
    secret: Path | None = option(
        None,
        (
            "File with the 32-byte secret from which pseudonyms of clients are made; share it "
            "among servers of one operator"
        ),
        Text("file", _absolute),
        name="telemetry-secret",
        secret=True,
        group=TELEMETRY,
    )

    def prepare(self) -> tuple[bytes, bytes]:
        """Create the directory and its secret, and check that the directory is writable.

        :returns: the secret of the directory, and the secret for pseudonyms, which may be the same.
        :raises DmsgError: the directory or a secret cannot be used.
        """
        # The import is here, because most entities run without telemetry.
        from dmsg.telemetry.pseudonyms import load_or_create_secret, read_secret_file

        try:
            check_state_path(self.directory)
            # Receipts name the two clients of each transport, so other users get no access to a new directory.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.directory / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
            own = load_or_create_secret(self.directory)
        except UnsafeDirectory as error:
            raise DmsgError(f"telemetry directory cannot be used: {error.strerror}") from None
        except OSError as error:
            raise DmsgError(f"telemetry directory cannot be used: {error}") from None
        try:
            return own, own if self.secret is None else read_secret_file(self.secret)
        except OSError as error:
            raise DmsgError(f"telemetry secret cannot be used: {error}") from None
