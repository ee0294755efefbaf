-- In 24 hours, fewer than 100 copies of a message arrive more than 5 minutes after its first copy.
-- grain: a message
-- level: warn
-- owner: archive
-- hint: A peer sends an old message again and again. The result names the peer with most copies. If the flood costs too much, block this peer.
-- history: 2d
-- show: SELECT remote_peer, count(*), min(observed_at), max(observed_at) FROM copies WHERE network = {network} AND message_id = {message_id} GROUP BY 1 ORDER BY 2 DESC
WITH of_new AS (
    SELECT network, message_id, remote_peer, observed_at,
        min(observed_at) OVER (PARTITION BY network, message_id) AS first_at
    FROM copies
    WHERE kafka_partition >= 0 AND hash(network, message_id) IN (SELECT hash(network, message_id) FROM new_copies)
        AND observed_at >= (SELECT max(observed_at) - INTERVAL 24 HOURS FROM copies WHERE kafka_partition >= 0)
), late AS (
    SELECT network, message_id, remote_peer, count(*) AS n, max(observed_at) AS seen_at
    FROM of_new WHERE observed_at > first_at + INTERVAL 5 MINUTES GROUP BY ALL
)
SELECT network, message_id, max(seen_at) AS seen_at,
    sum(n)::BIGINT || ' late copies, most of them from ' || arg_max(remote_peer, n) AS words
FROM late GROUP BY network, message_id HAVING sum(n) >= 100
