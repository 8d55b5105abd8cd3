"""Archive of Spark's classes in the form in which Java has loaded them (AppCDS). It halves the CPU time that the start
of a JVM takes.

The archive is a file of about 170 MB in a cache directory. ``dmsg analytics install`` makes it, and it is optional:
without an archive, or with one of another version, Java loads its classes as usual. The name of the file depends on the
versions and paths of Java and Spark, so a new version of either needs a new archive.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from dmsg.errors import DmsgError

PATTERN = "spark-*.jsa"
"""Glob pattern of the names of archives."""
_UNQUOTED = re.compile(r"[\s\"'\\\\]")
TRAINING_SECONDS = 600.0
"""Maximum seconds that making an archive of classes may take."""


class ArchiveFailed(DmsgError):
    """Error: no archive could be made."""


def archive_path(directory: Path, java_home: Path) -> Path | None:
    """Return the path of the archive for this Java and this Spark; None if the version of Java is unknown.

    :param directory: cache directory of the archives.
    """
    try:
        release = (java_home / "release").read_bytes()
    except OSError:
        return None
    spark_home = Path(pyspark.__file__).parent
    digest = hashlib.sha256(b"\0".join([release, bytes(java_home), bytes(spark_home)])).hexdigest()
    return directory / f"spark-{pyspark.__version__}-{digest[:16]}.jsa"


def usable_archive(directory: Path, java_home: Path) -> Path | None:
    """Return the path of the archive for this Java and this Spark; None if the archive does not exist, or if another
    user may have written it."""
    path = archive_path(directory, java_home)
    if path is None or _UNQUOTED.search(str(path)):
        return None
    try:
        for one in (path, directory):
            found = one.stat()
            if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
                return None
    except OSError:
        return None
    return path


def make_archive(directory: Path, java_home: Path) -> Path:
    """Make the archive for this Java and this Spark, and remove those of other versions.

    A separate process runs the jobs over a few events, and its JVM writes the archive as it ends.

    :raises ArchiveFailed: Java wrote no archive.
    :raises OSError: the directory cannot be written to.
    """
    target = archive_path(directory, java_home)
    if target is None:
        raise ArchiveFailed(f"{java_home} has no file `release`, so its version is not known")
    if _UNQUOTED.search(str(target)):
        raise ArchiveFailed(f"{target} has a character that Java's options cannot have")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        fresh = Path(place) / target.name
        program = (sys.executable, "-P", "-m", "dmsg.analytics.class_training", str(fresh))
        environment = os.environ | {"JAVA_HOME": str(java_home)}
        try:
            done = subprocess.run(
                program, capture_output=True, text=True, check=False, timeout=TRAINING_SECONDS, env=environment
            )
        except subprocess.TimeoutExpired:
            raise ArchiveFailed(f"no archive was ready within {TRAINING_SECONDS:.0f} seconds") from None
        if done.returncode or not fresh.exists():
            said = (done.stderr.strip() or "Java wrote no archive").splitlines()[-1]
            raise ArchiveFailed(said)
        for old in directory.glob(PATTERN):
            old.unlink(missing_ok=True)
        fresh.chmod(0o600)
        fresh.replace(target)
    return target
