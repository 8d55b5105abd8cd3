"""What the plan of each table reads, noted while a run makes the tables."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from pyspark.sql import DataFrame

from dmsg.analytics import refine
from dmsg.analytics.changes import ENDS, OBSERVED
from dmsg.analytics.table_plans import Read, Tables
from dmsg.analytics.views import VIEWS

OF_ONE_FAMILY = {name: view.family for name, view in VIEWS.items()} | {"heartbeats": "beat"}
"""Silver tables that change with the events of one family, and with nothing else."""
NUMBERS_OF = {"silver_tables": ENDS, "daily_tables": OBSERVED, "overall_tables": "numbers"}
"""The part of the table ``numbers`` that the tables of a layer need."""


class Inputs:
    """Inputs of the tables, under the names of :mod:`dmsg.analytics.changes`.

    :ivar same: inputs of which the rows of the same day count.
    :ivar around: inputs of which the rows of the days before and after count, too.
    """

    def __init__(self) -> None:
        self.same: dict[str, set[str]] = defaultdict(set)
        self.around: dict[str, set[str]] = defaultdict(set)
        self._planned = threading.local()

    def _note(self, found: dict[str, set[str]], layer: str, name: str) -> None:
        name = NUMBERS_OF[layer] if name == "numbers" else OF_ONE_FAMILY.get(name, name)
        found[self._planned.table].add(name)

    def _read(self, read: Read, layer: str, *, around: bool) -> Read:
        def noted(name: str) -> DataFrame:
            self._note(self.around if around else self.same, layer, name)
            return read(name)

        return noted

    def _receipts(
        self, found: dict[str, set[str]], layer: str, accepted: Callable[[], DataFrame]
    ) -> Callable[[], DataFrame]:
        def noted() -> DataFrame:
            self._note(found, layer, "receipts")
            return accepted()

        return noted

    def _plan(self, name: str, plan: Callable[[], DataFrame]) -> Callable[[], DataFrame]:
        def planned() -> DataFrame:
            self._planned.table = name
            return plan()

        return planned

    def _tables(self, layer: str, plans: Callable[..., Tables], readers: int) -> Callable[..., Tables]:
        def planned(*given: Any, **more: Any) -> Tables:
            arguments = list(given)
            for place in range(readers):
                around = layer != "overall_tables" and place == readers - 1
                arguments[place] = self._read(given[place], layer, around=around)
            if layer == "silver_tables" and given[4] is not None:
                arguments[4] = self._receipts(self.around, layer, given[4])
            for name, found in (("accepted", self.around), ("accepted_on_days", self.same)):
                if more.get(name) is not None:
                    more[name] = self._receipts(found, layer, more[name])
            return {name: self._plan(name, plan) for name, plan in plans(*arguments, **more).items()}

        return planned

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the inputs of the tables that runs make meanwhile."""
        with ExitStack() as stack:
            for layer, readers in (("silver_tables", 3), ("daily_tables", 2), ("overall_tables", 2)):
                stack.enter_context(patch.object(refine, layer, self._tables(layer, getattr(refine, layer), readers)))
            yield
