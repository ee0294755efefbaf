-- Number of messages, and their bytes, by hour, type, topic and author. Copies do not count.
-- Grain: an hour, network, origin, type, topic and author.
-- An hour of UTC in any time zone of the session: zones may differ from UTC by half an hour.
SELECT to_timestamp(epoch_us(observed_at) // 3600000000 * 3600) AS hour, network, origin, type, topic, from_peer,
       count(*) AS messages, CAST(sum(octet_length(data)) AS BIGINT) AS bytes
FROM messages
GROUP BY hour, network, origin, type, topic, from_peer
