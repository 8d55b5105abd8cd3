"""Many small directories into one, so that a lake that is fed every minute stays quick to list.

On a local disk only: it needs a rename that happens whole or not at all.  One
merge is a hidden directory, which Spark's readers pass over::

    PARENT/_merge-N/           written by Spark; complete once it holds _SUCCESS
    PARENT/_merge-N/_merged    the names of the directories that it stands for

then those are removed and it is renamed to ``batch=N`` or ``run=N``, the last of
them.  :func:`finish` does again what a kill has interrupted, before anything
is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame

from dmsg.analytics.schemas import write_options

MERGE_AT = 64
"""Small directories of one kind that are merged into one; commits that are kept."""
SMALL_DIRECTORY = 32 * 1024 * 1024
"""Bytes from which on a directory is left as it is."""
_PREFIX = "_merge-"
_LIST = "_merged"


def finish(parent: Path, kind: str) -> None:
    """Complete a merge that was complete but for its names; forget one that was not.

    :param kind: what directories are called before their number: ``batch=``.
    """
    for merge in parent.glob(f"{_PREFIX}*"):
        if (merge / "_SUCCESS").exists() and (merge / _LIST).exists():
            _take_over(merge, kind)
        else:
            shutil.rmtree(merge)


def _take_over(merge: Path, kind: str) -> None:
    for name in json.loads((merge / _LIST).read_text()):
        shutil.rmtree(merge.parent / name, ignore_errors=True)
    merge.rename(merge.parent / (kind + merge.name.removeprefix(_PREFIX)))


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.parquet"))


def merge(
    parent: Path, kind: str, last: int, read: Callable[[list[str]], DataFrame], partitions: tuple[str, ...]
) -> int:
    """Merge what is small, once there is enough of it.

    :param last: directories of a greater number are not in the tables yet.
    :param read: the rows of directories.
    :param partitions: columns that are directories below.
    :returns: how many directories became one.
    """
    numbers = sorted(int(path.name.removeprefix(kind)) for path in parent.glob(f"{kind}*"))
    small = [number for number in numbers if number <= last and _size(parent / f"{kind}{number}") < SMALL_DIRECTORY]
    if len(small) < MERGE_AT:
        return 0
    names = [f"{kind}{number}" for number in small]
    target = parent / f"{_PREFIX}{small[-1]}"
    rows = read([str(parent / name) for name in names])
    rows = rows.repartition(*partitions) if partitions else rows.coalesce(1)
    writer = rows.write.mode("overwrite").options(**write_options(rows.schema))
    writer.partitionBy(*partitions).parquet(str(target))
    written = target / f"{_LIST}.new"
    written.write_text(json.dumps(names))
    written.rename(target / _LIST)
    _take_over(target, kind)
    return len(names)


def prune(commits: Path) -> int:
    """Forget all commits but the newest; each is one file with one line.

    :returns: how many.
    """
    files = list(commits.glob("part-*.txt"))
    if len(files) < 2 * MERGE_AT:
        return 0
    by_run = sorted((json.loads(text)["run"], path) for path in files if (text := path.read_text()))
    old = [path for _, path in by_run[:-MERGE_AT]]
    for path in old:
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    return len(old)
