-- Number of messages, and bytes of their data, by hour, type, topic and author. A message counts once, however many
-- copies arrived.
-- Grain: an hour, network, origin, type, topic and author.
SELECT date_trunc('hour', observed_at) AS hour, network, origin, type, topic, from_peer,
       count(*) AS messages, CAST(sum(octet_length(data)) AS BIGINT) AS bytes
FROM messages
GROUP BY date_trunc('hour', observed_at), network, origin, type, topic, from_peer
