"""Receipts: what one end of a transport says was delivered, signed by its key.

198 bytes, integers big endian (docs/pipeline/receipts.md)::

    version(1) = 1
    role(1)           0: this end asked for the transport, 1: it was asked
    transport(16)     its identity, which the other end and the server know too
    server(33)        the server's public key
    signer(33)        the public key of this end
    peer(33)          the public key of the other end
    delivered_out(8)  bytes of user data that the other end has acknowledged
    delivered_in(8)   bytes of user data that this end has received
    signature(65)     of SHA-256 of "dmsg receipt 1" and all that stands before

A server can make none, because it has neither client's key; it can withhold
one, and then that work is not credited.  No I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

from dmsg.errors import KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature

VERSION = 1
_CONTEXT = b"dmsg receipt 1"
_BODY = struct.Struct(">BB16s33s33s33sQQ")
SIGNATURE_SIZE = 65
RECEIPT_SIZE = _BODY.size + SIGNATURE_SIZE
IDENTITY_SIZE = 16
_IDENTITY = b"dmsg transport 1"


def transport_identity(request: bytes, accept: bytes) -> bytes:
    """16 bytes that both clients and the server know of a transport, and nobody else.

    The first half of SHA-256 over ``dmsg transport 1``, the payload of REQUEST
    and that of ACCEPT.  A secure transport's hold new keys, so no two
    are alike.
    """
    return sha256(_IDENTITY + request + accept).digest()[:IDENTITY_SIZE]


class ReceiptError(Exception):
    """It is no receipt, or nobody's; the text says why."""


class Role(IntEnum):
    """Which end signs."""

    INITIATOR = 0
    RESPONDER = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """What it says."""

    role: Role
    transport: bytes
    server: PubKey
    signer: PubKey
    peer: PubKey
    delivered_out: int
    delivered_in: int

    def sign(self, key: SecKey) -> bytes:
        """The 198 bytes.  :param key: the signer's."""
        body = _BODY.pack(
            VERSION,
            self.role,
            self.transport,
            self.server,
            self.signer,
            self.peer,
            min(self.delivered_out, 2**63 - 1),
            min(self.delivered_in, 2**63 - 1),
        )
        return body + key.sign(_CONTEXT + body)


def names_in(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The transport, the server's key and the signer's that a receipt names, nothing of it checked.

    :param data: ``RECEIPT_SIZE`` bytes.
    """
    _, _, transport, server, signer, _, _, _ = _BODY.unpack_from(data)
    return transport, server, signer


def parse_receipt(data: bytes) -> Receipt:
    """What a receipt says, if its signer said it.

    :raises ReceiptError: see its text.
    """
    if len(data) != RECEIPT_SIZE:
        raise ReceiptError(f"{len(data)} bytes are no receipt")
    body = data[: _BODY.size]
    version, role, transport, server, signer, peer, out, received = _BODY.unpack(body)
    if version != VERSION or role not in (0, 1) or max(out, received) >= 2**63:
        raise ReceiptError("malformed")
    if signer == peer:
        raise ReceiptError("both ends are the same client")
    try:
        receipt = Receipt(Role(role), transport, PubKey(server), PubKey(signer), PubKey(peer), out, received)
        receipt.signer.verify(_CONTEXT + body, Signature(data[_BODY.size :]))
    except KeyFormatError:
        raise ReceiptError("malformed key or signature") from None
    except SignatureError:
        raise ReceiptError("signed by somebody else") from None
    return receipt
