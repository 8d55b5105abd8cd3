"""Configuration file of the commands, which contains default values of options.

The file is ``$DMSG_CONFIG``, or else ``dmsg/config.toml`` in ``$XDG_CONFIG_HOME`` or ``~/.config``.  At its top are
network options, for all commands that have them.  A table contains the options of the command that it is named after
(``[send]``, ``[discovery.list]``).  The command line overrides the environment, which overrides the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click

from dmsg.directories import config_directory
from dmsg.directory_checks import UnsafeDirectory, read_trusted
from dmsg.errors import WrongUse

NETWORK = (
    "discovery",
    "key-file",
    "agent",
    "min-servers",
    "encryption",
    "cipher",
    "prefer",
    "only",
    "resume",
    "receipts",
    "timeout",
    "proxy",
)
"""Names of the options that may be at the top of the file, outside all tables."""
NAMES = "names"
"""Setting at the top of the file that contains the path of the address book."""
NETWORKS = "networks"
"""Table of the networks that this user has joined.  It contains a table for each network."""


class ConfigError(WrongUse):
    """Error: the file cannot be read, or has an invalid setting."""


def config_path() -> Path:
    """Return the path of the configuration file, which need not exist."""
    named = os.environ.get("DMSG_CONFIG")
    if named:
        return Path(named)
    return config_directory() / "config.toml"


def read_config() -> dict[str, object]:
    """Return the content of the configuration file; empty if the file does not exist.

    :raises ConfigError: the file cannot be read, is not TOML, or has an invalid setting.
    """
    path = config_path()
    try:
        text = read_trusted(path)
    except FileNotFoundError:
        return {}
    except UnsafeDirectory as error:
        raise ConfigError(error.strerror) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    import tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, value in content.items():
        if not isinstance(value, dict) and _option_name(name) not in (*NETWORK, NAMES):
            raise ConfigError(
                f"{_find_line(path, text, name)}: {name!r} cannot be set for all commands; an option of one command "
                "belongs in a table with the command's name, such as [send]"
            )
    if NAMES in content and not isinstance(content[NAMES], str):
        raise ConfigError(f"{_find_line(path, text, NAMES)}: the setting 'names' must be a text")
    return content


def check_tables(content: dict[str, object], commands: Sequence[str]) -> None:
    """Check that each table is named after a command.

    :raises ConfigError: a table is not, so its settings would have no effect.
    """
    for name, value in content.items():
        if isinstance(value, dict) and name not in (*commands, NETWORKS):
            path = config_path()
            raise ConfigError(f"{path}: [{name}] is not a command of dmsg")


def use_names(content: dict[str, object]) -> None:
    """Use the address book that the file names, unless the environment variable DMSG_NAMES names another one."""
    if NAMES in content and not os.environ.get("DMSG_NAMES"):
        os.environ["DMSG_NAMES"] = _expand_home(cast(str, content[NAMES]))


def defaults_of(command: click.Command, path: Sequence[str], content: dict[str, object]) -> dict[str, object]:
    """Return the default values that the file sets for a command's parameters, by parameter.

    :param path: names of the groups that contain the command, and its own name.
    :raises ConfigError: the command's table has a setting that is not an option of the command.
    """
    options: dict[str, click.Option] = {}
    for param in command.params:
        if isinstance(param, click.Option):
            options.update({opt.removeprefix("--"): param for opt in param.opts if opt.startswith("--")})
    table: object = content
    for name in path:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    found: dict[str, object] = {}
    for name, value in content.items():
        if not isinstance(value, dict) and _option_name(name) in options:
            option = options[_option_name(name)]
            found[option.name or ""] = _value_of(option, name, value)
    for name, value in table.items() if isinstance(table, dict) and path else ():
        if isinstance(value, dict):
            continue
        named = options.get(_option_name(name))
        if named is None or not named.expose_value:
            where = _find_line(config_path(), config_path().read_text(), name)
            raise ConfigError(f"{where}: dmsg {' '.join(path)} has no option --{_option_name(name)}")
        found[named.name or ""] = _value_of(named, name, value)
    return found


def _option_name(name: str) -> str:
    return name.replace("_", "-")


def _value_of(option: click.Option, name: str, value: object) -> object:
    """Return a value of the file in the form that click expects as the default of an option.

    :raises ConfigError: the option does not accept a value of this type.
    """
    return _value(name, check_value(option, name, value))


def check_value(option: click.Option, name: str, value: object) -> object:
    """Check that an option accepts a value of this type.  A repeatable option accepts a list.

    :returns: the value; for a repeatable option always a list.
    :raises ConfigError: the option does not accept the value.
    """
    if option.multiple or option.nargs != 1:
        value = value if isinstance(value, list) else [value]
    elif isinstance(value, list):
        raise ConfigError(f"{config_path()}: {name} takes one value, not a list")
    for one in value if isinstance(value, list) else [value]:
        if option.is_flag != isinstance(one, bool):
            wanted = "true or false" if option.is_flag else "a text or a number, not true or false"
            raise ConfigError(f"{config_path()}: {name} must be {wanted}")
    return value


def _value(name: str, value: object) -> object:
    if isinstance(value, list):
        return [_value(name, one) for one in value]
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{config_path()}: {name} must be a text, a number, true, false, or a list of these")
    return _expand_home(value) if isinstance(value, str) else value


def _expand_home(text: str) -> str:
    return os.path.expanduser(text) if text.startswith("~/") else text


def _find_line(path: Path, text: str, name: str) -> str:
    pattern = re.compile(rf"^\s*[\"']?{re.escape(name)}[\"']?\s*=")
    line = next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 0)
    return f"{path}, line {line}" if line else str(path)
