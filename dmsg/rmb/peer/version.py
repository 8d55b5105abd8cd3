"""``rmb.version``: what a peer says of itself."""

from __future__ import annotations

import json
from importlib.metadata import version


def version_text() -> bytes:
    """A JSON string, as in ``"dmsg-0.1.0"``."""
    return json.dumps(f"dmsg-{version('dmsg')}").encode()
