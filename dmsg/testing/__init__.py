"""Labs for tests of programs that use dmsg: networks in memory or in network namespaces, in which a test can cause
faults by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.testing.determinism": "Determinism Trace",
        "dmsg.testing.disk": "Disk DiskFile Operation PowerLost",
        "dmsg.testing.lab": "Lab repeatable_lab",
        "dmsg.testing.network": "Host Network",
        "dmsg.testing.namespaces": "LabError NamespaceLab available",
        "dmsg.testing.promise": "Pattern PromiseBroken Talkers",
        "dmsg.testing.sqlite_disk": "sqlite_on",
        "dmsg.testing.tcp": "Path",
        "dmsg.testing.walk": "Walk",
    },
)

if TYPE_CHECKING:
    from dmsg.testing.determinism import Determinism as Determinism, Trace as Trace
    from dmsg.testing.disk import Disk as Disk, DiskFile as DiskFile, Operation as Operation, PowerLost as PowerLost
    from dmsg.testing.lab import Lab as Lab, repeatable_lab as repeatable_lab
    from dmsg.testing.namespaces import LabError as LabError, NamespaceLab as NamespaceLab, available as available
    from dmsg.testing.network import Host as Host, Network as Network
    from dmsg.testing.promise import Pattern as Pattern, PromiseBroken as PromiseBroken, Talkers as Talkers
    from dmsg.testing.sqlite_disk import sqlite_on as sqlite_on
    from dmsg.testing.tcp import Path as Path
    from dmsg.testing.walk import Walk as Walk
