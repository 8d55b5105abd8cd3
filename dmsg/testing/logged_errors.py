"""Check that nothing was logged as an error while a lab ran."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher


@contextmanager
def no_logged_errors() -> Iterator[None]:
    """Context manager that fails if an error was logged inside it.

    :raises AssertionError: an error was logged, or a Deferred that failed was dropped.
    """
    errors: list[str] = []

    def note(event: LogEvent) -> None:
        if event.get("log_failure") is not None or event.get("isError"):
            errors.append(formatEvent(event) + str(event.get("log_failure", "")))

    observer = cast(ILogObserver, note)
    globalLogPublisher.addObserver(observer)
    try:
        yield
        # Deferreds that failed and were dropped report their errors when they are collected, so garbage is collected
        # here.
        gc.collect()
        if errors:
            raise AssertionError(f"{len(errors)} errors were logged: {errors[0]}")
    except AssertionError as error:
        if errors and "were logged" not in str(error):
            raise type(error)(f"{error}; errors logged: {len(errors)}") from error
        raise
    finally:
        globalLogPublisher.removeObserver(observer)
