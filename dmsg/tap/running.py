"""Start of an entity as a service.  If the entity cannot start, the process ends with one clear line in the log."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol as Interface

from twisted.application.service import IServiceCollection, MultiService, Service
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.python.usage import Options as UsageOptions

from dmsg.base.interpreter import begin_process, keep_large_blocks, keep_modules, return_freed_memory
from dmsg.directories import note_on_working_directory
from dmsg.errors import DmsgError
from dmsg.keylock import KeyLock
from dmsg.net.clock import ClockWatch
from dmsg.net.reactor import Reactor
from dmsg.tap.config import on_hangup

_log = Logger()


class CannotStart(DmsgError):
    """Error: an entity cannot start."""


class Entity(Interface):
    """Interface of an entity's service."""

    @property
    def name(self) -> str:
        """Name of the entity in the log."""

    @property
    def ready(self) -> Deferred[Any]:
        """Deferred that fires when the entity listens on its ports, and fails if it cannot."""

    def setServiceParent(self, parent: IServiceCollection, /) -> None:
        """Attach the service to ``parent``, which then starts and stops it."""


class StopOnFailure(MultiService):
    """Service that contains an entity, and ends the process if the entity cannot start.

    :param options: options of the entity, whose ``parent`` has the options of twistd.
    :param hold_key: function that locks the key file, or another file of the entity, from the start to the end.
    :param follower: service that is started after the entity and stopped after it.
    :ivar entity: service of the entity.
    """

    def __init__(
        self,
        reactor: Reactor,
        entity: Entity,
        options: UsageOptions | None = None,
        hold_key: Callable[[], KeyLock] | None = None,
        follower: Service | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._twistd: Mapping[str, Any] = getattr(options, "parent", None) or {}
        self._message = ""
        self._hold_key = hold_key
        self._follower = follower
        self._key_lock: KeyLock | None = None
        self._reactor = reactor
        self._starting = False
        self._could_not = False
        self.entity = entity
        entity.setServiceParent(self)
        ClockWatch(reactor).setServiceParent(self)  # type: ignore[no-untyped-call]

    def startService(self) -> None:
        """Start the entity.  If it fails after this method has returned, the reactor stops and the process ends with
        status 1.

        :raises SystemExit: the entity cannot start, and the process is not a daemon.
        :raises CannotStart: the entity cannot start, and the process is a daemon. twistd passes the error to the
            process that started the daemon.
        """
        self._starting = True
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            # Without a handler, the signal that programs send after rotating logs would end the process.
            on_hangup(self._reactor, lambda: _log.info("SIGHUP: this program has nothing to reload"))
        if self._hold_key is not None:
            try:
                self._key_lock = self._hold_key()
            except DmsgError as error:
                self._message = str(error)
                _log.critical("{name}: {message}", name=self.entity.name, message=self._message)
                self._give_up()
        super().startService()  # type: ignore[no-untyped-call]
        if self._follower is not None:
            self._follower.startService()
        self.entity.ready.addCallbacks(self._up, self._failed)
        self._starting = False
        if self._could_not:
            self._give_up()

    def _give_up(self) -> None:
        if self._twistd.get("statusPipe") is not None:
            raise CannotStart(self._message) from None
        self._remove_pid_file()
        raise SystemExit(1) from None

    def _remove_pid_file(self) -> None:
        """Remove the pid file. twistd removes it only at a normal end."""
        name = self._twistd.get("pidfile")
        if name:
            with suppress(OSError):
                os.unlink(name)

    def stopService(self) -> object:
        stopped = maybeDeferred(super().stopService)

        def follow(result: object) -> object:
            if self._follower is None or not self._follower.running:
                return result
            return maybeDeferred(self._follower.stopService).addBoth(lambda _: result)

        def release(result: object) -> object:
            if self._key_lock is not None:
                self._key_lock.release()
            return result

        return stopped.addBoth(follow).addBoth(release)

    def _up(self, ports: object) -> object:
        gc.collect()
        return_freed_memory()
        keep_modules()
        begin_process()
        keep_large_blocks()
        return ports

    def _failed(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if failure.check(DmsgError, CannotListenError, OSError):
            message = f"{failure.value}{note_on_working_directory(failure.value)}"
        else:
            message = f"{type(failure.value).__name__}: {failure.value}"
            _log.failure("unhandled error at start", failure)
        self._could_not = True
        self._message = message
        _log.critical("{name}: {message}", name=self.entity.name, message=message)
        if not self._starting:
            self._reactor.addSystemEventTrigger("after", "shutdown", self._exit_with_failure)
            self._reactor.stop()

    def _exit_with_failure(self) -> None:
        """End the process with status 1. twistd itself would end with status 0."""
        self._remove_pid_file()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
