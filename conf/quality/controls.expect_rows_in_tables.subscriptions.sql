-- Each GRAFT is for a topic to which its sender has subscribed on the same connection.
-- grain: a GRAFT without a subscription
-- level: warn
-- owner: archive
-- hint: A node sent a GRAFT for a topic to which it had not subscribed on that connection. Either the node violates the protocol, or the frame with its SUBSCRIBE was lost: see the view sequence_gaps.
-- expires: subscriptions
SELECT t.connection, t.direction, t.topic, t.kafka_partition, t.kafka_offset, t.entry_index, observed_at AS seen_at, 'there is no such row in subscriptions' AS words
FROM new_controls AS t
WHERE
    kind = 'GRAFT' AND topic IS NOT NULL AND kafka_partition >= 0
    AND NOT EXISTS (SELECT 1 FROM subscriptions AS o WHERE o.connection = t.connection AND o.direction = t.direction AND o.topic = t.topic)
