"""Classes of commands and groups that add the shared options ``--json``, ``--quiet``, ``--verbose`` and ``--version``.

The help of a command shows its summary, its examples, its description and its own options.  Network options, which all
commands with a client share, are shown only by ``--help-all``.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from dmsg.cli import output
from dmsg.cli.config_file import NETWORK, ConfigError, check_tables, defaults_of, read_config, use_names
from dmsg.cli.suggestions import arguments_instead, instead_of
from dmsg.directory_checks import UnsafeDirectory, check_not_planted
from dmsg.errors import DmsgError

NETWORK_OPTIONS = frozenset(f"--{name}" for name in (*NETWORK, "create", "share", "profile"))
"""Network options: those that say how a client reaches the network.  Some of them are not allowed in the configuration
file.
"""

ALL_OPTIONS_KEY = "dmsg.all"
"""Key in a context's ``meta``.  It is set while the help includes the network options."""
MAX_SUMMARY = 200
"""Maximum characters of a command's first sentence in the list of commands."""
_MARKED = re.compile(r"(`+)(.+?)\1", re.DOTALL)
COMMANDS_WITHOUT_SETTINGS = ("config", "completion", "man")
"""Commands that have no settings in the configuration file."""


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    output.state.json = output.state.json or value


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    output.state.quiet = output.state.quiet or value


def _set_verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().params["verbose"] = True


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        # At the top of the module, this import would take a tenth of the start time of every command.
        from importlib.metadata import version

        click.echo(f"dmsg {version('dmsg')}")
        ctx.exit()


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL_OPTIONS_KEY] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _shared_options() -> list[click.Option]:
    flag = partial(click.Option, is_flag=True, expose_value=False, is_eager=True)
    return [
        flag(["--json"], callback=_set_json, help="Print results as JSON, one object per line."),
        flag(["--quiet", "-q"], callback=_set_quiet, help="Print no progress and no notices."),
        flag(["--verbose", "-v"], callback=_set_verbose, help="Write the log to standard error."),
        flag(["--version", "-V"], callback=_show_version, help="Show the version and exit."),
        flag(["--help-all"], callback=_show_all, hidden=True),
    ]


class _Described(click.Command):
    """Base class of commands and groups whose help shows first the summary, then the examples, then the description."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = _format_for_terminal(self.help)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summary, the examples and the rest of the description."""
        first, *others = re.split(r"\n\s*\n", inspect.cleandoc(self.help or "").partition("\f")[0])
        others.sort(key=lambda paragraph: not paragraph.startswith("\b\nExample"))
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("\n\n".join([first, *others]))


class Command(_Described):
    """Command of ``dmsg``, with the shared options and with defaults from the configuration file."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        taken = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        for option in _shared_options():
            opts = [name for name in option.opts if name not in taken]
            if any(name.startswith("--") for name in opts):
                option.opts = opts
                self.params.append(option)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra.setdefault("default_map", self._defaults(info_name, args, parent))
        given = list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if parent is None or parent.parent is not None:
                raise
            raise _add_suggestion(error, arguments_instead(info_name or "", given)) from None

    def _defaults(self, name: str | None, args: list[str], parent: click.Context | None) -> dict[str, object]:
        """Return the default values of this command from the configuration file."""
        path = [name or ""]
        while parent is not None and parent.parent is not None:
            path.insert(0, parent.info_name or "")
            parent = parent.parent
        if path[0] in COMMANDS_WITHOUT_SETTINGS or {"-h", "--help", "--help-all"} & set(args):
            return {}  # The commands in COMMANDS_WITHOUT_SETTINGS, and --help, must work even if the file is invalid.
        try:
            content = read_config()
            if parent is not None and isinstance(parent.command, click.Group):
                check_tables(content, parent.command.list_commands(parent))
            use_names(content)
            return defaults_of(self, path, content)
        except ConfigError as error:
            if path[0] == "doctor":
                return {}  # ``dmsg doctor`` reports this error itself, with advice.
            # The command's own --json has not been parsed yet.
            output.state.json = output.state.json or "--json" in args
            output.fail(error)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        network: list[tuple[str, str]] = []
        params = self.get_params(ctx)
        # If a command has no client, an option with the name of a network option is the command's own.
        is_client = any(param.name == "discovery" for param in params)
        for param in params:
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                (network if is_client and NETWORK_OPTIONS & set(param.opts) else own).append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        if not network:
            return
        if ctx.meta.get(ALL_OPTIONS_KEY):
            with formatter.section("Network options"):
                formatter.write_dl(network)
        else:
            formatter.write_paragraph()
            formatter.write(f"Network options, such as --discovery and --key-file ({len(network)} in all):\n")
            formatter.write(f"  {ctx.command_path} --help-all\n")


def _format_for_terminal(text: str | None) -> str | None:
    """Return a docstring as help and manual pages show it, with quotes in place of backticks."""
    return None if text is None else _MARKED.sub(r"'\2'", text)


def _add_suggestion(error: click.UsageError, line: str | None) -> click.UsageError:
    """Return the error with the suggested command line appended, if there is one."""
    if line is None:
        return error
    return click.UsageError(f"{error.format_message().rstrip('.')}; say: {line}", error.ctx)


class Group(_Described, click.Group):
    """Group of :class:`Command`.  If it also works without a subcommand, it has the shared options."""

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.invoke_without_command:
            taken = {name for param in self.params for name in param.opts}
            self.params += [option for option in _shared_options() if not taken & set(option.opts)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands, with the whole first sentence of each."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, one.get_short_help_str(MAX_SUMMARY)) for name, one in found if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(shown)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help" and self.get_command(ctx, "help") is None:
            if len(args) == 1:
                click.echo(ctx.get_help(), color=ctx.color)
                ctx.exit()
            args = [args[1], *args[2:], "--help"]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            line = instead_of(args[0], ctx.command_path, self.list_commands(ctx))
            raise _add_suggestion(error, line) from None


class OneLineGroup(Group):
    """Group of commands that use no reactor.  Their errors are printed as one line."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DmsgError as error:
            from dmsg.clients.address_book import NoSuchName

            if isinstance(error, NoSuchName):
                output.fail_with(str(error), output.EXIT_USAGE, type(error).__name__)
            output.fail(error)


class WrittenPath(click.Path):
    """Parameter type of a file or directory that the command writes.

    A file or directory that another user has put into a shared directory, such as ``/tmp``, is refused.
    """

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        self.check(Path(value), param, ctx)
        return super().convert(value, param, ctx)

    def check(self, path: Path, param: click.Parameter | None, ctx: click.Context | None) -> None:
        """Check that no other user has put the file or directory into a shared directory.

        :raises click.UsageError: another user has put the file or directory there.
        """
        try:
            check_not_planted(path)
        except UnsafeDirectory as error:
            self.fail(str(error.strerror), param, ctx)


class _Directory(WrittenPath):
    """Parameter type of a directory for received files, which is created if its parent exists."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        path = Path(value)
        self.check(path, param, ctx)
        if not path.exists() and path.parent.is_dir():
            try:
                path.mkdir()
            except OSError as error:
                self.fail(f"{path}: {error.strerror}", param, ctx)
        return super().convert(value, param, ctx)


WRITTEN_FILE = WrittenPath(dir_okay=False, path_type=Path)
WRITTEN_DIRECTORY = WrittenPath(file_okay=False, path_type=Path)
DIRECTORY = _Directory(exists=True, file_okay=False, path_type=Path)


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., object]], Command]:
    """Decorator like :func:`click.command` for the class :class:`Command`."""
    return click.command(name, cls=Command, **attributes)


def group(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., object]], Group]:
    """Decorator like :func:`click.group` for the class :class:`Group`."""
    return click.group(name, cls=Group, **attributes)
