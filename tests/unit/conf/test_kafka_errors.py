"""What kafka-python's errors are in words; tests/kafka/test_secured_broker.py has them from a broker."""

from __future__ import annotations

import pytest

from kafka import errors
from kiln.conf.process.kafka_clients import describe_kafka_error

OPTIONS = {
    "bootstrap_servers": ["127.0.0.1:1"],
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_plain_username": "kiln",
    "sasl_plain_password": "hunter2",
    "ssl_cafile": "/etc/ca.pem",
}
HANDSHAKE = "Handshake failed: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.SaslAuthenticationFailedError("no"), "kafka.sasl_username (kiln), kafka.sasl_password"),
        (errors.UnsupportedSaslMechanismError("no"), "kafka.sasl_mechanism (SCRAM-SHA-512)"),
        (errors.IllegalSaslStateError("no"), "kafka.security_protocol (SASL_SSL)"),
        (errors.TopicAuthorizationFailedError({"b", "a"}), "lacks a right on the topic a, b"),
        (errors.GroupAuthorizationFailedError("kiln.x"), "lacks the right READ on the consumer group kiln.x"),
        (errors.KafkaConnectionError("socket disconnected"), "rejects this user with this password"),
        (errors.KafkaConnectionError(f"{HANDSHAKE}: self-signed (_ssl.c:1)"), "kafka.ssl_cafile (/etc/ca.pem): no"),
        (errors.KafkaConnectionError(f"{HANDSHAKE}: IP address mismatch (_ssl.c:1)"), "kafka.bootstrap: the broker's"),
        (errors.KafkaConnectionError("[SSL: WRONG_VERSION_NUMBER]"), "does not speak TLS"),
        (FileNotFoundError(2, "No such file"), "kafka.ssl_cafile (/etc/ca.pem), kafka.ssl_certfile (empty)"),
        (errors.NodeNotReadyError("later"), "NodeNotReadyError"),
        (errors.KafkaTimeoutError("slow"), "KafkaTimeoutError"),  # nothing listens there: no more is known
    ],
)
def test_the_setting_is_named(error: Exception, expected: str) -> None:
    words = describe_kafka_error(error, OPTIONS)
    assert expected in words
    assert "hunter2" not in words
