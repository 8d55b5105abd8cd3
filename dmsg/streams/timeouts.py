"""How long a client waits, by default: what a command says of it without what it takes to wait."""

from __future__ import annotations

RESUME_TIMEOUT = 120.0
"""Seconds that a stream may be without a transport."""
