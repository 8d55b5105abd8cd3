"""Vouchers: signatures by which a server allows a sender to deliver the server's events to collectors. No reactor.

Each event names its producer. If the producer is a public key, a collector accepts its events only from a sender for
which this key has signed a voucher. Otherwise any sender on the collector's list could send events in the name of any
server. The server writes its voucher to the directory of its events. The voucher is for the sender's key in the same
directory.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from dmsg.errors import DmsgError, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature, load_or_create_key
from dmsg.telemetry.lines import read_lines
from dmsg.telemetry.schema import MAX_LINE

SENDER_KEY_FILE = "sender.key"
"""Name of the sender's key file, in the directory of the events."""
_SUFFIX = ".voucher"


def statement(producer: PubKey, sender: PubKey) -> bytes:
    """Return the bytes that a producer signs in a voucher: JSON without white space, with both keys in hex."""
    return f'{{"act":"bring events","producer":"{producer}","sender":"{sender}"}}'.encode()


def is_vouched(producer: PubKey, sender: PubKey, voucher: str) -> bool:
    """Whether ``voucher``, in 130 hex digits, is the producer's signature for the sender."""
    try:
        producer.verify(statement(producer, sender), Signature.from_hex(voucher))
    except (KeyFormatError, SignatureError):
        return False
    return True


def write_voucher(directory: Path, key: SecKey) -> None:
    """Write a voucher for the sender's key of a directory. If this key does not exist, it is created.

    :param key: the server's secret key.
    :raises DmsgError: the sender's key cannot be read or made.
    :raises OSError: the voucher cannot be written.
    """
    sender = load_or_create_key(directory / SENDER_KEY_FILE).public
    path = directory / f"{key.public}{_SUFFIX}"
    text = key.sign(statement(key.public, sender)).hex()
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text)
    fresh.replace(path)


def voucher_for(file: Path) -> str:
    """Return the voucher for the events of a file from the file's directory; an empty text if there is none."""
    try:
        # Only the first line is read for the producer, because a collector accepts only files with a single producer.
        line = next(read_lines(file, MAX_LINE), b"")
        producer = PubKey.from_hex(json.loads(line)["producer"])
        voucher = (file.parent / f"{producer}{_SUFFIX}").read_text()
        Signature.from_hex(voucher)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, DmsgError):
        return ""
    return voucher
