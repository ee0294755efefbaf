-- Streams for which RESPONSEs of the same minute name different tips.
-- Grain: a minute, network and stream.
SELECT date_trunc('minute', observed_at) AS minute, network, stream, count(DISTINCT tip) AS tips,
       count(DISTINCT from_peer) AS nodes, array_sort(array_agg(DISTINCT tip)) AS which
FROM responses
GROUP BY date_trunc('minute', observed_at), network, stream
HAVING count(DISTINCT tip) > 1
