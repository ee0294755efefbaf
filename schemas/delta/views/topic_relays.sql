-- Number of copies that each peer relayed on a topic, number of messages that no peer relayed earlier, and the delay of
-- its copies after the first copy of a message. Copies of messages that are not in the table messages do not count.
-- Grain: a network, topic and peer that sent copies.
-- A number stands for a message, because the ids take twice the time.
WITH numbered AS (SELECT network, message_id, topic, row_number() OVER () AS number FROM messages),
keyed AS MATERIALIZED (
    SELECT m.number, m.network, m.topic, c.remote_peer, epoch_us(c.observed_at) AS received_at
    FROM copies AS c JOIN numbered AS m ON m.network = c.network AND m.message_id = c.message_id),
timed AS (
    SELECT k.network, k.topic, k.remote_peer, k.received_at - f.first_at AS behind
    FROM keyed AS k
         JOIN (SELECT number, min(received_at) AS first_at FROM keyed GROUP BY number) AS f ON f.number = k.number
    WHERE k.remote_peer <> '')
SELECT network, topic, remote_peer, count(*) AS copies, count(*) FILTER (WHERE behind = 0) AS first,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY behind) / 1e6 AS behind_p50_seconds,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY behind) / 1e6 AS behind_p99_seconds
FROM timed
GROUP BY network, topic, remote_peer
