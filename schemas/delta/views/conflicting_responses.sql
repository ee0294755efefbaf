-- Streams for which RESPONSEs of the same minute name different tips.
-- Grain: a minute, network and stream.
-- DISTINCT is expensive, so only streams with more than one tip reach it.
WITH said AS (
    SELECT date_trunc('minute', observed_at) AS minute, network, stream, tip, from_peer
    FROM responses),
disputed AS (
    SELECT minute, network, stream
    FROM said
    GROUP BY minute, network, stream
    HAVING min(tip) <> max(tip))
SELECT s.minute, s.network, s.stream, count(DISTINCT s.tip) AS tips, count(DISTINCT s.from_peer) AS nodes,
       array_sort(array_agg(DISTINCT s.tip)) AS which
FROM said AS s
     JOIN disputed AS d ON d.minute = s.minute AND d.network = s.network AND d.stream = s.stream
GROUP BY s.minute, s.network, s.stream
