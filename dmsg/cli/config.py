"""Command ``dmsg config``: shows and changes default option values."""

from __future__ import annotations

import json
import os

import click

from dmsg.cli.config_file import (
    NAMES,
    NETWORK,
    NETWORKS,
    ConfigError,
    check_tables,
    check_value,
    config_path,
    read_config,
)
from dmsg.cli.config_writer import write_settings
from dmsg.cli.options import OneLineGroup
from dmsg.cli.output import say, tell


class WrongSetting(ConfigError):
    """Error: a name or value cannot be a setting."""


VARIABLES = {"discovery": "DMSG_DISCOVERY", "key-file": "DMSG_KEY_FILE", NAMES: "DMSG_NAMES"}
"""Environment variable that overrides each setting, by the name of the setting."""


@click.group(cls=OneLineGroup, invoke_without_command=True)
@click.pass_context
def config(ctx: click.Context) -> None:
    """Show and change default option values.

    The configuration file is ~/.config/dmsg/config.toml, or the file that DMSG_CONFIG names. Network options are at its
    top and apply to all commands; a table has the options of one command. The command line overrides the environment,
    and the environment overrides the file.

    \b
    Examples:
      dmsg config set discovery http://discovery.example:9090
      dmsg config set key-file ~/alice.key
      dmsg config set send.words 3
      dmsg config
    """
    if ctx.invoked_subcommand is None:
        _show_all()


@config.command()
def show() -> None:
    """Show each setting, its value and its source; the same as `dmsg config` alone."""
    _show_all()


def _show_all() -> None:
    content = read_config()
    root = click.get_current_context().find_root()
    if isinstance(root.command, click.Group):
        check_tables(content, root.command.list_commands(root))
    shown = dict(_flat(content))
    source = dict.fromkeys(shown, str(config_path()))
    for name, variable in VARIABLES.items():
        if os.environ.get(variable):
            shown[name], source[name] = os.environ[variable], variable
    for name in sorted(shown):
        tell(
            f"{name} = {json.dumps(shown[name])}  ({source[name]})",
            name=name,
            value=shown[name],
            source=source[name],
        )
    if not shown:
        say(f"nothing is set; `dmsg config set discovery URL` writes {config_path()}", err=True)


@config.command("set")
@click.argument("name")
@click.argument("values", nargs=-1, required=True, metavar="VALUE...")
def set_(name: str, values: tuple[str, ...]) -> None:
    """Set the option NAME for all commands, or COMMAND.NAME for one; several VALUEs are a list."""
    parsed = [_parse(value) for value in values]
    _change(name, parsed[0] if len(parsed) == 1 else parsed)


@config.command()
@click.argument("name")
def unset(name: str) -> None:
    """Remove the setting NAME or COMMAND.NAME."""
    _change(name, None)


@config.command()
def path() -> None:
    """Print the path of the configuration file."""
    tell(str(config_path()), path=str(config_path()))


def _flat(table: dict[str, object], before: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in table.items():
        full = before + name.replace("_", "-")
        found += _flat(value, f"{full}.") if isinstance(value, dict) else [(full, _plain(value))]
    return found


def _plain(value: object) -> object:
    """Return a value from TOML in a form that JSON allows.  Dates and times become text; no setting has such a
    value.
    """
    return json.loads(json.dumps(value, default=str))


def _parse(text: str) -> object:
    """Return a typed value as a number, a boolean or a text.  Only ``true`` and ``false`` are booleans."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _change(name: str, value: object) -> None:
    """Change a setting, or remove it if the value is None.

    :raises ConfigError: the setting is invalid.
    :raises ConfigNotWritten: the file cannot be written.
    """
    *tables, last = name.split(".")
    if value is not None and not tables and last not in (*NETWORK, NAMES):
        known = ", ".join((*NETWORK, NAMES))
        raise WrongSetting(
            f"{last!r} cannot be set for all commands, only {known} can; to set an option of one command, use "
            f"COMMAND.{last}, as in send.words"
        )
    if value is not None:
        _check(tables, last, value)
    write_settings({name: value})


def _check(tables: list[str], name: str, value: object) -> None:
    """Check a setting before it is written.

    :param tables: names of the command and of its groups; empty for a setting of all commands.
    :raises ConfigError: there is no such command or option, or the option does not accept the value.
    """
    context = click.get_current_context()
    found: click.Command | None = context.find_root().command
    if not tables:
        if name == NAMES:
            if not isinstance(value, str):
                raise WrongSetting(f"{NAMES} must be the name of a file")
            return
        # Only network options may be set above the first [table] of the file. The command ping has all network options,
        # so a name is looked up among the options of ping.
        tables = ["ping"]
    if tables and tables[0] == NETWORKS:
        raise WrongSetting("networks are changed by `dmsg join INVITATION` and `dmsg leave NAME`")
    for table in tables:
        found = found.get_command(context, table) if isinstance(found, click.Group) else None
        if found is None:
            raise WrongSetting(f"there is no command dmsg {' '.join(tables)}")
    assert found is not None
    spelled = f"--{name}"
    option = next((one for one in found.params if spelled in (*one.opts, *one.secondary_opts)), None)
    if not isinstance(option, click.Option) or not (option.expose_value or name in NETWORK):
        raise WrongSetting(f"dmsg {' '.join(tables)} has no option {spelled}")
    try:
        option.type_cast_value(context, check_value(option, name, value))
    except click.BadParameter as error:
        raise WrongSetting(f"{name}: {error.message}") from None
    except ConfigError as error:
        raise WrongSetting(str(error)) from None
