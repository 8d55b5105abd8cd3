"""Address book: names that stand for public keys.

The file ``names`` in the configuration directory (``$XDG_CONFIG_HOME/dmsg``, else ``~/.config/dmsg``), or the file
named by ``DMSG_NAMES``, has a line ``NAME KEY`` for each name. Only the user changes it: no peer or server can add
names.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmsg.directories import config_directory
from dmsg.directory_checks import UnsafeDirectory, check_trusted_place, read_trusted
from dmsg.errors import DmsgError, KeyFormatError, WrongUse
from dmsg.keys import PUBKEY_TEXT_SIZE, PubKey
from dmsg.shared_files import FileBusy, exclusive_change, replace_file

MAX_NAMES = 100_000
"""Maximum number of names in the book."""
MAX_NAME = 63
"""Maximum number of characters of a name, so that each name fits into a DNS label."""
SUFFIX = ".dmsg"
"""Suffix that makes a key or a name of the address book a host name, for programs that do not know dmsg and connect
through ``dmsg socks``, for example.
"""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


class UnknownName(DmsgError, ValueError):
    """Error: a name is invalid or unknown, or the address book cannot be read or changed."""


class NotAName(UnknownName, WrongUse):
    """Error: a text is not valid as a name."""


class NoSuchName(UnknownName):
    """Error: the name is not in the address book."""


def default_path() -> Path:
    """Return the path of the address book's file."""
    named = os.environ.get("DMSG_NAMES")
    if named:
        return Path(named)
    return config_directory() / "names"


def check_name(name: str) -> str:
    """Check that a text is valid as a name, and return it in lower case.

    :raises UnknownName: the text is not valid as a name, or is a public key.
    """
    name = name.lower()
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise NotAName(f"{name[:80]!r} is not a name: letters, digits and hyphens, at most {MAX_NAME}")
    # A name that is also a key would never be found, because ``find`` first tries to read a text as a key.
    if len(name) == PUBKEY_TEXT_SIZE:
        with suppress(KeyFormatError):
            PubKey.from_text(name)
            raise NotAName(f"{name} is a public key: choose a name that is not one")
    return name


_Stamp = tuple[int, int, int, int]
MIN_CACHED_AGE = 1.0
"""Minimum seconds since the last change of an address book for its content to be cached. A book that was changed more
recently is read again at each use, because another change within that time may not alter the file's time stamp.
"""
_last: dict[Path, tuple[_Stamp, dict[str, PubKey]]] = {}
"""Cache of the address book that was read last. A proxy looks up a name for each connection, and reading 20,000 names
takes 0.1 s.
"""


def read_book(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the words of each line of a file. Comments (``#``) and empty lines are skipped.

    :raises UnknownName: the file cannot be read, or another user could change it.
    """
    try:
        text = read_trusted(path)
    except FileNotFoundError:
        return
    except UnsafeDirectory as error:
        raise UnknownName(error.strerror) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownName(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            yield number, words


@contextmanager
def changing_book(path: Path) -> Iterator[None]:
    """Context manager within which no other program changes the address book or the file of groups.

    :raises UnknownName: the file cannot be changed, another user could change it, or another program does not finish
        its change.
    """
    try:
        check_trusted_place(path)
        with exclusive_change(path):
            yield
    except UnsafeDirectory as error:
        raise UnknownName(error.strerror) from None
    except FileBusy as error:
        raise UnknownName(str(error)) from None
    except OSError as error:
        raise UnknownName(f"{path}: {error.strerror}") from None


def write_book(path: Path, lines: list[str]) -> None:
    """Replace the address book or the file of groups atomically. Callers must be inside :func:`changing_book`.

    :raises OSError: the file cannot be written.
    """
    # The file is replaced as a whole, so that a program that reads it at the same time gets the old or the new content.
    replace_file(path, "".join(f"{line}\n" for line in lines))


class AddressBook:
    """Address book in one file. The file is read again when it has changed."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def all(self) -> dict[str, PubKey]:
        """Return all names with their keys.

        :raises UnknownName: the file cannot be read, or one of its lines is malformed.
        """
        return dict(self._read())

    def _read(self) -> dict[str, PubKey]:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UnknownName(f"{self.path}: {error.strerror}") from None
        # The inode changes when ``write_book`` replaces the file, the ctime when a program changes the file in place.
        stamp = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        last = _last.get(self.path)
        if last is not None and last[0] == stamp:
            return last[1]
        names: dict[str, PubKey] = {}
        for number, words in read_book(self.path):
            try:
                name, key = words
                names[check_name(name)] = PubKey.from_text(key)
            except ValueError as error:
                why = error if isinstance(error, DmsgError) else "not NAME KEY"
                raise UnknownName(f"{self.path}, line {number}: {why}") from None
        # Only the book that was read last is cached, so that the cache stays small in a program that opens many books.
        _last.clear()
        if abs(time.time() - status.st_ctime) > MIN_CACHED_AGE:
            _last[self.path] = stamp, names
        return names

    def find(self, text: str) -> PubKey:
        """Return the key that ``text`` is, or the key of the name ``text``.

        :raises UnknownName: the text is neither a key nor a known name.
        """
        try:
            return PubKey.from_text(text)
        except KeyFormatError as error:
            if len(text) > MAX_NAME or not _NAME.fullmatch(text.lower()):
                raise UnknownName(str(error)) from None
        key = self._read().get(text.lower())
        if key is None:
            raise NoSuchName(
                f"{text!r} is neither a public key ({PUBKEY_TEXT_SIZE} characters) nor a name in {self.path}"
            )
        return key

    def find_host(self, host: str) -> PubKey:
        """Return the key for the host of a URL.

        :param host: key or name, with or without ``.dmsg``. A hexadecimal key before the suffix may be split by dots,
            because a DNS label has at most 63 characters.
        :raises UnknownName: the host is neither a key nor a known name.
        """
        if host.lower().endswith(SUFFIX):
            host = host[: -len(SUFFIX)].replace(".", "")
        return self.find(host)

    def name_of(self, key: PubKey) -> str | None:
        """Return a name of ``key``, or None if the book has none."""
        return next((name for name, known in self._read().items() if known == key), None)

    def has_key(self, key: PubKey) -> bool:
        """Whether the book has a name of ``key``; false if the book cannot be read."""
        try:
            return self.name_of(key) is not None
        except DmsgError:
            return False

    def name_or_key(self, key: PubKey) -> str:
        """Return a name of ``key``, or the key as text if the book has none or cannot be read."""
        return self._name_or(key, key.text)

    def name_or_short(self, key: PubKey) -> str:
        """Return a name of ``key``, or the short form of the key if the book has none or cannot be read."""
        return self._name_or(key, key.short)

    def _name_or(self, key: PubKey, text: str) -> str:
        try:
            return self.name_of(key) or text
        except DmsgError:
            return text

    def add(self, name: str, key: PubKey, *, replace: bool = False) -> None:
        """Add a name.

        :param replace: whether the name may already stand for another key, which is then replaced.
        :raises UnknownName: the name is invalid, or stands for another key and ``replace`` is false.
        """
        name = check_name(name)
        with changing_book(self.path):
            names = self.all()
            if names.get(name, key) != key and not replace:
                raise UnknownName(f"{name!r} already stands for {names[name].text} (use --replace to change it)")
            names[name] = key
            if len(names) > MAX_NAMES:
                raise UnknownName(f"the address book has {MAX_NAMES} names, the limit: remove some first")
            self._write(names)

    def remove(self, name: str) -> None:
        """Remove a name.

        :raises UnknownName: there is no such name.
        """
        with changing_book(self.path):
            names = self.all()
            if names.pop(name.lower(), None) is None:
                raise NoSuchName(f"there is no name {name!r}")
            self._write(names)

    def _write(self, names: dict[str, PubKey]) -> None:
        write_book(self.path, [f"{name} {key}" for name, key in sorted(names.items())])
