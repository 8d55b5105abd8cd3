"""``rmb.version``: the command that asks a peer for its version."""

from __future__ import annotations

import json
from importlib.metadata import version


def version_text() -> bytes:
    """Return the version as a JSON string, as in ``"dmsg-0.1.0"``."""
    return json.dumps(f"dmsg-{version('dmsg')}").encode()
