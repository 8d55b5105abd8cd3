"""Settings of the status page of a server, a discovery or another entity."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.base.options import LOGS, Text, option
from dmsg.net.listening import ENDPOINT
from dmsg.pages.access import read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """Base class of the settings of entities that have a status page."""

    metrics: str | None = option(
        None,
        "Endpoint string for the status page, /metrics and /health, as in tcp:9100:interface=127.0.0.1",
        ENDPOINT,
        group=LOGS,
    )
    page_token: bytes | None = option(
        None,
        (
            "File (mode 0600) with a token that opens the status page from other machines; "
            "without the file only this machine can open the page"
        ),
        Text("file", read_token),
        secret=True,
        group=LOGS,
    )
