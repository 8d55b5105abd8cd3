"""What an operator chooses of an entity's page."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.base.options import Text, option
from dmsg.net.listening import ENDPOINT
from dmsg.pages.access import read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """Base of the settings of entities that have a page."""

    metrics: str | None = option(
        None, "endpoint string for its page, /metrics and /health, as in tcp:9100:interface=127.0.0.1", ENDPOINT
    )
    page_token: bytes | None = option(
        None,
        "file (mode 0600) with a token that opens the page from anywhere; "
        "without it the page is for this machine alone",
        Text("file", read_token),
        secret=True,
    )
