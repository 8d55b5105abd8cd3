"""Default timeouts of clients, in a separate module that commands can import without loading the client."""

from __future__ import annotations

CONNECT_TIMEOUT = 10.0
"""Seconds that opening a stream may take as a whole, with all servers that are tried."""
RESUME_TIMEOUT = 120.0
"""Seconds that a stream may be without a transport before it is closed."""
CLOSE_TIMEOUT = 2.0
"""Maximum seconds for which a stopping client, or a program that works through the agent, waits until its closing
streams have sent their data."""
