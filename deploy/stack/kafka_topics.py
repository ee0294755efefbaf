"""Kiln's topics, made on any broker, and checked where they exist (docs/design/contracts.md, Kafka topics)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.kafka_errors import describe_kafka_error
from kiln.schemas.kafka.topics import MAX_RECORD, TOPICS


class TopicsError(PrerequisiteError):
    """Topics cannot be used or made as they must be; a line for each thing that is wrong, and what to do."""


class BrokerAwayError(TopicsError):
    """The broker could not be asked about topics."""


def build_topic_settings(name: str, retention: timedelta | None, partition_bytes: int = 0) -> dict[str, str]:
    """Kafka's settings of one of `TOPICS`; `retention` None keeps records for ever, `partition_bytes` 0 any number of
    them."""
    settings = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(MAX_RECORD)}
    if TOPICS[name].compacted:
        settings["cleanup.policy"] = "compact"
    else:
        settings["cleanup.policy"] = "delete"
        settings["retention.ms"] = "-1" if retention is None else str(retention // timedelta(milliseconds=1))
        settings["retention.bytes"] = str(partition_bytes or -1)
    return settings


def find_problems(
    topic: str, name: str, partitions: int, has_partitions: int, has: Mapping[str, str], bootstrap: str
) -> Iterable[str]:
    """What is wrong with an existing topic: lines that say what to type. `has`: its settings, defaults included."""
    entity = f"--entity-type topics --entity-name {topic}"
    alter = f"kafka-configs.sh --bootstrap-server {bootstrap} --alter {entity} --add-config "
    if TOPICS[name].for_life and has_partitions != partitions:
        yield (
            f"{topic} has {has_partitions} partitions and the settings say {partitions}, but its count is for life "
            f"(windows are kept by partition): set kafka.{name}_partitions = {has_partitions}, or another kafka.prefix "
            "to start anew"
        )
    if has.get("message.timestamp.type") != "LogAppendTime":
        yield (
            f"{topic}: message.timestamp.type is {has.get('message.timestamp.type')}, and windows need the broker's "
            f"own stamps. If it holds no records yet, type:\n    {alter}message.timestamp.type=LogAppendTime\n"
            "If it does, their stamps stay wrong: set another kafka.prefix"
        )
    if int(has.get("max.message.bytes", "0")) < MAX_RECORD:
        yield (
            f"{topic}: max.message.bytes is {has.get('max.message.bytes')}, and records can have {MAX_RECORD}. "
            f"Type:\n    {alter}max.message.bytes={MAX_RECORD}"
        )
    compacted = "compact" in has.get("cleanup.policy", "").split(",")
    if compacted != (TOPICS[name].compacted):
        policy = "compact" if TOPICS[name].compacted else "delete"
        what = (
            "forgets streams as time passes"
            if TOPICS[name].compacted
            else "loses all but the newest record of each key"
        )
        yield (
            f"{topic}: cleanup.policy is {has.get('cleanup.policy')}, so it {what}. "
            f"Type:\n    {alter}cleanup.policy={policy}"
        )


_NO_RIGHT = 29  # TOPIC_AUTHORIZATION_FAILED
RIGHTS = ("DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE")
"""What Kiln's user must be allowed on each of Kiln's topics."""


def find_missing_rights(topic: Mapping[str, object]) -> Iterable[str]:
    """The rights on a topic that are missing, as a line. `topic`: as kafka-python describes the topic. A broker that
    tells no rights is taken at its silence."""
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
    """Make the topics that are missing, check the others, and return the full names of those made.

    `partitions` (1 where not given) and `retention` (none: for ever) by name, as in `TOPICS`. `replication` -1: the
    broker's default. `retention_bytes` (0: all) by name: of a topic, shared equally by its partitions.
    `client_options`: kafka-python's, for TLS and SASL; `bootstrap` weighs more than a `bootstrap_servers` in there.
    TopicsError: an existing topic is not as it must be, or the broker refuses to make one. BrokerAwayError: the broker
    does not answer.
    """
    from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
    from kafka.errors import AuthorizationError, KafkaError, TopicAlreadyExistsError, for_code

    from kiln.conf.process.kafka_clients import open_client

    unknown = sorted({*partitions, *retention}.difference(TOPICS))
    if unknown:
        raise TopicsError(f"no such topics: {', '.join(unknown)} (there are {', '.join(TOPICS)})")
    names = {f"{prefix}{name}": name for name in TOPICS}
    options = {**(client_options or {}), "bootstrap_servers": [server.strip() for server in bootstrap.split(",")]}
    try:
        with open_client(KafkaAdminClient, **options) as admin:
            missing = sorted(names.keys() - set(admin.list_topics()))
            made: list[str] = []
            if missing:
                told = admin.create_topics(
                    {
                        topic: {
                            "num_partitions": partitions.get(names[topic], 1),
                            "replication_factor": replication,
                            "configs": build_topic_settings(
                                names[topic],
                                retention.get(names[topic]),
                                (retention_bytes or {}).get(names[topic], 0) // partitions.get(names[topic], 1),
                            ),
                        }
                        for topic in missing
                    },
                    raise_errors=False,
                )
                refused = []
                for answer in told["topics"]:
                    error = for_code(answer["error_code"])
                    if not answer["error_code"]:
                        made.append(answer["name"])
                    elif error is not TopicAlreadyExistsError:  # another Kiln made it just now: checked below
                        right = "the right CREATE, or DESCRIBE where the topic is there, is missing: "
                        lack = right if issubclass(error, AuthorizationError) else ""
                        refused.append(f"{answer['name']}: {lack}{answer['error_message'] or error.__name__}")
                if refused:
                    raise TopicsError("\n".join([f"{bootstrap} refused to make topics:", *refused]))
                admin.wait_for_topics(missing)
            told_of = {topic["name"]: topic for topic in admin.describe_topics(list(names))}
            lacking = [line for topic in told_of.values() for line in find_missing_rights(topic)]
            if lacking:
                user = options.get("sasl_plain_username", "")
                raise TopicsError("\n".join([f"{bootstrap}: kafka.sasl_username ({user}) lacks rights:", *lacking]))
            found = {name: len(topic["partitions"]) for name, topic in told_of.items()}
            told = admin.describe_configs(
                [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in names], config_filter="all"
            )["topic"]
    except (OSError, KafkaError) as error:
        raise BrokerAwayError(
            f"the broker at {bootstrap} could not be asked about topics: {describe_kafka_error(error, options)}"
        ) from error
    problems = [
        line
        for topic, name in names.items()
        for line in find_problems(
            topic,
            name,
            partitions.get(name, 1),
            found[topic],
            {key: str(entry["value"]) for key, entry in told[topic].items()},
            bootstrap,
        )
    ]
    if problems:
        raise TopicsError("\n".join(problems))
    return sorted(made)
