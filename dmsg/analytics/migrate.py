"""Tables of the format before this one, taken over once: what was read, from which all else is made anew.

They lay in directories that ``OUT/commits`` named::

    bronze/origin=S/batch=N/family=F/dt=DAY/
    silver/files/run=N/
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from dmsg.analytics.delta import LakeError
from dmsg.analytics.jobs import Outcome, Pipeline, Progress
from dmsg.analytics.schemas import BRONZE
from dmsg.analytics.store import FILES, local_path

FORMAT = 1
"""Of the commits that are taken over."""
ORIGIN = "migrated"
"""What took its place is called so in bronze."""


def _commit(spark: SparkSession, root: str) -> tuple[int, dict[str, int]]:
    """What the newest commit says."""
    try:
        lines = [row.value for row in spark.read.text(f"{root}/commits").collect()]
        said = max((json.loads(line) for line in lines), key=lambda one: int(one["run"]))
        if said["format"] != FORMAT:
            raise LakeError(f"{root} is of format {said['format']}, which is not known")
        return said["run"], said["batches"]
    except AnalysisException:
        raise LakeError(f"{root} holds no tables of an older dmsg") from None
    except (ValueError, KeyError, TypeError):
        raise LakeError(f"{root}/commits holds what is no commit") from None


def _lines(spark: SparkSession, root: str, batches: dict[str, int]) -> DataFrame:
    own = [one for one in BRONZE.fields if one.name not in ("batch", "family", "dt", "origin")]
    places = [StructField(name, StringType()) for name in ("origin", "family", "dt")]
    schema = StructType([*own, StructField("batch", LongType()), *places])
    rows = spark.read.schema(schema).parquet(f"{root}/bronze")
    taken = F.lit(False)
    for origin, last in batches.items():
        taken = taken | ((F.col("origin") == origin) & (F.col("batch") <= last))
    return rows.where(taken).withColumns({"origin": F.lit(ORIGIN), "batch": F.lit(0)})


def migrate(spark: SparkSession, old: str, out: str, progress: Progress) -> Outcome:
    """Make tables of what an older dmsg has read; nothing of it is changed.

    :raises LakeError: there is nothing to take over, or there are tables already.
    """
    local = local_path(old)
    root = old.rstrip("/") if local is None else str(local.absolute())
    run, batches = _commit(spark, root)
    pipeline = Pipeline(spark, out, now=datetime.now(UTC), progress=progress)
    lake = pipeline.lake
    with lake.claim() as claim:
        before = lake.state()
        if before.run:
            raise LakeError(f"there are tables in {out} already")
        lake.add_bronze(_lines(spark, root, batches), ORIGIN, 0)
        schema = StructType([*FILES.schema.fields, StructField("run", IntegerType())])
        files = spark.read.schema(schema).parquet(f"{root}/silver/files").where(F.col("run") <= run)
        return pipeline.refine(before, claim, [], known=files)
