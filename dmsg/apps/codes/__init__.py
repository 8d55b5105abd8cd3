"""Codes: a number and a few words that one person tells another in place of a key, and the stream that their programs
open by such a code.

:func:`offer_code` is called at the side that makes the code, and :func:`accept_code` at the side that types it.
``docs/protocol/word-codes.md`` is the specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.apps.codes.pake": "CodeProtocolError",
        "dmsg.apps.codes.rendezvous": "CodeClient OfferedCode accept_code offer_code",
        "dmsg.apps.codes.stream": "CodeAgreement CodeExpired CodeUsedUp",
        "dmsg.apps.codes.words": "Code CodeError",
    },
)

if TYPE_CHECKING:
    from dmsg.apps.codes.pake import CodeProtocolError as CodeProtocolError
    from dmsg.apps.codes.rendezvous import (
        CodeClient as CodeClient,
        OfferedCode as OfferedCode,
        accept_code as accept_code,
        offer_code as offer_code,
    )
    from dmsg.apps.codes.stream import (
        CodeAgreement as CodeAgreement,
        CodeExpired as CodeExpired,
        CodeUsedUp as CodeUsedUp,
    )
    from dmsg.apps.codes.words import Code as Code, CodeError as CodeError
