-- Streams for which RESPONSEs of the same minute disagree on the tip. There is no conflict if an UPDATE between the
-- RESPONSEs announces the later tip.
-- Grain: a minute, network and stream.
-- When a stream advances, its UPDATE lies between the last RESPONSE with the earlier tip and the first RESPONSE with
-- the later tip. If a single node names several tips, the stream has advanced at that node. DISTINCT is expensive, so
-- it runs only on streams with more than one tip.
WITH said AS (
    SELECT date_trunc('minute', observed_at) AS minute, network, stream, tip, from_peer, observed_at
    FROM responses),
disputed AS (
    SELECT minute, network, stream
    FROM said
    GROUP BY minute, network, stream
    HAVING min(tip) <> max(tip)),
named AS (
    SELECT s.minute, s.network, s.stream, s.tip, min(s.observed_at) AS first_at, max(s.observed_at) AS last_at
    FROM said AS s
         JOIN disputed AS d ON d.minute = s.minute AND d.network = s.network AND d.stream = s.stream
    WHERE s.tip IS NOT NULL
    GROUP BY s.minute, s.network, s.stream, s.tip),
steps AS (
    SELECT minute, network, stream, tip, first_at,
           max(last_at) OVER (
               PARTITION BY minute, network, stream ORDER BY first_at, tip
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earlier_at
    FROM named),
conflicting AS (
    SELECT DISTINCT s.minute, s.network, s.stream
    FROM steps AS s
         LEFT JOIN messages AS m
             ON m.type = 'UPDATE' AND m.network = s.network AND m.stream = s.stream AND m.tip = s.tip
                AND m.observed_at >= s.earlier_at AND m.observed_at <= s.first_at
    WHERE s.earlier_at IS NOT NULL AND m.message_id IS NULL)
SELECT s.minute, s.network, s.stream, count(DISTINCT s.tip) AS tips, count(DISTINCT s.from_peer) AS nodes,
       array_sort(array_agg(DISTINCT s.tip)) AS which
FROM said AS s
     JOIN conflicting AS c ON c.minute = s.minute AND c.network = s.network AND c.stream = s.stream
GROUP BY s.minute, s.network, s.stream
HAVING count(DISTINCT s.from_peer) <> 1
