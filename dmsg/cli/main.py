"""The ``dmsg`` command: its subcommands are imported when they are used."""

from __future__ import annotations

import contextlib
import importlib
import sys

import click

from dmsg.cli import output
from dmsg.cli.options import Group
from dmsg.errors import needs_extra

COMMANDS = {
    "key": ("dmsg.cli.keys.key", "Make and show keys."),
    "discovery": ("dmsg.cli.keys.discovery", "Ask and change discovery."),
    "listen": ("dmsg.cli.peers.pipe:listen", "Take one transport and join it to standard input and output."),
    "connect": ("dmsg.cli.peers.pipe:connect", "Open a transport and join it to standard input and output."),
    "send": ("dmsg.cli.files.transfer:send", "Send files, directories, a text or a pipe, by a code or to a key."),
    "receive": ("dmsg.cli.files.transfer:receive", "Receive what is sent, by a code or at a key."),
    "pair": ("dmsg.cli.keys.pair", "Exchange keys with somebody, by a code."),
    "up": ("dmsg.cli.agent.commands:up", "Start the agent: one process with your key, for all commands."),
    "status": ("dmsg.cli.agent.commands:status", "Show what the agent does."),
    "down": ("dmsg.cli.agent.commands:down", "Stop the agent."),
    "ping": ("dmsg.cli.peers.ping", "Measure round trips to a public key."),
    "bench": ("dmsg.cli.peers.bench", "Measure how fast the network carries data."),
    "iperf": ("dmsg.cli.peers.iperf", "Measure one peer over time, in either direction."),
    "trace": ("dmsg.cli.peers.trace", "Show over which servers a peer is reached, and how fast."),
    "forward": ("dmsg.cli.tunnels.forward:forward", "A local TCP port leads to a peer's port."),
    "expose": ("dmsg.cli.tunnels.forward:expose", "A TCP port of this machine for peers."),
    "socks": ("dmsg.cli.tunnels.socks", "A SOCKS5 proxy to which NAME.dmsg and KEY.dmsg are hosts."),
    "serve": ("dmsg.cli.files.web:serve", "A directory over HTTP for peers."),
    "curl": ("dmsg.cli.files.web:curl", "Fetch a dmsg:// URL."),
    "nc": ("dmsg.cli.peers.pipe:nc", "Standard input and output over a stream."),
    "cp": ("dmsg.cli.files.cp:cp", "Copy files to and from a peer; goes on where it was cut."),
    "messaging": ("dmsg.cli.peers.messaging", "The Messaging System, the protocol before dmsg."),
    "top": ("dmsg.cli.fleet.top", "Watch servers and discoveries in a terminal, what is wrong first."),
    "name": ("dmsg.cli.keys.name", "The address book."),
    "analytics": ("dmsg.cli.pipeline.commands", "What the network did, computed on Spark."),
    "twin": ("dmsg.cli.bus.twin:twin", "Twins of the message bus: make, list, show, change."),
    "rmb": ("dmsg.cli.bus.rmb:rmb", "The reliable message bus: call twins, be called, a demo."),
    "config": ("dmsg.cli.configuring", "What options are that are not given."),
    "doctor": ("dmsg.cli.doctor", "Look at what this machine needs, and say what to do."),
    "completion": ("dmsg.cli.completion", "What makes a shell complete commands, names, codes and files."),
    "man": ("dmsg.cli.man", "Manual pages."),
    "demo": ("dmsg.cli.demos.network", "A whole network on this machine, in under a minute."),
}


class _Lazy(Group):
    """Subcommands by name; starting is quick whatever they need."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name or cmd_name)
        except ModuleNotFoundError as error:
            if cmd_name not in ("twin", "rmb"):
                raise
            raise click.ClickException(f"{error}; {needs_extra('rmb')}") from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": None})
@click.version_option(None, "--version", "-V", package_name="dmsg", prog_name="dmsg", message="%(prog)s %(version)s")
@click.option(
    "--json", "as_json", is_flag=True, help="Results as JSON, one object a line; every command has this, too."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notices; every command has this.")
@click.option("--verbose", "-v", is_flag=True, help="Log to standard error; every command has this.")
def main(as_json: bool, quiet: bool, verbose: bool) -> None:
    """dmsg: two programs talk when all they know of each other is a public key.

    \b
    Examples:
      dmsg demo
      export DMSG_DISCOVERY=http://127.0.0.1:9090
      dmsg send photo.jpg
      dmsg receive 5274-guitar-alpha-juice
      dmsg pair bob --key-file alice.key --create
    """
    output.state.json = output.state.json or as_json
    output.state.quiet = output.state.quiet or quiet


def entry() -> None:
    """The ``dmsg`` program: whatever goes wrong is one line, and Ctrl-C none at any time."""
    output.open_missing()
    try:
        returned = main(prog_name="dmsg", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        raise SystemExit(130) from None
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError as error:
        output.failed(error, err=False)
        raise SystemExit(output.EXIT_PIPE) from None
    except OSError as error:
        # a file, or the output itself when there is no name
        what = "" if error.filename else "standard output: "
        output.say(f"dmsg: {what}{output.describe(error)}", err=True)
        output.to_null(sys.stdout, 1)
        raise SystemExit(1) from None
    try:
        sys.stdout.flush()
    except OSError as error:
        output.failed(error, err=False)
        raise SystemExit(output.state.status) from None
    if output.state.status is not None:
        raise SystemExit(output.state.status)
    raise SystemExit(returned if isinstance(returned, int) else 0)
