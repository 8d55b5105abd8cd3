"""What the random walks of several protocol families share: the text of a walk that fails, and the command line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from dmsg.testing.determinism import KEPT, Trace
from dmsg.testing.logged_errors import no_logged_errors


class Walking(Protocol):
    """Interface of a walk.

    :ivar faults: names of the faults so far, in order.
    """

    faults: list[str]


class Done(NamedTuple):
    """Walk that did not fail.

    :ivar amount: what the walk counts, for example the number of answered calls.
    :ivar faults: names of its faults, in order.
    """

    amount: int
    faults: list[str]
    trace: Trace


@contextmanager
def explained(seed: int, walk: Walking, trace: Trace, more: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Context manager for a walk. If the walk fails, the text of its error contains the seed, the faults and the last
    events. Errors that were only logged let the walk fail, too.

    :param more: function that returns a text to insert before the last events.
    """
    try:
        with no_logged_errors():
            yield
    except AssertionError as error:
        last = "\n".join(trace.last[-KEPT:])
        text = f"seed {seed}: {error}; faults: {', '.join(walk.faults)}{more()}; the last events:\n{last}"
        raise type(error)(text) from error


def run(
    module: str, description: str | None, steps: int, walk: Callable[[int, int], Done], counted: str, guarantee: str
) -> None:
    """Do random walks for ``--seconds`` seconds, or until a walk fails. With ``--seed``, do only the walk of this
    seed.

    :param module: name of the module that is run.
    :param steps: default number of steps of a walk.
    :param walk: function that does the walk of a seed with a number of steps.
    :param counted: text about the amount, which follows the number.
    :param guarantee: text that follows ``counted`` after walks that did not fail.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0, help="Seconds for which to do walks.")
    parser.add_argument("--seed", type=int, help="Do only the walk of this seed.")
    parser.add_argument("--steps", type=int, default=steps, help="Number of steps of each walk.")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        amount, faults, trace = walk(arguments.seed, arguments.steps)
        sys.stdout.write(
            f"seed {arguments.seed}: {amount} {counted}; faults: {', '.join(faults)}\n"
            f"{trace.count} events, hash {trace.digest()}\n"
        )
        return
    end = time.monotonic() + arguments.seconds
    first = int.from_bytes(os.urandom(4), "big")
    count = total = 0
    while time.monotonic() < end:
        try:
            total += walk(first + count, arguments.steps).amount
        except BaseException:
            sys.stdout.write(f"failed: python -m {module} --seed {first + count} --steps {arguments.steps}\n")
            raise
        count += 1
    sys.stdout.write(f"{count} walks, seeds {first} to {first + count - 1}: {total} {counted}{guarantee}\n")
