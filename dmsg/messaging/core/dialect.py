"""Dialects of the Messaging System: combinations of frame layout, acknowledgements and ids that programs have used.  No
I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.messaging.core.wire import Profile

Acks = bool | None
"""Whether a remote uses acknowledgements. None means that its first message decides."""
ACKS: dict[str, Acks] = {"auto": None, "yes": True, "no": False}
"""Values of the option ``acks``: whether programs other than this package use acknowledgements."""
IDS = {"one": False, "two": True}
"""Values of the option ``ids``: whether the answer to an OpenChannel has two ids."""


def profile_of(name: Profile | str) -> Profile:
    """Return the profile with the name ``seed`` or ``skywire``.

    :raises ValueError: there is no such profile.
    """
    try:
        return Profile(name)
    except ValueError:
        raise ValueError(f"profile is {' or '.join(one.value for one in Profile)}, not {name!r}") from None


@dataclass(frozen=True, slots=True)
class Dialect:
    """Variant of the protocol, which changed several times with the Go code.

    :ivar profile: layout of frames.
    :ivar acks: whether programs other than this package use acknowledgements inside channels, as the Go code did until
        2019-04-15. This client then uses them, too.
    :ivar two_ids: whether OpenChannel is answered with two ids, as the Go code does from 2019-03-13 on.
    """

    profile: Profile = Profile.SEED
    acks: Acks = False
    two_ids: bool = False

    def __post_init__(self) -> None:
        if self.profile is Profile.SEED and (self.acks or self.two_ids):
            raise ValueError("acks and two_ids need the skywire profile")


def dialect_of(profile: Profile | str, acks: Acks, two_ids: bool) -> Dialect:
    """Return the dialect for these options. With :attr:`Profile.SEED`, None for ``acks`` means False.

    :raises ValueError: there is no such profile, or the profile does not support ``acks`` or ``two_ids``.
    """
    profile = profile_of(profile)
    if acks not in (None, True, False):
        raise ValueError(f"acks is True, False or None, not {acks!r}")
    return Dialect(profile, acks or False if profile is Profile.SEED else acks, two_ids)


SEED = Dialect()
"""Dialect that the seed document describes."""
