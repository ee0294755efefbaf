"""Descriptions of Kafka connection errors that name the setting at fault.

kafka-python reports a refused password or a wrong certificate as a bootstrap timeout, and only logs the reason. So
`describe_kafka_error` connects once more and inspects how that connection fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

_PROBES: Final = 3  # a connection that both sides close at once does not always fail alike

# OpenSSL errors and their remedies; {…} are client options
_TLS: Final = (
    ("Hostname mismatch", "kafka.bootstrap: the broker's certificate is for another host ({problem})"),
    ("IP address mismatch", "kafka.bootstrap: the broker's certificate is for another host ({problem})"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "kafka.ssl_cafile ({ssl_cafile}): no authority there has signed the broker's certificate ({problem})",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "kafka.security_protocol ({security_protocol}): the broker does not speak TLS on this port",
    ),
    ("CERTIFICATE_REQUIRED", "kafka.ssl_certfile ({ssl_certfile}): the broker requires a client's certificate"),
    ("ALERT", "kafka.ssl_certfile ({ssl_certfile}): the broker rejects the client's certificate ({problem})"),
)


def describe_kafka_error(error: BaseException, client_options: Mapping[str, object], patience: float = 5.0) -> str:
    """Describe an error of kafka-python for a client with these options.

    Connects to a broker if the error itself is not specific, and waits at most `patience` seconds for its answer.
    """
    from kafka.errors import KafkaTimeoutError

    words = _describe_reason(error, client_options)
    if isinstance(error, KafkaTimeoutError):
        for _ in range(_PROBES):
            refused = None if words else _probe_connection(client_options, patience)
            if isinstance(refused, KafkaTimeoutError):  # a broker refuses a client at once
                break
            words = words if refused is None else _describe_reason(refused, client_options)
    return words or (str(error) if str(error).startswith(type(error).__name__) else f"{type(error).__name__}: {error}")


def _probe_connection(client_options: Mapping[str, object], patience: float) -> BaseException | None:
    """Connect to the first broker, and return the error, if any. `None` also if no connection can be tried."""
    # no public class of kafka-python reports how a connection failed
    from kafka.errors import KafkaError
    from kafka.net.selector import NetworkSelector

    from kiln.conf.process.kafka_clients import ConnectionManager

    try:
        net = NetworkSelector()
    except OSError:  # no descriptor is free, which is no fault of the brokers
        return None
    manager = ConnectionManager(net, **client_options)
    kafka_log = logging.getLogger("kafka")
    level = kafka_log.level
    kafka_log.setLevel(logging.CRITICAL)

    async def connect() -> None:
        broker = manager.cluster.bootstrap_brokers()[0]
        await manager.get_connection(broker.node_id, timeout_ms=int(patience * 1000), refresh_metadata_on_err=False)
        await manager.cluster.refresh_metadata(broker.node_id)

    try:
        net.run(connect)
    except (KafkaError, OSError, ValueError, AssertionError) as error:
        return error
    finally:
        manager.close()
        net.close()
        kafka_log.setLevel(level)
    return None


def _describe_reason(error: BaseException, client_options: Mapping[str, object]) -> str | None:
    from kafka import errors

    options = {"ssl_cafile": "empty", "ssl_certfile": "empty", "security_protocol": "PLAINTEXT", **client_options}
    text = str(error)
    user = options.get("sasl_plain_username", "")
    protocol = str(options["security_protocol"])
    match error:
        case errors.SaslAuthenticationFailedError():
            return (
                f"kafka.sasl_username ({user}), kafka.sasl_password, kafka.sasl_password_file: the broker rejects this "
                "user with this password"
            )
        case errors.UnsupportedSaslMechanismError():
            return f"kafka.sasl_mechanism ({options.get('sasl_mechanism')}): the broker does not support this mechanism"
        case errors.IllegalSaslStateError():
            return f"kafka.security_protocol ({protocol}): the broker requires no password on this port"
        case errors.TopicAuthorizationFailedError():
            return f"kafka.sasl_username ({user}) lacks a right on the topic {_list_names(error)}"
        case errors.GroupAuthorizationFailedError():
            return f"kafka.sasl_username ({user}) lacks the right READ on the consumer group {_list_names(error)}"
        case errors.AuthorizationError():
            return f"kafka.sasl_username ({user}) lacks a right: {type(error).__name__}: {text}"
    if protocol.endswith("SSL"):
        for sign, words in _TLS:
            if sign in text:
                return words.format(**options, problem=text.rpartition(": ")[2].partition(" (_ssl")[0])
        if isinstance(error, OSError):
            return f"kafka.ssl_cafile ({options['ssl_cafile']}), kafka.ssl_certfile ({options['ssl_certfile']}): {text}"
    if "Invalid frame length" in text and not protocol.endswith("SSL"):  # a TLS alert, read as Kafka's protocol
        return f"kafka.security_protocol is wrong ({protocol}): the port expects TLS"
    if "socket disconnected" in text:  # also after a refused login: kafka-python does not read the response
        if not protocol.startswith("SASL"):
            more = "a password" if protocol == "SSL" else "TLS or a password"
            return f"kafka.security_protocol ({protocol}): the broker closed the connection; it may expect {more}"
        tls = "" if protocol.endswith("SSL") else "; or kafka.security_protocol is wrong, and the port expects TLS"
        return (
            f"kafka.sasl_username ({user}), kafka.sasl_password or kafka.sasl_password_file: the broker rejects this "
            f"user with this password, or kafka.sasl_mechanism ({options.get('sasl_mechanism')}){tls}"
        )
    return None


def _list_names(error: BaseException) -> str:
    named = error.args[0] if error.args else ""
    return ", ".join(sorted(map(str, named))) if isinstance(named, set | list) else str(named)
