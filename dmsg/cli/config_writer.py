"""Changes to the configuration file, which keep the comments and the order of what a person wrote."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dmsg.cli.config_file import ConfigError, config_path, read_config


def write_settings(settings: Mapping[str, object]) -> None:
    """Write settings of the configuration file, all of them or none, without looking at their meaning.

    :param settings: values by name; a name has the tables that the setting is in before it, separated by dots. None
        removes a setting, and the tables that are empty then.
    :raises ConfigError: the file cannot be written, is no TOML, or a setting to remove is not there.
    """
    import tomlkit

    file = config_path()
    if any(value is not None for value in settings.values()):
        read_config()  # This call reports the line on which a file is wrong.
    try:
        document = tomlkit.parse(file.read_text() if file.exists() else "")
    except (OSError, ValueError) as error:  # An invalid setting can be removed as long as the file is TOML.
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    for name, value in settings.items():
        _change(document, name, value, file)
    _write(tomlkit.dumps(document).rstrip("\n") + "\n")


def _change(document: MutableMapping[str, Any], name: str, value: object, file: Path) -> None:
    import tomlkit

    *tables, last = name.split(".")
    way = [document]
    for one in tables:
        below = way[-1].setdefault(one, tomlkit.table())
        if not isinstance(below, MutableMapping):
            raise ConfigError(f"{file}: {one} is not a table")
        way.append(below)
    table = way[-1]
    spelled = next((known for known in table if known.replace("_", "-") == last), last)
    if value is not None:
        table[spelled] = value
        return
    if spelled not in table:
        raise ConfigError(f"{name} is not set in {file}")
    del table[spelled]
    for above, one, below in reversed(list(zip(way, tables, way[1:], strict=False))):
        if not below:
            del above[one]


def _write(text: str) -> None:
    file = config_path().resolve()  # If the file is a link, its target is written and the link stays.
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".config-", delete=False) as new:
            new.write(text)
            os.fchmod(new.fileno(), mode)
        os.replace(new.name, file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
