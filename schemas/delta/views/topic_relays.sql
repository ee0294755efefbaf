-- For each topic and peer: number of copies that the peer relayed, number of messages that it relayed first, and delay
-- of its copies after the first copy of a message. Only copies of messages in the table messages count.
-- Grain: a network, topic and peer that sent copies.
-- Numbers stand for topics and messages, because joins on their texts take twice the time.
WITH topics AS MATERIALIZED (
    SELECT network, topic, row_number() OVER () AS topic_number FROM (SELECT DISTINCT network, topic FROM messages)),
numbered AS (
    SELECT m.network, m.message_id, t.topic_number, row_number() OVER () AS number
    FROM messages AS m JOIN topics AS t ON t.network = m.network AND t.topic IS NOT DISTINCT FROM m.topic),
keyed AS MATERIALIZED (
    SELECT m.number, m.topic_number, c.remote_peer, epoch_us(c.observed_at) AS received_at
    FROM copies AS c JOIN numbered AS m ON m.network = c.network AND m.message_id = c.message_id),
relayed AS (
    SELECT k.topic_number, k.remote_peer, k.received_at - f.first_at AS behind
    FROM keyed AS k
         JOIN (SELECT number, min(received_at) AS first_at FROM keyed GROUP BY number) AS f ON f.number = k.number
    WHERE k.remote_peer <> ''),
timed AS (
    SELECT topic_number, remote_peer, count(*) AS copies, count(*) FILTER (WHERE behind = 0) AS first,
           quantile_disc(behind, [0.5, 0.99]) AS behind
    FROM relayed
    GROUP BY topic_number, remote_peer)
SELECT network, topic, remote_peer, copies, first,
       behind[1] / 1e6 AS behind_p50_seconds, behind[2] / 1e6 AS behind_p99_seconds
FROM timed JOIN topics USING (topic_number)
