"""Workers that verify receipts: tasks of Spark, or processes of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from dmsg.telemetry.verify import Workers, own_processes

if TYPE_CHECKING:
    from dmsg.analytics.session import Spark

_log = logging.getLogger(__name__)


def spark_workers(spark: Spark) -> Callable[[], AbstractContextManager[Workers]]:
    """Return a function that starts workers in the executors of Spark.

    The executors get the keys in the receipts and their pseudonyms, but not the secret of the pseudonyms. If they
    cannot run the verification, for example because they lack a package, processes of this machine do so.
    """
    return partial(_workers, spark)


@contextmanager
def _workers(spark: Spark) -> Iterator[Workers]:
    from dmsg.analytics.executors import ExecutorsFailed, run_each
    from dmsg.analytics.session import is_connect, is_local, session_of

    session = session_of(spark)
    if is_connect(session):
        with own_processes() as own:
            yield own
        return
    with ExitStack() as stack:
        instead: Workers | None = None

        def run(function: Callable[[Any], Any], arguments: Sequence[Any]) -> Sequence[Any]:
            nonlocal instead
            if instead is None:
                try:
                    return run_each(session, function, arguments)
                except ExecutorsFailed as error:
                    _log.warning("executors cannot verify receipts, so this machine does: %s", error)
                    instead = stack.enter_context(own_processes())
            return instead.run(function, arguments)

        yield Workers(session.sparkContext.defaultParallelism, run, share_files=is_local(spark))
