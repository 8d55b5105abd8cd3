"""Dialects of the Messaging System: the variants of frame layout, acknowledgements and ids that were used over time.
No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.messaging.core.wire import Profile

Acks = bool | None
"""Whether a remote uses acknowledgements; None if its first message decides."""
ACKS: dict[str, Acks] = {"auto": None, "yes": True, "no": False}
"""Values of the option that says whether unknown programs use acknowledgements."""
IDS = {"one": False, "two": True}
"""Values of the option for the number of ids in the answer to an OpenChannel, each mapped to whether there are two."""


def profile_of(name: Profile | str) -> Profile:
    """Return the profile of that name, ``seed`` or ``skywire``.

    :raises ValueError: there is no such profile.
    """
    try:
        return Profile(name)
    except ValueError:
        raise ValueError(f"profile is {' or '.join(one.value for one in Profile)}, not {name!r}") from None


@dataclass(frozen=True, slots=True)
class Dialect:
    """Dialect: variant of the protocol, as it changed with the Go code.

    :ivar profile: layout of frames.
    :ivar acks: whether programs of others, and this client with them, use acknowledgements inside channels, as Go did
        until 2019-04-15.
    :ivar two_ids: whether OpenChannel is answered with two ids, as Go does from 2019-03-13 on.
    """

    profile: Profile = Profile.SEED
    acks: Acks = False
    two_ids: bool = False

    def __post_init__(self) -> None:
        if self.profile is Profile.SEED and (self.acks or self.two_ids):
            raise ValueError("acknowledgements and two ids need the skywire profile")


def dialect_of(profile: Profile | str, acks: Acks, two_ids: bool) -> Dialect:
    """Return the dialect for these options; in the seed profile, ``acks`` None means False.

    :raises ValueError: there is no such profile, or the profile has neither acknowledgements nor two ids.
    """
    profile = profile_of(profile)
    if acks not in (None, True, False):
        raise ValueError(f"acks is True, False or None, not {acks!r}")
    return Dialect(profile, acks or False if profile is Profile.SEED else acks, two_ids)


SEED = Dialect()
"""Dialect of the seed document."""
