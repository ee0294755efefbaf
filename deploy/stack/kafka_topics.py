"""Creation and checks of Kiln's topics on a broker (docs/design/contracts.md, Kafka topics)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.kafka_clients import describe_kafka_error
from kiln.schemas.kafka.topics import MAX_RECORD, TOPICS

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient


class TopicsError(PrerequisiteError):
    """Topics cannot be used or created; the message has a line per problem, with a remedy."""


class BrokerAwayError(TopicsError):
    """The broker does not answer a request about topics."""


def build_topic_settings(name: str, retention: timedelta | None, partition_bytes: int = 0) -> dict[str, str]:
    """Build Kafka's configuration of a topic.

    Args:
        name: Name in `TOPICS`.
        retention: Retention time; `None` keeps records forever.
        partition_bytes: Maximum size of a partition; 0 for no limit.
    """
    settings = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(MAX_RECORD)}
    if TOPICS[name].compacted:
        settings["cleanup.policy"] = "compact"
    else:
        settings["cleanup.policy"] = "delete"
        settings["retention.ms"] = "-1" if retention is None else str(retention // timedelta(milliseconds=1))
        settings["retention.bytes"] = str(partition_bytes or -1)
    return settings


def find_problems(
    topic: str, name: str, partitions: int, actual_partitions: int, config: Mapping[str, str], bootstrap: str
) -> Iterable[str]:
    """Find the problems of an existing topic, each with a remedy.

    Args:
        topic: Full name.
        name: Name in `TOPICS`.
        partitions: Number of partitions by the settings.
        actual_partitions: Number of partitions of the topic.
        config: Kafka's configuration of the topic, with defaults.
        bootstrap: Address for the commands in the remedies.
    """
    entity = f"--entity-type topics --entity-name {topic}"
    alter = f"kafka-configs.sh --bootstrap-server {bootstrap} --alter {entity} --add-config "
    if TOPICS[name].for_life and actual_partitions != partitions:
        yield (
            f"{topic} has {actual_partitions} partitions, but the settings have {partitions}. The number cannot "
            f"change, because windows are stored by partition. Set kafka.{name}_partitions = {actual_partitions}, or "
            "start over with another kafka.prefix"
        )
    if config.get("message.timestamp.type") != "LogAppendTime":
        yield (
            f"{topic}: message.timestamp.type is {config.get('message.timestamp.type')}, but windows need the broker's "
            f"timestamps. If the topic has no records yet, run:\n    {alter}message.timestamp.type=LogAppendTime\n"
            "If it has, their timestamps stay wrong: set another kafka.prefix"
        )
    if int(config.get("max.message.bytes", "0")) < MAX_RECORD:
        yield (
            f"{topic}: max.message.bytes is {config.get('max.message.bytes')}, but records can have {MAX_RECORD}. "
            f"Run:\n    {alter}max.message.bytes={MAX_RECORD}"
        )
    compacted = "compact" in config.get("cleanup.policy", "").split(",")
    if compacted != TOPICS[name].compacted:
        policy = "compact" if TOPICS[name].compacted else "delete"
        effect = "expires streams" if TOPICS[name].compacted else "loses all but the newest record of each key"
        yield (
            f"{topic}: cleanup.policy is {config.get('cleanup.policy')}, so the topic {effect}. "
            f"Run:\n    {alter}cleanup.policy={policy}"
        )


_NO_RIGHT = 29  # TOPIC_AUTHORIZATION_FAILED
RIGHTS = ("DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE")
"""Rights that Kiln's user needs on each of Kiln's topics."""


def find_missing_rights(topic: Mapping[str, object]) -> Iterable[str]:
    """Describe the missing rights on a topic in one line.

    A broker that reports no rights counts as one that grants all.

    Args:
        topic: Description by kafka-python.
    """
    allowed = topic["authorized_operations"]
    if topic["error_code"] != _NO_RIGHT and not allowed:
        return
    missing = [right for right in RIGHTS if not isinstance(allowed, list) or right not in allowed]
    if missing:
        yield f"{topic['name']}: {', '.join(missing)}"


def ensure_topics(
    bootstrap: str,
    prefix: str,
    partitions: Mapping[str, int],
    retention: Mapping[str, timedelta | None],
    *,
    replication: int = -1,
    retention_bytes: Mapping[str, int] | None = None,
    client_options: Mapping[str, object] | None = None,
) -> list[str]:
    """Create the missing topics, and check the existing ones.

    Args:
        bootstrap: Address of the broker; overrides `bootstrap_servers` in `client_options`.
        prefix: Prefix of the topic names.
        partitions: Number of partitions by name in `TOPICS`; the default is 1.
        retention: Retention time by name; the default is forever.
        replication: Replication factor; -1 for the broker's default.
        retention_bytes: Maximum size by name, shared equally by the partitions; 0 for no limit.
        client_options: kafka-python's options for TLS and SASL.

    Returns:
        The full names of the created topics.

    Raises:
        TopicsError: An existing topic has wrong settings, or the broker rejects a new one.
        BrokerAwayError: The broker does not answer.
    """
    from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    unknown = sorted({*partitions, *retention}.difference(TOPICS))
    if unknown:
        raise TopicsError(f"unknown topics: {', '.join(unknown)}. Known topics: {', '.join(TOPICS)}")
    names = {f"{prefix}{name}": name for name in TOPICS}
    options = {**(client_options or {}), "bootstrap_servers": [server.strip() for server in bootstrap.split(",")]}
    try:
        with open_client(KafkaAdminClient, **options) as admin:
            missing = sorted(names.keys() - set(admin.list_topics()))
            new_topics: dict[str, dict[str, object]] = {}
            for topic in missing:
                name = names[topic]
                count = partitions.get(name, 1)
                partition_bytes = (retention_bytes or {}).get(name, 0) // count
                configs = build_topic_settings(name, retention.get(name), partition_bytes)
                new_topics[topic] = {"num_partitions": count, "replication_factor": replication, "configs": configs}
            created = _create_topics(admin, new_topics, bootstrap) if missing else []
            descriptions = {topic["name"]: topic for topic in admin.describe_topics(list(names))}
            missing_rights = [line for topic in descriptions.values() for line in find_missing_rights(topic)]
            if missing_rights:
                user = options.get("sasl_plain_username", "")
                head = f"{bootstrap}: kafka.sasl_username ({user}) lacks rights:"
                raise TopicsError("\n".join([head, *missing_rights]))
            resources = admin.describe_configs(
                [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in names], config_filter="all"
            )["topic"]
    except (OSError, KafkaError) as error:
        raise BrokerAwayError(
            f"cannot read the topics of the broker at {bootstrap}: {describe_kafka_error(error, options)}"
        ) from error
    problems = [
        line
        for topic, name in names.items()
        for line in find_problems(
            topic,
            name,
            partitions.get(name, 1),
            len(descriptions[topic]["partitions"]),
            {key: str(entry["value"]) for key, entry in resources[topic].items()},
            bootstrap,
        )
    ]
    if problems:
        raise TopicsError("\n".join(problems))
    return sorted(created)


def read_compression(topics: Iterable[str], client_options: Mapping[str, object]) -> dict[str, str]:
    """Read `compression.type` of topics from the broker.

    Args:
        topics: Full names.
        client_options: kafka-python's options.

    Raises:
        BrokerAwayError: The broker does not answer.
    """
    from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
    try:
        with open_client(KafkaAdminClient, **client_options) as admin:
            configs = admin.describe_configs(resources, config_filter="all")["topic"] if resources else {}
    except (OSError, KafkaError) as error:
        raise BrokerAwayError(
            f"cannot read the settings of the broker's topics: {describe_kafka_error(error, client_options)}"
        ) from error
    return {topic: str(config["compression.type"]["value"]) for topic, config in configs.items()}


def _create_topics(admin: KafkaAdminClient, topics: Mapping[str, Mapping[str, object]], bootstrap: str) -> list[str]:
    """Create topics, and wait for them.

    Returns:
        The names of the created topics, without topics that another Kiln has just created.

    Raises:
        TopicsError: The broker rejects a topic.
    """
    from kafka.errors import AuthorizationError, TopicAlreadyExistsError, for_code

    created, failures = [], []
    for topic in admin.create_topics(topics, raise_errors=False)["topics"]:
        error = for_code(topic["error_code"])
        if not topic["error_code"]:
            created.append(topic["name"])
        elif error is not TopicAlreadyExistsError:
            right = "the right CREATE is missing, or DESCRIBE if the topic exists: "
            prefix = right if issubclass(error, AuthorizationError) else ""
            failures.append(f"{topic['name']}: {prefix}{topic['error_message'] or error.__name__}")
    if failures:
        raise TopicsError("\n".join([f"{bootstrap} cannot create topics:", *failures]))
    admin.wait_for_topics(list(topics))
    return created
