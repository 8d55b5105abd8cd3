"""Handshakes by which discovery checks that a server of any protocol family has its secret key."""

from __future__ import annotations

from functools import partial

from dmsg.discovery.checks import proof
from dmsg.discovery.checks.proof import Opening, Openings
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.wire import Profile


def _signed_opening(remote: PubKey, profile: Profile) -> Opening:
    return JSONHandshake(SecKey.generate(), remote, profile=profile)


OPENINGS: Openings = {
    **proof.OPENINGS,
    **{profile.feature: partial(_signed_opening, profile=profile) for profile in reversed(Profile)},
}
"""Function that begins the handshake, for each feature by which a server's entry names its protocol.  For an entry
without such a feature, all handshakes are tried in this order."""
