"""Command line of dmsg: the command ``dmsg`` and its subcommands."""
