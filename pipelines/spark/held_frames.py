"""What the table `frames` holds, read by Spark."""

from __future__ import annotations

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F

from pipelines.logic.held_frames import HeldFrames, merge, side
from schemas.frames import DIRECTIONS


def read_held_frames(frames: DataFrame) -> HeldFrames:
    """The frames that rows of the table `frames` hold. Columns in: connection, direction, sequence."""
    connections = frames.groupBy("connection", "direction").agg(
        F.min("sequence").alias("low"), F.max("sequence").alias("high"), F.count("sequence").alias("frames")
    )
    whole = F.col("frames") == F.col("high") - F.col("low") + 1
    held: HeldFrames = {}
    for row in connections.where(whole).collect():
        held[_row_side(row)] = [(row.low, row.high)]
    broken = frames.join(connections.where(~whole).select("connection", "direction"), ["connection", "direction"])
    order = Window.partitionBy("connection", "direction").orderBy("sequence")
    islands = (
        broken.select("connection", "direction", "sequence")
        .distinct()
        .withColumn("island", F.col("sequence") - F.row_number().over(order))
        .groupBy("connection", "direction", "island")
        .agg(F.min("sequence").alias("low"), F.max("sequence").alias("high"))
    )
    for row in islands.collect():
        merge(held, {_row_side(row): [(row.low, row.high)]})
    return held


def _row_side(row: Row) -> bytes:
    return side(bytes(row.connection), DIRECTIONS.index(row.direction))
