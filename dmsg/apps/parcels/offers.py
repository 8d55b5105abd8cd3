"""Offers: descriptions of parcels, which the sender sends and which the receiver accepts or refuses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dmsg.apps.parcels.manifest import DIRECTORY, ENTRIES_LIMIT, FILE
from dmsg.apps.parcels.wire import TEXT_LIMIT, THINGS_LIMIT
from dmsg.apps.paths import local_name
from dmsg.apps.transfer import TransferError


@dataclass(frozen=True)
class Offer:
    """Description of a parcel by its sender.  Nothing in it has been verified.

    :ivar kind: ``files``, ``text`` or ``pipe``.
    :ivar things: name, kind, bytes, number of files and number of directories of each top-level item.
    :ivar size: bytes of the whole parcel; 0 for a pipe, whose size is unknown.
    :ivar files: number of files.
    :ivar text: content of a text, or name of a pipe.
    :ivar of_0_1: whether the sender is a program of dmsg 0.1.  Such a program sends the content of its one file without
        waiting for an answer.
    """

    kind: str
    things: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    size: int = 0
    files: int = 0
    text: str = ""
    of_0_1: bool = False

    def with_name(self, name: str) -> Offer:
        """Return a copy of the offer in which its only item has another name.

        :raises TransferError: the offer does not have exactly one item.
        """
        if len(self.things) != 1:
            raise TransferError(f"{len(self.things)} files and directories are offered where one was expected")
        return replace(self, things=[(name, *self.things[0][1:])])


def offer_of(message: dict[str, object]) -> Offer:
    """Return the offer in a message.

    :raises TransferError: the offer is malformed.
    """
    kind = message.get("offer")
    if kind == "text" and isinstance(text := message.get("text"), str) and len(text) <= TEXT_LIMIT:
        return Offer("text", text=text, size=len(text.encode("utf-8", "replace")))
    if kind == "pipe" and isinstance(name := message.get("name"), str) and 0 < len(name) <= 255:
        return Offer("pipe", text=name)
    things, size, files = message.get("things"), message.get("size"), message.get("files")
    if kind == "files" and isinstance(things, list) and 0 < len(things) <= THINGS_LIMIT:
        found = [parse_item(one) for one in things]
        entries = sum(files + directories for _, _, _, files, directories in found)
        if len({name for name, *_ in found}) == len(found) and entries <= ENTRIES_LIMIT:
            total, number = sum(one[2] for one in found), sum(one[3] for one in found)
            if (size, files) == (total, number):
                return Offer("files", found, total, number)
    if kind is None and "name" in message:
        file = parse_item({"kind": FILE, "files": 1, "directories": 0, "name": message["name"], "size": size})
        return Offer("files", [file], file[2], 1, of_0_1=True)
    raise TransferError("the offer is malformed")


def parse_item(value: object) -> tuple[str, str, int, int, int]:
    thing = value if isinstance(value, dict) else {}
    name, kind = thing.get("name"), thing.get("kind")
    numbers_of = [thing.get(one) for one in ("size", "files", "directories")]
    if not isinstance(name, str) or kind not in (FILE, DIRECTORY):
        raise TransferError("the offer is malformed")
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers_of):
        raise TransferError("the offer is malformed")
    size, files, directories = numbers_of
    assert size is not None and files is not None and directories is not None
    return local_name(name), str(kind), size, files, directories
