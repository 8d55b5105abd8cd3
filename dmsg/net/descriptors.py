"""Limit of open files of this process."""

from __future__ import annotations

import resource

DESCRIPTOR_RESERVE = 64
"""Number of file descriptors that are kept free for files, listening sockets and connections of the process itself."""
COMMAND_DESCRIPTORS = 8192
"""Soft limit of file descriptors that a command sets for itself, if the hard limit permits it.  With this limit, a
command can serve as many connections as its own limits permit.  Most systems set the soft limit to 1024, which the
streams of one peer could use up."""
UNLIMITED = 2**31
"""Number of connections that stands for "no limit"."""


def raise_descriptor_limit(most: int | None = None) -> int:
    """Raise the soft limit of file descriptors, and return how many connections are then possible.

    :param most: new soft limit; None, and a number above the hard limit, stand for the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The constant for "no limit" is a negative number, so the limit must not be compared by size before this check.
    endless = resource.RLIM_INFINITY
    wanted = hard if most is None or (hard != endless and hard < most) else most
    if soft != endless and (soft < wanted or wanted == endless):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError):
            pass
    return _connections(soft)


def max_connections() -> int:
    """Return how many connections the soft limit of file descriptors permits."""
    return _connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _connections(soft: int) -> int:
    return UNLIMITED if soft == resource.RLIM_INFINITY else max(1, soft - DESCRIPTOR_RESERVE)
