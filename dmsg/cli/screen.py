"""Tables on standard output."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from dmsg.cli.output import EXIT_PIPE, writing


class Screen(Console):
    """Ends as every command does whose reader has gone, or whose output cannot be written."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's own."""
        with writing():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_PIPE) from None


def screen(width: int | None = None) -> Console:
    """Standard output.  :param width: of lines, where it is no terminal."""
    found: Any = Screen()
    return found if found.is_terminal or width is None else Screen(width=width)
