"""The ``dmsg`` command, whose subcommands are imported only when they are used."""

from __future__ import annotations

import errno
import importlib
import io
import sys

import click

from dmsg.cli import output
from dmsg.cli.options import Group
from dmsg.errors import DmsgError, ExtraNotInstalled, needs_extra

GROUPS = {
    "Send and receive": {
        "send": (
            "dmsg.cli.files.transfer:send",
            "Send files, directories or text, by a code or to a key.",
        ),
        "receive": ("dmsg.cli.files.transfer:receive", "Receive what 'dmsg send' sends."),
        "cp": ("dmsg.cli.files.cp:cp", "Copy files to and from a peer; an interrupted copy resumes."),
        "connect": ("dmsg.cli.peers.pipe:connect", "Open a transport and connect it to standard input and output."),
        "listen": ("dmsg.cli.peers.pipe:listen", "Accept one transport and connect it to standard input and output."),
        "nc": ("dmsg.cli.peers.pipe:nc", "Connect standard input and output to a peer's port."),
        "messaging": ("dmsg.cli.peers.messaging", "Use the Messaging System, the predecessor of dmsg."),
    },
    "Services and tunnels": {
        "serve": ("dmsg.cli.files.web:serve", "Serve a directory to peers over HTTP."),
        "curl": ("dmsg.cli.files.web:curl", "Fetch a dmsg:// URL."),
        "forward": ("dmsg.cli.tunnels.forward:forward", "Forward a local TCP port to a peer."),
        "expose": ("dmsg.cli.tunnels.forward:expose", "Expose a local TCP port to peers."),
        "socks": ("dmsg.cli.tunnels.socks", "Run a SOCKS5 proxy for the hosts NAME.dmsg and KEY.dmsg."),
    },
    "Keys and names": {
        "key": ("dmsg.cli.keys.key", "Create and show keys."),
        "pair": ("dmsg.cli.keys.pair", "Exchange keys with another person by a code."),
        "name": ("dmsg.cli.keys.name", "Manage the address book of names and groups."),
    },
    "Measure and diagnose": {
        "ping": ("dmsg.cli.peers.ping", "Measure round-trip times to a peer."),
        "trace": (
            "dmsg.cli.peers.trace",
            "Show the servers through which a peer is reachable.",
        ),
        "iperf": ("dmsg.cli.peers.iperf", "Measure the throughput to or from a peer."),
        "bench": ("dmsg.cli.peers.bench", "Measure the throughput of the network."),
        "doctor": ("dmsg.cli.doctor", "Check the installation and the network, and say what to do."),
    },
    "Agent": {
        "up": ("dmsg.cli.agent.commands:up", "Start the agent, a process that holds your key for all commands."),
        "status": ("dmsg.cli.agent.commands:status", "Show the agent's key, servers, services and streams."),
        "down": ("dmsg.cli.agent.commands:down", "Stop the agent."),
    },
    "Operate a network": {
        "host": ("dmsg.cli.network.host", "Run a network of your own, and invite others to it."),
        "join": ("dmsg.cli.network.join:join", "Join a network by an invitation."),
        "leave": ("dmsg.cli.network.join:leave", "Forget a network that was joined."),
        "demo": ("dmsg.cli.demos.network", "Run a whole network on this machine for a minute."),
        "discovery": ("dmsg.cli.keys.discovery", "Query and change entries in discovery."),
        "top": ("dmsg.cli.fleet.top", "Watch servers and discoveries in a terminal, problems first."),
    },
    "Message bus": {
        "rmb": ("dmsg.cli.bus.rmb:rmb", "Call twins over the reliable message bus, and answer calls."),
        "twin": ("dmsg.cli.bus.twin:twin", "Create, list, show and change twins of the message bus."),
    },
    "Pipeline": {
        "analytics": ("dmsg.cli.pipeline.commands", "Compute and show tables of what the network did, on Spark."),
    },
    "Shell": {
        "config": ("dmsg.cli.config", "Show and change default option values."),
        "completion": ("dmsg.cli.completion", "Print the completion script of a shell."),
        "man": ("dmsg.cli.man", "Print or write manual pages."),
    },
}
"""Commands by group of ``dmsg --help``: the module of each command, and its line in that help."""
COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items()}


class _WithoutExtra(Group):
    """Stand-in for a group of commands that needs an extra which is not installed.

    Manual pages and completion show the group like others; only its use raises an error.

    :param text: line of the group in the help.
    :param why: message of the error, which says how to install the extra.
    """

    def __init__(self, name: str, text: str, why: str) -> None:
        super().__init__(name, help=f"{text}\n\n{why[:1].upper()}{why[1:]}.", short_help=text)
        self._why = why

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self._check(ctx)
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        self._check(ctx)
        return None

    def _check(self, ctx: click.Context) -> None:
        if not ctx.resilient_parsing:  # Completion must print no error.
            raise ExtraNotInstalled(self._why)


class _Lazy(Group):
    """Group of commands that imports the module of a command only when the command is used, so that it starts
    quickly.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        where, text = COMMANDS[cmd_name]
        module, _, name = where.partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name or cmd_name)
        except ModuleNotFoundError as error:
            if cmd_name not in ("twin", "rmb"):
                raise
            return _WithoutExtra(cmd_name, text, f"{error}; {needs_extra('rmb')}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, rows in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in rows.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": None})
@click.version_option(None, "--version", "-V", package_name="dmsg", prog_name="dmsg", message="%(prog)s %(version)s")
@click.option(
    "--json", "as_json", is_flag=True, help="Print results as JSON, one object per line; every command has this option."
)
@click.option("--quiet", "-q", is_flag=True, help="Print no progress and no notices; every command has this option.")
@click.option("--verbose", "-v", is_flag=True, help="Write the log to standard error; every command has this option.")
def main(as_json: bool, quiet: bool, verbose: bool) -> None:
    """Connect two programs that know only each other's public key.

    \b
    Examples:
      dmsg demo
      dmsg host
      dmsg join dmsg1aacmwad...
      dmsg send photo.jpg
      dmsg receive 5274-guitar-alpha-juice
      dmsg pair bob --key-file alice.key --create
    """
    output.state.json = output.state.json or as_json
    output.state.quiet = output.state.quiet or quiet


def entry() -> None:
    """Run the ``dmsg`` program.  Every error is printed as one line, and Ctrl-C prints no traceback."""
    try:
        output.open_missing()
        returned = main(prog_name="dmsg", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        raise SystemExit(130) from None
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        # ``NoDiscovery.show`` prints the error itself, so that nothing is left to print.
        if shown.getvalue():
            output.say(shown.getvalue().rstrip("\n"), err=True)
        raise SystemExit(error.exit_code) from None
    except DmsgError as error:
        output.fail(error)
    except BrokenPipeError as error:
        output.mark_output_failed(error, err=False)
        raise SystemExit(output.EXIT_PIPE) from None
    except OSError as error:
        # An OSError without a file name comes from a write to standard output; "no such file" comes from the look-up of
        # a working directory that has been removed.
        what = "" if error.filename or error.errno == errno.ENOENT else "standard output: "
        output.say(f"dmsg: {what}{output.describe(error)}", err=True)
        output.to_null(sys.stdout, 1)
        raise SystemExit(1) from None
    try:
        sys.stdout.flush()
    except OSError as error:
        output.mark_output_failed(error, err=False)
        raise SystemExit(output.state.status) from None
    if output.state.status is not None:
        raise SystemExit(output.state.status)
    raise SystemExit(returned if isinstance(returned, int) else 0)
