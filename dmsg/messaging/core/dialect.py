"""How a client speaks to servers and programs of one time.  No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.messaging.core.wire import Profile

Acks = bool | None
"""Whether a remote acknowledges what it gets; None: its first word says."""
ACKS: dict[str, Acks] = {"auto": None, "yes": True, "no": False}
"""How options name what a client assumes of programs that it does not know."""
IDS = {"one": False, "two": True}
"""How they name the ids in the answer to an OpenChannel."""


def profile_of(name: Profile | str) -> Profile:
    """The profile of that name, ``seed`` or ``skywire``.  :raises ValueError: there is none."""
    try:
        return Profile(name)
    except ValueError:
        raise ValueError(f"profile is {' or '.join(one.value for one in Profile)}, not {name!r}") from None


@dataclass(frozen=True, slots=True)
class Dialect:
    """What changed in the Go code while it was written.

    :ivar profile: the layout of frames.
    :ivar acks: whether programs that others have written acknowledge what they get inside channels, as Go did until
        2019-04-15, and this one with them.
    :ivar two_ids: OpenChannel is answered with two ids, as Go does from 2019-03-13 on.
    """

    profile: Profile = Profile.SEED
    acks: Acks = False
    two_ids: bool = False

    def __post_init__(self) -> None:
        if self.profile is Profile.SEED and (self.acks or self.two_ids):
            raise ValueError("acknowledgements and two ids are of the skywire profile")


def dialect_of(profile: Profile | str, acks: Acks, two_ids: bool) -> Dialect:
    """What is asked for; in the seed profile nobody acknowledges.

    :raises ValueError: no such profile, or it knows neither acks nor two ids.
    """
    profile = profile_of(profile)
    if acks not in (None, True, False):
        raise ValueError(f"acks is True, False or None, not {acks!r}")
    return Dialect(profile, acks or False if profile is Profile.SEED else acks, two_ids)


SEED = Dialect()
"""That of the seed document."""
