-- For each topic and peer: number of copies that the peer relayed, number of messages that it relayed first, and delay
-- of its copies after the first copy of a message. Only copies of messages in the table messages count.
-- Grain: a network, topic and peer that sent copies.
WITH firsts AS (
    SELECT f.network, f.message_id, m.topic, f.first_at
    FROM (SELECT network, message_id, min(observed_at) AS first_at FROM copies GROUP BY network, message_id) AS f
         JOIN messages AS m ON m.network = f.network AND m.message_id = f.message_id),
timed AS (
    SELECT c.network, f.topic, c.remote_peer, unix_micros(c.observed_at) - unix_micros(f.first_at) AS behind
    FROM copies AS c JOIN firsts AS f ON f.network = c.network AND f.message_id = c.message_id
    WHERE c.remote_peer <> '')
SELECT network, topic, remote_peer, count(*) AS copies, count(*) FILTER (WHERE behind = 0) AS first,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY behind) / 1e6 AS behind_p50_seconds,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY behind) / 1e6 AS behind_p99_seconds
FROM timed
GROUP BY network, topic, remote_peer
