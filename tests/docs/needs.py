"""Conditions that a block of the documentation may need besides the set-up of README."""

from __future__ import annotations

import os
import shutil

from tests.redis import redis_server

CLONE = os.environ.get("DMSG_DOCS_CLONE")
"""Path of a clone in which only README's set-up was done. If it is set, blocks that install something or take minutes
are run, too.
"""


def _java() -> str | None:
    try:
        from dmsg.analytics.session import JavaNotFound, find_java
    except ModuleNotFoundError as error:
        return f"the tests' own environment has no {error.name}"
    try:
        find_java()
    except JavaNotFound as error:
        return str(error)
    return None


def _program(name: str) -> str | None:
    return None if shutil.which(name) else f"there is no {name} here"


def _never(why: str) -> str:
    return f"needs {why}: its commands are only parsed"


NEEDS = {
    # Maps each word of a block's mark to a function. The function returns why the condition is not met here, or None.
    "curl": lambda: _program("curl"),
    "java": _java,
    "redis": lambda: None if redis_server() else "there is no redis-server",
    "clone": lambda: None if CLONE else "runs where DMSG_DOCS_CLONE names a clone in which only README was followed",
    "bare-clone": lambda: ".ci/run runs it in a bare clone",
    "spool": lambda: "needs what servers wrote over days: its commands are only parsed",
    # No test machine meets these conditions.
    "wheel": lambda: _never("the wheel of a release, which .ci/dist installs"),
    "cluster": lambda: _never("a Spark cluster"),
    "domain": lambda: _never("a host name of one's own"),
    "root": lambda: _never("root, and Debian's packages"),
    "systemd": lambda: _never("systemd"),
    "ssh": lambda: _never("an OpenSSH server with this user's key"),
    "tables-of-before": lambda: _never("tables of another day"),
    "ranking": lambda: _never("an operator's ranking"),
}


def lacking(needs: tuple[str, ...]) -> str | None:
    """Return the first reason for which a block with these marks cannot be run here.

    :raises KeyError: a mark is unknown.
    """
    return next((why for need in needs if (why := NEEDS[need]())), None)
