-- Messages that one vantage point heard and another did not. A vantage point is a node of ours on the gossip of a
-- network, told by its peer id; a message can be missed between the first and the last frame that the node received.
-- Grain: a message and a vantage point that did not hear the message.
WITH points AS (
    SELECT network, local_peer, min(observed_at) AS since, max(observed_at) AS until
    FROM frames
    WHERE direction = 'IN' AND protocol <> 'bep50'
    GROUP BY network, local_peer),
heard AS (
    SELECT c.network, c.message, f.local_peer, min(c.observed_at) AS heard_at
    FROM copies AS c
         JOIN frames AS f ON f.kafka_partition = c.kafka_partition AND f.kafka_offset = c.kafka_offset
    GROUP BY c.network, c.message, f.local_peer),
first_heard AS (
    SELECT network, message, min(heard_at) AS heard_at, count(*) AS heard_by
    FROM heard
    GROUP BY network, message)
SELECT m.network, m.message, p.local_peer AS missed_by, m.heard_by, m.heard_at
FROM first_heard AS m
     JOIN points AS p ON p.network = m.network AND m.heard_at BETWEEN p.since AND p.until
     ANTI JOIN heard AS h ON h.network = m.network AND h.message = m.message AND h.local_peer = p.local_peer
