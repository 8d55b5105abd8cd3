"""Access of Spark's tasks to files and tables in object stores.

Tasks use delta-rs, which also reads and writes the logs of the tables. So one rule says how a store is reached:
delta-rs takes the address and the keys from environment variables of the driver, and Spark sends these variables to the
tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow.fs as pafs

_AZURE = "AZURE_"
PREFIXES = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE}
"""Start of the names of the environment variables with the settings of a store, by the scheme of its URIs. Spark reads
the files of all other schemes."""
OF_EACH_MACHINE = ("_FILE", "_URI")
"""Ends of the names of variables that tasks do not get. They name files and services of one machine, so a task uses the
variables of its own machine."""
RETRIES = {"max_retries": "3", "retry_timeout": "20s"}
"""Options of delta-rs that limit how long a task waits for a store that does not answer. By default this is three
minutes for each file. Spark then reads the files."""
MAX_REASON = 300
"""Maximum number of characters of the reason for which a store cannot be read."""
_URI = re.compile(r"(?P<store>(?P<scheme>[a-z][a-z0-9+.-]*)://[^/]*)(?:/(?P<path>.*))?", re.DOTALL)
_NAME = r"(?!\.\.?(?:/|$))[\w.=+,:@ -]+"
_PLAIN_PATH = re.compile(rf"{_NAME}(?:/{_NAME})*", re.ASCII)
"""Regular expression for the paths that delta-rs uses unchanged. It escapes some other characters, and would then read
another file than Spark."""
_COLOUR = re.compile(r"\x1b\[\d*m")
_QUERY = re.compile(r"\?\S+")


class StoreError(Exception):
    """Error: a file in an object store cannot be read. The text of the error says why."""


@dataclass(frozen=True)
class StoreFailure:
    """Object store of which a task could not read a file, although the file may exist.

    :ivar store: scheme and name of the store, such as ``s3a://bucket``.
    :ivar reason: reason in one line.
    """

    store: str
    reason: str


def is_remote(path: str) -> bool:
    """Whether a path is a URI of a store, and not the path of a local file."""
    return "://" in path


def store_of(uri: str) -> str:
    """Return the scheme and the name of the store of a URI."""
    return _split(uri)[0]


def _split(uri: str) -> tuple[str, str, str]:
    """Return the store, the scheme and the path of a URI."""
    found = _URI.fullmatch(uri)
    return (found["store"], found["scheme"], found["path"] or "") if found else (uri, "", "")


class StoreSettings:
    """Settings of the object stores: the environment variables from which delta-rs takes them.

    The variables may contain keys. Spark sends this object to the tasks with their function, which Spark writes neither
    to its log nor to its web pages. The text of this object does not contain the variables.

    :param environment: environment variables; those of other programs are left out.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        prefixes = tuple(set(PREFIXES.values()))
        self._variables = {
            name: value
            for name, value in environment.items()
            if name.startswith(prefixes) and not name.endswith(OF_EACH_MACHINE)
        }

    def lack(self, uri: str) -> str | None:
        """Return the reason for which tasks cannot access the store of a URI; None if they may be able to."""
        prefix = PREFIXES.get(_split(uri)[1])
        if prefix is None:
            return "only Spark can access this kind of store"
        if not any(name.startswith(prefix) for name in self._variables):
            # Without settings, delta-rs would ask Amazon, whatever store Spark's own settings name.
            return f"no environment variable {prefix}... names its settings"
        return None

    def file_system(self, uri: str) -> pafs.FileSystem:
        """Return the file system whose root is a directory in a store.

        :raises ImportError: this machine lacks deltalake.
        :raises deltalake.exceptions.DeltaError: the store has an unknown kind or wrong settings.
        """
        # The workers of a cluster need this package only for object stores.
        from deltalake.fs import DeltaStorageHandler

        prefix = PREFIXES[_split(uri)[1]]
        of_store = {name: value for name, value in self._variables.items() if name.startswith(prefix)}
        return pafs.PyFileSystem(DeltaStorageHandler(uri, of_store | RETRIES))


NO_STORES = StoreSettings({})
"""Settings for tasks that access local files only."""


class StoreReader:
    """Reader of whole files in object stores. After a store has failed, none of its files is tried again.

    :ivar failures: stores that have failed.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._systems: dict[str, pafs.FileSystem] = {}
        self.failures: dict[str, StoreFailure] = {}

    def read(self, uri: str, limit: int) -> bytes:
        """Return the content of a file.

        :param limit: maximum size of the file in bytes.
        :raises StoreError: the file cannot be read, or is larger.
        """
        store, _, path = _split(uri)
        if store in self.failures:
            raise StoreError(self.failures[store].reason)
        if _PLAIN_PATH.fullmatch(path) is None:
            raise StoreError("only Spark can read a file with such a name")
        try:
            if store not in self._systems:
                self._systems[store] = self._settings.file_system(store)
            with self._systems[store].open_input_file(path) as file:
                if file.size() > limit:
                    raise StoreError("the file is too large")
                return bytes(file.read(limit + 1))
        except FileNotFoundError as error:
            raise StoreError(one_line(error)) from None
        except StoreError:
            raise
        except Exception as error:
            # The errors of delta-rs have no common base class, and a missing package is no reason to end the task.
            self.failures[store] = StoreFailure(store, one_line(error))
            raise StoreError(one_line(error)) from None


def one_line(error: Exception) -> str:
    """Return the text of an error of delta-rs in one line, without the queries of URLs, which may contain keys."""
    words = _QUERY.sub("", _COLOUR.sub("", str(error)).replace("\u21b3", ":")).split()
    return " ".join(words).replace(" :", ":")[:MAX_REASON]
