"""Default timeouts of clients, in a separate module that commands can import without loading the client."""

from __future__ import annotations

RESUME_TIMEOUT = 120.0
"""Seconds that a stream may be without a transport before it is closed."""
