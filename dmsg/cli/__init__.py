"""Command line of dmsg: the ``dmsg`` command and its subcommands."""
