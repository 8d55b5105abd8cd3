"""The relay: what it decides of a message, and how it carries that out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.moved import forwarded

if not TYPE_CHECKING:
    # until 0.1 this was a module, with what dmsg.rmb.relay.rules has now
    __getattr__ = forwarded(__name__, ["dmsg.rmb.relay.rules", "dmsg.rmb.envelope.texts", "dmsg.rmb.envelope.wire"])
