-- Number of messages, and bytes of their data, by hour, type, topic and author. A message counts once, however many
-- copies arrived.
-- Grain: an hour, network, origin, type, topic and author.
-- to_timestamp gives hours of UTC even if the time zone of the session differs from UTC by half an hour.
SELECT to_timestamp(epoch_us(observed_at) // 3600000000 * 3600) AS hour, network, origin, type, topic, from_peer,
       count(*) AS messages, CAST(sum(octet_length(data)) AS BIGINT) AS bytes
FROM messages
GROUP BY hour, network, origin, type, topic, from_peer
