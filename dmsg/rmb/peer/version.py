"""Answer to ``rmb.version``, the command that queries the version of a peer."""

from __future__ import annotations

import json

from dmsg.base.version import program_version


def version_text() -> bytes:
    """Return the version as JSON text, for example ``"dmsg-0.1.0"`` with its quotes."""
    return json.dumps(f"dmsg-{program_version()}").encode()
