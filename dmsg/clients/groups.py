"""Groups of peers: ``@friends`` stands for several keys, in options of commands that say who may connect or to whom to
send.

The file of groups has the name of the address book's file with ``.groups`` appended. It has a line ``GROUP MEMBER...``
for each group. A member is a key or a name of the address book. Names are looked up at each use, so the keys of a group
change with the address book.
"""

from __future__ import annotations

from dmsg.clients.address_book import AddressBook, UnknownName, changing_book, check_name, read_book, write_book
from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PubKey

MAX_GROUPS = 1000
"""Maximum number of groups in the file."""
MAX_MEMBERS = 10_000
"""Maximum number of members of one group."""
GROUP_PREFIX = "@"
"""Prefix that distinguishes the name of a group from names and keys."""


class Groups:
    """Groups that belong to one address book. Each call reads the file again.

    :ivar path: path of the file.
    """

    def __init__(self, names: AddressBook | None = None) -> None:
        self._names = names or AddressBook()
        self.path = self._names.path.with_name(f"{self._names.path.name}.groups")

    def all(self) -> dict[str, tuple[str, ...]]:
        """Return the members of every group, as written in the file: names or keys.

        :raises UnknownName: the file cannot be read, or one of its lines is malformed.
        """
        groups: dict[str, tuple[str, ...]] = {}
        for number, (name, *members) in read_book(self.path):
            try:
                groups[check_name(name)] = tuple(_check_member(one) for one in members)
            except DmsgError as error:
                raise UnknownName(f"{self.path}, line {number}: {error}") from None
        return groups

    def keys(self, group: str) -> frozenset[PubKey]:
        """Return the keys of a group's members.

        :param group: name of the group, with or without ``@``.
        :raises UnknownName: the group does not exist or is empty, or a member is not in the address book.
        """
        return frozenset(self.peers(group).values())

    def peers(self, group: str) -> dict[str, PubKey]:
        """Return a mapping from the names of a group's members to their keys. A member that is given as a key is its
        own name.

        If several members stand for the same key, only the first of them is returned. The errors are those of
        :meth:`keys`.
        """
        members = self.members(group)
        if not members:
            raise UnknownName(f"{_with_mark(group)} has no members")
        try:
            found = {self._names.find(one): one for one in reversed(members)}
            return {key.text if one == str(key) else one: key for key, one in reversed(found.items())}
        except UnknownName as error:
            raise UnknownName(f"{_with_mark(group)}: {error}") from None

    def members(self, group: str) -> tuple[str, ...]:
        """Return the members of one group.

        :raises UnknownName: there is no such group.
        """
        found = self.all().get(_plain(group))
        if found is None:
            raise UnknownName(f"there is no group {_with_mark(group)} in {self.path}")
        return found

    def add(self, group: str, members: tuple[str, ...]) -> None:
        """Add members to a group; create the group if it does not exist.

        :raises UnknownName: a member is neither a key nor a name in the address book, or a limit is exceeded.
        """
        name = check_name(_plain(group))
        for one in members:
            self._names.find(one)
        with changing_book(self.path):
            groups = self.all()
            # A dict removes duplicates and keeps the order in which members were added.
            groups[name] = tuple(dict.fromkeys((*groups.get(name, ()), *(one.lower() for one in members))))
            if len(groups) > MAX_GROUPS or len(groups[name]) > MAX_MEMBERS:
                raise UnknownName(f"there can be at most {MAX_GROUPS} groups, and {MAX_MEMBERS} members in a group")
            self._write(groups)

    def remove(self, group: str, members: tuple[str, ...] = ()) -> None:
        """Remove members from a group; without members, remove the group.

        :raises UnknownName: the group or a member does not exist.
        """
        name, gone = _plain(group), {one.lower() for one in members}
        with changing_book(self.path):
            groups, there = self.all(), self.members(group)
            if not gone <= set(there):
                raise UnknownName(f"{_with_mark(group)} does not contain {', '.join(sorted(gone - set(there)))}")
            if gone:
                groups[name] = tuple(one for one in there if one not in gone)
            else:
                del groups[name]
            self._write(groups)

    def forget(self, member: str) -> list[str]:
        """Remove a name from all groups.

        :returns: groups that contained the name.
        """
        with changing_book(self.path):
            groups = self.all()
            having = [name for name, members in groups.items() if member.lower() in members]
            for name in having:
                groups[name] = tuple(one for one in groups[name] if one != member.lower())
            if having:
                self._write(groups)
            return having

    def _write(self, groups: dict[str, tuple[str, ...]]) -> None:
        write_book(self.path, [" ".join((name, *members)) for name, members in sorted(groups.items())])


def _plain(group: str) -> str:
    return group.removeprefix(GROUP_PREFIX).lower()


def _with_mark(group: str) -> str:
    return f"{GROUP_PREFIX}{_plain(group)}"


def _check_member(text: str) -> str:
    try:
        return str(PubKey.from_text(text))
    except KeyFormatError:
        return check_name(text)


def allowed_keys(text: str, names: AddressBook | None = None) -> frozenset[PubKey]:
    """Return the keys for which ``text`` stands: a key, a name, or a group with ``@``. The result is never empty.

    :raises UnknownName: the text is neither a key, nor a known name, nor a group with members.
    """
    names = names or AddressBook()
    if text.startswith(GROUP_PREFIX):
        return Groups(names).keys(text)
    return frozenset((names.find(text.removeprefix("dmsg:")),))
