"""Recognition and explanation of errors that a full disk causes in this program, in Spark's Java, delta-rs, Arrow or
SQLite."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from dmsg.analytics.charts import human

MIN_FREE_SPACE = 4 * 1024 * 1024
"""Bytes of free space below which a disk counts as full."""
_SIGNS = re.compile(
    r"No space left on device|Disk quota exceeded|database or disk is full|\(os error (?:28|122)\)"
    r"|There is not enough space on the disk",
    re.IGNORECASE,
)


def is_of_full_disk(error: BaseException) -> bool:
    """Whether a full disk, or a full quota, is the cause of an error."""
    return any(_SIGNS.search(text) for text in _texts(error))


def _texts(error: BaseException | None) -> Iterator[str]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield str(error)
        # The texts of the causes in Java are searched, too, because the text of a Spark exception does not contain
        # them.
        java: BaseException | None = error
        while java is not None and hasattr(java, "_stackTrace"):
            yield f"{java} {getattr(java, '_stackTrace', '')}"
            java = getattr(java, "_cause", None)
        error = error.__cause__ or error.__context__


def temporary_directories() -> list[Path]:
    """Return the directories of Spark's temporary files, unless a setting of Spark names others."""
    named = os.environ.get("SPARK_LOCAL_DIRS", "")
    return [Path(one) for one in named.split(",") if one] or [Path(tempfile.gettempdir())]


def explain_full_disk(directories: Iterable[Path], temporary: Iterable[Path]) -> str:
    """Return a text for people that says which disk is full and what to do.

    :param directories: directories to which the command writes.
    :param temporary: directories of Spark's temporary files.
    """
    written, passing = list(directories), list(temporary)
    told = []
    for directory in [*written, *passing]:
        there = next((one for one in (directory, *directory.absolute().parents) if one.exists()), None)
        if there is not None and (usage := shutil.disk_usage(there)).free < MIN_FREE_SPACE:
            told.append((directory, f"{directory} ({human(usage.free, 'B')} of {human(usage.total, 'B')} free now)"))
    if told:
        text = f"no room is left on the disk of {' and '.join(text for _, text in told)}"
    else:
        text = f"no room was left on a disk, or in a quota: {' or '.join(map(str, [*written, *passing]))}"
    of_spark = any(directory in passing for directory, _ in told)
    advice = "; --conf spark.local.dir=DIR moves Spark's temporary files" if of_spark else ""
    return f"{text}: make room and repeat the command{advice}; the tables are as the last finished run left them"
