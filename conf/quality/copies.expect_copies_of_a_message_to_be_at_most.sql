-- Over the last 24 hours of the table, a message has at most 20 copies on average.
-- grain: the table
-- level: warn
-- owner: archive
-- hint: Peers send many copies of each message. Look for a peer that repeats messages (view relays), or for a topic whose mesh has too many peers (view mesh_members).
-- history: 2d
WITH since AS (SELECT date_trunc('hour', max(observed_at)) - INTERVAL 24 HOURS AS begins FROM copies WHERE kafka_partition >= 0),
c AS (SELECT count(*) AS n, max(observed_at) AS newest FROM copies WHERE kafka_partition >= 0 AND observed_at >= (SELECT begins FROM since)),
m AS (SELECT count(*) AS n FROM messages
    WHERE kafka_partition >= 0 AND remote_peer <> '' AND observed_at >= (SELECT begins FROM since))
SELECT c.n AS copies, m.n AS messages, c.newest AS seen_at, round(c.n / m.n, 1) || ' copies of a message' AS words
FROM c, m WHERE m.n > 0 AND c.n > m.n * 20
