"""An entity that cannot start ends its process with one clear line."""

from __future__ import annotations

import gc
import sys
from typing import Any

from twisted.application.service import MultiService
from twisted.internet.defer import CancelledError
from twisted.internet.error import CannotListenError
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import DmsgError

_log = Logger()

GC_THRESHOLDS = (20_000, 20, 100)
"""Allocations before a young collection, and collections before the next
older one: with many connections a full one takes a tenth of a second."""


class StopOnFailure(MultiService):
    """Wraps a service whose ``ready`` says whether it came up.

    :ivar entity: the service.
    """

    def __init__(self, reactor: Any, entity: Any) -> None:
        super().__init__()
        self._reactor = reactor
        self.entity = entity
        entity.setServiceParent(self)

    def startService(self) -> None:
        super().startService()
        self.entity.ready.addCallbacks(self._up, self._failed)

    def _up(self, ports: Any) -> Any:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        return ports

    def _failed(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if failure.check(DmsgError, CannotListenError, OSError):
            message = str(failure.value)
        else:
            message = f"{failure.type.__name__}: {failure.value}"
            _log.failure("cannot start", failure)
        _log.critical("cannot start: {message}", message=message)
        sys.stderr.write(f"{self.entity.name}: {message}\n")
        stop = getattr(self._reactor, "stop", None)
        if stop is not None:
            self._reactor._exit_status = 1
            self._reactor.callWhenRunning(lambda: self._reactor.callLater(0, stop))
