-- Of the message ids that peers announced with IHAVE in the last 24 hours of the table, at most 5% are missing in
-- copies. Fewer than 20 missing ids are ignored.
-- grain: the table
-- level: warn
-- owner: archive
-- hint: Peers announced messages with IHAVE, but did not deliver them. The view gossip_efficiency shows which peers: they ignore IWANT, or IWANTs do not reach them.
-- history: 2d
-- expires: copies
WITH announced AS (
    SELECT hash(id) AS h, min(observed_at) AS seen_at
    FROM (SELECT unnest(message_ids) AS id, observed_at FROM controls
        WHERE kind = 'IHAVE' AND direction = 'IN' AND kafka_partition >= 0
            AND observed_at >= (SELECT max(observed_at) - INTERVAL 24 HOURS FROM controls WHERE kafka_partition >= 0))
    GROUP BY h
), counted AS (
    SELECT count(*) AS n, max(seen_at) AS seen_at,
        count(*) FILTER (h NOT IN (SELECT hash(message_id) FROM copies)) AS missing
    FROM announced
)
SELECT 'IHAVE' AS kind, seen_at, missing || ' of ' || n || ' announced messages never came' AS words
FROM counted WHERE missing >= 20 AND missing > 0.05 * n
