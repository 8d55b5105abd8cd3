"""What the tests of random walks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.trial.unittest import SynchronousTestCase


class WalkCase(SynchronousTestCase):
    """Test case that plants faults and looks for a walk that finds them."""

    def found(self, text: str, walks: Iterable[Callable[[], object]]) -> None:
        """Check that one of the walks fails with this text."""
        errors: list[str] = []
        for walk in walks:
            try:
                walk()
            except AssertionError as error:
                errors.append(str(error).partition("; faults")[0])
                if text in errors[-1]:
                    return
        self.fail(f"no walk found it, but: {errors}")
