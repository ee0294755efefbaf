-- QUERY messages without a RESPONSE within a minute. QUERYs in the form of 2020 are left out, because they have no id.
-- Grain: a QUERY message.
-- Clients derive the id of a QUERY from the stream alone, so a RESPONSE answers all earlier QUERYs for the stream.
SELECT network, origin, message_id, query_id, stream, topic, from_peer, observed_at, answered_at
FROM (
    SELECT network, origin, message_id, query_id, stream, topic, from_peer, observed_at, type,
           min(CASE WHEN type = 'RESPONSE' THEN observed_at END) OVER (
               PARTITION BY network, query_id ORDER BY observed_at
               RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS answered_at
    FROM messages
    WHERE type IN ('QUERY', 'RESPONSE') AND query_id IS NOT NULL) AS asked
WHERE type = 'QUERY' AND (answered_at IS NULL OR answered_at > observed_at + INTERVAL '1' MINUTE)
