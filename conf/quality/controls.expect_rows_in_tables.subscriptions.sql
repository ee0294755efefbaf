-- Each GRAFT is for a topic to which the node has subscribed on this connection.
-- grain: a row of controls without its counterpart
-- level: warn
-- owner: archive
-- hint: A node sent GRAFT for a topic to which it never subscribed on that connection: it violates the protocol, or the frame with its SUBSCRIBE is lost (view sequence_gaps).
-- expires: subscriptions
SELECT t.connection, t.direction, t.topic, t.kafka_partition, t.kafka_offset, t.entry_index, observed_at AS seen_at, 'there is no such row in subscriptions' AS words
FROM new_controls AS t
WHERE
    kind = 'GRAFT' AND topic IS NOT NULL AND kafka_partition >= 0
    AND NOT EXISTS (SELECT 1 FROM subscriptions AS o WHERE o.connection = t.connection AND o.direction = t.direction AND o.topic = t.topic)
