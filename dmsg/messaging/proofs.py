"""How discovery asks a server of any family to prove its key."""

from __future__ import annotations

from functools import partial

from dmsg.discovery.checks import proof
from dmsg.discovery.checks.proof import Opening, Openings
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.wire import Profile


def _signed(remote: PubKey, profile: Profile) -> Opening:
    return JSONHandshake(SecKey.generate(), remote, profile=profile)


OPENINGS: Openings = {
    **proof.OPENINGS,
    **{profile.feature: partial(_signed, profile=profile) for profile in reversed(Profile)},
}
"""Those of discovery, and of the older system.  What an entry does not say is tried in this order."""
