"""The Spark session of Kiln's jobs, and its settings for object stores (Hadoop's S3A)."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from kiln.conf.process.location import Location, StorePrefix
from kiln.pipelines.runtime.spark_environment import is_local

_PREFIX: Final = "spark.hadoop.fs.s3a."
_ENVIRONMENT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
"""environment variables that delta-rs reads and S3A does not; of two with the same meaning, the first is used"""

_SIMPLE: Final = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_TEMPORARY: Final = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_DEFAULT_CHAIN: Final = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
"""credentials of the same sources as in delta-rs: variables, profile files, web identity, instance role"""


def build_s3a_settings(locations: Iterable[Location], environ: Mapping[str, str]) -> dict[str, str]:
    """Build the Spark settings for lake and checkpoints in an object store. They contain secrets: never print them.

    Spark uses S3A to read tables, and to read and write checkpoints. delta-rs commits to the tables, because S3A has no
    put-if-absent: Delta's log store for S3A loses commits if another program writes too (docs/object-store.md).
    """
    settings = {
        f"{_PREFIX}bucket.{location.bucket}.{key}": value
        for location in locations
        if isinstance(location, StorePrefix)
        for key, value in _build_bucket_settings(location.options, environ).items()
    }
    return {**settings, f"{_PREFIX}impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"} if settings else {}


def _build_bucket_settings(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    known = {_normalize_key(key): environ[key] for key in reversed(_ENVIRONMENT) if environ.get(key)}
    known |= {_normalize_key(key): value for key, value in options.items()}
    settings: dict[str, str] = {}
    if endpoint := known.get("endpoint"):
        settings["endpoint"] = endpoint
        settings["connection.ssl.enabled"] = str(not endpoint.startswith("http://")).lower()
        settings["path.style.access"] = str(
            known.get("virtual_hosted_style_request", "false").lower() != "true"
        ).lower()
    if region := known.get("region"):
        settings["endpoint.region"] = region
    if (key := known.get("access_key_id")) and (secret := known.get("secret_access_key")):
        settings |= {"access.key": key, "secret.key": secret, "aws.credentials.provider": _SIMPLE}
        if token := known.get("token"):
            settings |= {"session.token": token, "aws.credentials.provider": _TEMPORARY}
    else:
        settings["aws.credentials.provider"] = _DEFAULT_CHAIN
    return settings


_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "default_region": "region",
    "session_token": "token",
}


def _normalize_key(key: str) -> str:
    """Map a key of delta-rs's storage options to one spelling: lower case, without `aws_`, and without aliases."""
    plain = key.lower().removeprefix("aws_")
    return _ALIASES.get(plain, plain)


# The first run of a query fixes these settings in its checkpoint.
_STATE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}

_DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The default of 50 tasks for a table's log costs more than reading the log.
    "spark.databricks.delta.snapshotPartitions": "1",
}

# Without its native library, Hadoop's local file system starts a process for each chmod and readlink: a quarter of a
# second for every step of every micro-batch. The file system in this jar does both in Java. These settings let Spark
# and Delta use it.
_LOCAL_FILES_JAR = "hadoop-bare-naked-local-fs"
LOCAL_FILES = {
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
}

_WORKER_SITE = Path(__file__).with_name("worker_site")
"""folder of the startup hook of Spark's Python processes"""

_APPENDED_CLASS_PATH = "SPARK_DIST_CLASSPATH"
"""variable with which Spark's launcher ends the class path"""

_STREAMING = {
    "spark.sql.streaming.noDataProgressEventInterval": "1000",
    "spark.sql.streaming.metricsEnabled": "true",
    # Watermarks follow processing time here: an empty micro-batch after each one would have no effect.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "20",
    # A record batch of the largest frames must fit into a Python worker.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "33554432",
    # So must the rows that Spark caches between two writes (10,000 by default), and Parquet's row groups.
    "spark.sql.inMemoryColumnarStorage.batchSize": "200",
    "spark.hadoop.parquet.block.size": "33554432",
    "spark.hadoop.parquet.page.size.row.check.max": "100",
    # The queries together have more generated classes than the 100 that Spark caches by default. With 100, each query
    # would evict the classes of the others, and Spark would compile them again and again.
    "spark.sql.codegen.cache.maxEntries": "2000",
    "spark.scheduler.mode": "FAIR",
    "spark.python.daemon.module": "kiln.pipelines.app.worker_daemon",
    # The default of 15 s for a Python process to authenticate itself is too short for a busy machine.
    "spark.python.authenticate.socketTimeout": "60s",
    # The workers of `transformWithState` never have this setting in their environment, and Spark starts a daemon for
    # each environment: with it on, a second daemon would import everything again (1 s of CPU, 130 MB).
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    "spark.executorEnv.PYTHONSAFEPATH": "1",  # Python workers never import from the current folder
    "spark.sql.session.timeZone": "UTC",
    # Settings that Spark masks in its UI, logs and plans. The default misses the keys of Azure's and Kafka's settings.
    "spark.redaction.regex": (
        "(?i)secret|password|token|credential|jaas|oauth|(access|account|session|encryption)[.]?key"
    ),
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def create_session(
    name: str,
    *,
    master: str,
    driver_memory: str,
    jars: Iterable[Path],
    appended: Iterable[Path] = (),
    java_options: str = "",
    log4j: Path | None = None,
    logs: Path | None = None,
    ui: bool = False,
    scratch: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> SparkSession:
    """Create a Spark session with Delta, the Kafka connector and the settings that Kiln's checkpoints need.

    Under `spark-submit`, its options are used in place of `master` and `driver_memory`. The other arguments are
    those of `build_session_settings`.

    Args:
        appended: Jars and folders for the end of the class path. They come last because the JVM uses a class data
            archive (deploy/run/spark_classes.py) only if the class path begins with that of the archive.
    """
    appended = tuple(appended)
    # Workers must run in the driver's interpreter: the system's interpreter lacks the packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # With one glibc arena for each thread, RocksDB's memory would grow by megabytes a minute.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    conf = build_session_settings(
        master=_get_submitted_master() or master,
        driver_memory=driver_memory,
        jars=jars,
        java_options=java_options,
        log4j=log4j,
        logs=logs,
        ui=ui,
        scratch=scratch,
        extra=extra,
    )
    if "SPARK_ENV_LOADED" in os.environ:  # set by spark-submit, whose options take precedence
        for key in {"spark.master", "spark.driver.memory"} - (extra or {}).keys():
            del conf[key]
    if appended and not is_local(conf.get("spark.master", master)):
        conf["spark.jars"] = ",".join(filter(None, (conf.get("spark.jars"), *map(str, appended))))
    _launch_jvm(conf, appended, scratch)
    builder = SparkSession.builder.appName(name)
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def build_session_settings(
    *,
    master: str,
    driver_memory: str,
    jars: Iterable[Path],
    java_options: str = "",
    log4j: Path | None = None,
    logs: Path | None = None,
    ui: bool = False,
    scratch: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build the settings of a Spark session.

    Args:
        master: URL of Spark's master.
        driver_memory: Heap of the driver in Spark's notation, such as `4g`.
        jars: Jars of the Kafka connector and of Delta.
        java_options: JVM options of the driver.
        log4j: A log4j2 configuration that writes into the folder `logs`.
        logs: Folder of the logs.
        ui: If true, start Spark's UI.
        scratch: Folder of the temporary files of Spark and its JVM.
        extra: Settings that override all others.
    """
    # the JVM unpacks 15 MB of native libraries into its temporary folder, and leaves them if it is killed
    options = [f'"-Djava.io.tmpdir={scratch}"'] if scratch is not None else []
    if java_options:
        options.append(java_options)
    if log4j is not None:
        options.append(f"-Dlog4j2.configurationFile={log4j.as_uri()}")
    if logs is not None:
        options.append(f'"-Dkiln.logs={logs}"')
    conf = {**_STATE, **_DELTA, **_STREAMING, "spark.master": master, "spark.driver.memory": driver_memory}
    conf["spark.ui.enabled"] = str(ui).lower()
    conf["spark.ui.showConsoleProgress"] = "false"
    if not ui:
        conf["spark.ui.liveUpdate.period"] = "-1"
    jar_paths = [str(jar) for jar in jars]
    if jar_paths:  # on the class path too: Spark opens local files before it loads `spark.jars`, and caches the class
        conf["spark.driver.extraClassPath"] = os.pathsep.join(jar_paths)
        if not is_local(master):
            conf["spark.jars"] = ",".join(jar_paths)
    if any(_LOCAL_FILES_JAR in jar for jar in jar_paths):
        conf |= LOCAL_FILES
    if options:
        conf["spark.driver.extraJavaOptions"] = " ".join(options)
    if scratch is not None:
        conf["spark.local.dir"] = str(scratch)
        conf["spark.sql.warehouse.dir"] = str(scratch / "warehouse")
    if is_local(master):
        conf["spark.executorEnv.PYTHONPATH"] = str(_WORKER_SITE)  # Spark appends the PYTHONPATH of this process
        conf["spark.driver.bindAddress"] = "127.0.0.1"
        conf["spark.driver.host"] = "127.0.0.1"
        # Spark's RPC then needs a secret, which Spark creates at each start and keeps in memory.
        conf["spark.authenticate"] = "true"
    return conf | dict(extra or {})


def _get_submitted_master() -> str | None:
    """Return the master that `spark-submit` was given, or None if `spark-submit` did not start this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    SparkContext._ensure_initialized()  # connects to the JVM, which has the options of spark-submit
    return SparkConf().get("spark.master")


def _launch_jvm(conf: Mapping[str, str], appended: Iterable[Path], scratch: Path | None) -> None:
    """Start the JVM with the settings `conf`, unless this process has a JVM already.

    The settings contain passwords. They are passed in a file in `scratch` that only this user can read, because every
    user of the machine can read the command line on which PySpark would put them.
    """
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    with tempfile.NamedTemporaryFile(  # 0600
        "w", prefix="kiln-", suffix=".properties", encoding="ascii", dir=scratch
    ) as file:
        file.write(format_properties(conf))
        file.flush()
        submit = os.environ.get("PYSPARK_SUBMIT_ARGS") or "pyspark-shell"
        class_path = filter(None, (os.environ.get(_APPENDED_CLASS_PATH), *map(str, appended)))
        variables = {
            "PYSPARK_SUBMIT_ARGS": f"--properties-file {shlex.quote(file.name)} --load-spark-defaults {submit}",
            _APPENDED_CLASS_PATH: os.pathsep.join(class_path),
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ |= variables
        try:
            SparkContext._ensure_initialized()  # returns when the JVM has read the file
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def format_properties(conf: Mapping[str, str]) -> str:
    """Format settings as a Java properties file in ASCII, with one line for each key."""
    return "".join(f"{_escape_property(key, ' =:#!')}={_escape_property(value, '')}\n" for key, value in conf.items())


def _escape_property(text: str, special: str) -> str:
    # UTF-16 code units, as in the escapes of a properties file
    units = text.encode("utf-16-be")
    characters = (chr(int.from_bytes(units[at : at + 2])) for at in range(0, len(units), 2))
    return "".join(
        f"\\{character}"
        if character == "\\" or character in special
        else character
        if "!" <= character <= "~" or (character == " " and at)  # a space before a value would be lost
        else f"\\u{ord(character):04x}"
        for at, character in enumerate(characters)
    )
