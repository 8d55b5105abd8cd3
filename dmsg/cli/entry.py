"""Entry point of the ``dmsg`` program."""

from __future__ import annotations

from dmsg.cli.loading import loading


def entry() -> None:
    """Run the command line, and end the process."""
    with loading():
        from dmsg.base.interpreter import begin_process, end_process
        from dmsg.base.postponed_imports import postpone_imports

        begin_process()
        postpone_imports()
        from dmsg.cli.main import entry as run
    try:
        run()
    except SystemExit as end:
        # The command is over, so Ctrl-C may end the process at once here, too.
        with loading():
            end_process(end.code)
        raise
