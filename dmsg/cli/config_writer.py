"""Changes to the configuration file.  Its comments and the order of its lines are preserved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dmsg.cli.config_file import ConfigError, config_path, read_config
from dmsg.directory_checks import UnsafeDirectory, check_trusted_place, read_trusted
from dmsg.errors import DmsgError
from dmsg.shared_files import FileBusy, exclusive_change, replace_file


class ConfigNotWritten(DmsgError):
    """Error: the configuration file cannot be written."""


def write_settings(settings: Mapping[str, object]) -> None:
    """Change settings in the configuration file, all of them or none.  Their meaning is not checked.

    :param settings: new values by name; None removes a setting.  A setting in a table has the table's name and a dot
        before its own name.  A table from which the last setting was removed is removed, too.
    :raises ConfigError: the file is not TOML, or does not contain a setting to remove.
    :raises ConfigNotWritten: the file cannot be written.
    """
    # A removal does not check the other settings, so that an invalid one can be removed.
    _change_file(lambda: settings if all(value is None for value in settings.values()) else _check_settings(settings))


def change_settings(choose: Callable[[dict[str, object]], Mapping[str, object]]) -> None:
    """Change settings in the configuration file, depending on its content.

    The file is locked meanwhile, so no other command of dmsg changes it.

    :param choose: function that gets the content of the file, and returns the settings as for :func:`write_settings`.
        If it raises an error, the file is not changed.
    :raises ConfigError, ConfigNotWritten: for the same reasons as in :func:`write_settings`.
    """
    _change_file(lambda: choose(read_config()))


def _check_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    read_config()  # The error of this call names the invalid line.
    return settings


def _change_file(choose: Callable[[], Mapping[str, object]]) -> None:
    import tomlkit

    file = config_path()
    try:
        check_trusted_place(file)
        with exclusive_change(file):
            settings = choose()
            document = tomlkit.parse(read_trusted(file) if file.exists() else "")
            for name, value in settings.items():
                _change(document, name, value, file)
            replace_file(file, tomlkit.dumps(document).rstrip("\n") + "\n")
    except FileBusy as error:
        raise ConfigNotWritten(str(error)) from None
    except DmsgError:
        raise
    except UnsafeDirectory as error:
        raise ConfigNotWritten(error.strerror) from None
    except OSError as error:
        raise ConfigNotWritten(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


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
