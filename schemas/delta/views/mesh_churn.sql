-- Number of GRAFTs and PRUNEs of each topic by minute, and number of peers that exchanged them with Kiln's nodes.
-- Grain: a minute, network and topic.
SELECT date_trunc('minute', observed_at) AS minute, network, topic,
       count(*) FILTER (WHERE kind = 'GRAFT' AND direction = 'IN') AS grafts_in,
       count(*) FILTER (WHERE kind = 'GRAFT' AND direction = 'OUT') AS grafts_out,
       count(*) FILTER (WHERE kind = 'PRUNE' AND direction = 'IN') AS prunes_in,
       count(*) FILTER (WHERE kind = 'PRUNE' AND direction = 'OUT') AS prunes_out,
       count(DISTINCT remote_peer) AS peers
FROM controls
WHERE kind IN ('GRAFT', 'PRUNE')
GROUP BY date_trunc('minute', observed_at), network, topic
