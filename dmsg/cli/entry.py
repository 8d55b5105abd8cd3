"""Entry point of the ``dmsg`` program."""

from __future__ import annotations

from dmsg.cli.loading import loading


def entry() -> None:
    """Run the command line."""
    with loading():
        from dmsg.cli.main import entry as run
    run()
