-- Peers that are subscribed to a topic: on a connection that has not ended, their newest SUBSCRIBE or UNSUBSCRIBE for
-- the topic is a SUBSCRIBE.
-- Grain: a network, topic, local and remote peer.
WITH newest AS (
    SELECT network, topic, local_peer, remote_peer, connection, subscribe, observed_at,
           row_number() OVER (PARTITION BY connection, topic
                              ORDER BY observed_at DESC, kafka_offset DESC, entry_index DESC) AS place
    FROM subscriptions
    WHERE direction = 'IN' AND topic IS NOT NULL),
ends AS (
    SELECT connection, min(observed_at) AS closed_at FROM frames WHERE octet_length(payload) = 0 GROUP BY connection)
SELECT n.network, n.topic, n.local_peer, n.remote_peer, min(n.observed_at) AS since
FROM newest AS n LEFT JOIN ends AS e ON e.connection = n.connection
WHERE n.place = 1 AND n.subscribe AND e.closed_at IS NULL
GROUP BY n.network, n.topic, n.local_peer, n.remote_peer
