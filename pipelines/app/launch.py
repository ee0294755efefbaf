"""Start of the streaming queries from the settings, which are converted here to plain configuration objects."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

from kiln.conf.settings.durations import micros, spark_interval
from kiln.conf.settings.model import JobName, Settings
from kiln.pipelines.archive import query as archive
from kiln.pipelines.batch import query as batch
from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_range import UpdateFilter
from kiln.pipelines.decode.breaker import DecodeBreaker
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.decode.user_decoder import load_decoder
from kiln.pipelines.delta.bundles import read_bundles, save_bundles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.kafka import Broker
from kiln.pipelines.runtime.query_context import QueryContext, Report, ignore_report
from kiln.pipelines.runtime.session import build_s3a_settings, create_session
from kiln.pipelines.sink import query as sink
from kiln.pipelines.updates import query as updates
from kiln.pipelines.updates.separators import SeparatorConfig, StreamsTopic
from kiln.schemas.wire.identity import peer_bytes, peer_text
from kiln.schemas.wire.message_id import parse_message_id_rule
from kiln.schemas.wire.topic_table import BundleSet


def create_submitted_session(name: str, settings: Settings) -> SparkSession:
    """Create the Spark session of a job under `spark-submit`, which provides the jars."""
    return create_session(
        name,
        master=settings.spark.master,
        driver_memory=settings.spark.driver_memory,
        java_options=settings.spark.java_options,
        jars=(),
        extra=build_s3a_settings(settings.locations, os.environ) | settings.spark.conf,
    )


def launch(
    name: JobName,
    spark: SparkSession,
    settings: Settings,
    listener: StreamingQueryListener | None = None,
    report: Report = ignore_report,
) -> StreamingQuery:
    """Start one streaming query from the settings.

    Raises:
        DecodingBrokenError: Built-in samples of valid messages do not decode.
        BundleError: A topic bundle of the settings contradicts the table `bundles`.
    """
    context = query_context(name, spark, settings, listener, report)
    match name:
        case "archive":
            decoding = decode_config(settings, remember=True)
            breaker = DecodeBreaker(settings.breaker.min_authors, settings.breaker.consecutive_failures)
            return archive.start(context, decoding, breaker)
        case "updates":
            # even if this run fetches no blocks, an earlier one may have written separators to the topic `streams`
            kafka = settings.broker
            servers, security = kafka.server_list(), kafka.security_options()
            streams = StreamsTopic(kafka.topic("streams"), tuple(servers), tuple(security.items()))
            separators = SeparatorConfig(streams, settings.fetches, believe=not settings.batch.only_verified)
            return updates.start(context, decode_config(settings), separators)
        case "batch":
            return batch.start(context, batch_config(settings))
        case "sink":
            return sink.start(context)
    raise ValueError(f"there is no query {name}")


def query_context(
    name: JobName,
    spark: SparkSession,
    settings: Settings,
    listener: StreamingQueryListener | None = None,
    report: Report = ignore_report,
) -> QueryContext:
    """Build the resources of one query from the settings."""
    kafka, job = settings.broker, settings.jobs.of(name)
    return QueryContext(
        spark=spark,
        broker=Broker(kafka.servers, kafka.prefix, kafka.spark_options()),
        client_options=kafka.client_options(),
        lake=Lake.from_location(settings.lake_root),
        checkpoints=settings.checkpoints_root,
        trigger=spark_interval(job.trigger),
        max_records=job.max_offsets_per_trigger,
        state_partitions=settings.spark.shuffle_partitions,
        dedup_retention=micros(settings.dedupe.signed_ttl),
        now=lambda: time.time_ns() // 1000,
        uptime=lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000,
        durable=settings.durability == "power",
        report=report,
        listener=listener,
    )


def batch_config(settings: Settings) -> BatchConfig:
    """Build the configuration of batching from the settings."""
    options = settings.batch
    authors = None if "*" in options.authors else frozenset(peer_text(peer_bytes(text)) for text in options.authors)
    return BatchConfig(
        micros(options.window),
        micros(options.grace),
        options.max_block_bytes,
        UpdateFilter(authors, options.only_verified),
    )


def decode_config(settings: Settings, *, remember: bool = False) -> DecodeConfig:
    """Build the configuration of decoding from the settings.

    It contains the topic bundles of the settings, and those of earlier settings from the table `bundles`.

    Args:
        remember: If true, also save the bundles of the settings in the table.

    Raises:
        BundleError: The settings and the table contradict each other.
        DecoderError: The setting `network.decoder` names a decoder that cannot be used.
    """
    network = settings.network
    if network.decoder:
        load_decoder(network.decoder)  # before a task of a query needs it
    lake = Lake.from_location(settings.lake_root)
    given = BundleSet(settings.topic_table.bundles)
    if remember:
        lake.create(("bundles",))
        bundles = save_bundles(lake, given, datetime.now(UTC))
    else:
        bundles = given.merge(read_bundles(lake))
    return DecodeConfig(
        default_policy=settings.policy.default,
        policies=settings.policy.networks,
        topic_policies=settings.policy.topics,
        batch_typ=settings.batch.typ,
        unsigned_horizon=micros(settings.dedupe.unsigned_ttl),
        bundles=bundles,
        ceramic=settings.is_ceramic,
        message_ids=parse_message_id_rule(network.message_id),
        decoder=network.decoder,
    )
