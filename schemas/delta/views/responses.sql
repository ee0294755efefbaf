-- Content of RESPONSE messages: the tip that a node names for a stream.
-- Grain: a RESPONSE message and a stream that it answers for.
SELECT network, origin, message_id, query_id, topic, from_peer, observed_at,
       unnest(map_keys(tips)) AS stream, unnest(map_values(tips)) AS tip
FROM messages
WHERE type = 'RESPONSE'
