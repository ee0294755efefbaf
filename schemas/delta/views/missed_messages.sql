-- Messages that one vantage point received and another missed. A vantage point is a node of Kiln in a network,
-- identified by its peer id. A message counts as missed only if its first copy at any vantage point arrived between the
-- first and the last frame of the vantage point that missed it. Captures of other programs are compared only with each
-- other, because their message ids have another form.
-- Grain: a message and a vantage point that did not receive it.
-- The number `place` stands for a vantage point, so that the vantage points of a message are a short list.
WITH points AS (
    SELECT network, local_peer, kafka_partition < 0 AS of_file, min(observed_at) AS since, max(observed_at) AS until,
           row_number() OVER (ORDER BY network, local_peer, kafka_partition < 0) AS place
    FROM frames
    WHERE direction = 'IN' AND protocol <> 'bep50' AND local_peer <> ''
    GROUP BY network, local_peer, kafka_partition < 0),
heard AS (
    SELECT c.network, c.message_id, c.kafka_partition < 0 AS of_file, min(c.observed_at) AS heard_at,
           array_agg(p.place) AS places
    FROM copies AS c
         LEFT JOIN frames AS f ON f.kafka_partition = c.kafka_partition AND f.kafka_offset = c.kafka_offset
         LEFT JOIN points AS p ON p.network = c.network AND p.local_peer = f.local_peer
          AND p.of_file = (c.kafka_partition < 0)
    GROUP BY c.network, c.message_id, c.kafka_partition < 0)
SELECT m.network, m.message_id, p.local_peer AS missed_by, m.heard_at
FROM heard AS m
     JOIN points AS p ON p.network = m.network AND p.of_file = m.of_file AND m.heard_at BETWEEN p.since AND p.until
WHERE NOT array_contains(m.places, p.place)
