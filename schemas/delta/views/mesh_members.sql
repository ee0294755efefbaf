-- Stays of peers in the gossipsub mesh of a topic at Kiln's node. A stay begins with a GRAFT from either side, and ends
-- with the next PRUNE or with the connection. A refused GRAFT counts as a short stay, because the other side answers it
-- with a PRUNE. If until is null, the peer is still in the mesh.
-- Grain: a stay of a peer in the mesh of a topic.
WITH events AS (
    SELECT network, connection, local_peer, remote_peer, topic, kind, direction, observed_at, kafka_offset, entry_index,
           lag(kind) OVER (PARTITION BY connection, topic ORDER BY observed_at, kafka_offset, entry_index) AS earlier
    FROM controls
    WHERE kind IN ('GRAFT', 'PRUNE') AND topic IS NOT NULL),
changes AS (
    SELECT network, connection, local_peer, remote_peer, topic, kind, direction, observed_at AS since,
           lead(observed_at) OVER one AS pruned_at, lead(direction) OVER one AS pruned_by
    FROM events
    WHERE earlier IS NULL OR earlier <> kind
    WINDOW one AS (PARTITION BY connection, topic ORDER BY observed_at, kafka_offset, entry_index)),
ends AS (
    SELECT connection, min(observed_at) AS closed_at FROM frames WHERE octet_length(payload) = 0 GROUP BY connection)
SELECT c.network, c.local_peer, c.remote_peer, c.topic, lower(hex(c.connection)) AS connection, c.since,
       coalesce(c.pruned_at, e.closed_at) AS until, c.direction AS grafted_by,
       CASE WHEN c.pruned_at IS NOT NULL THEN c.pruned_by WHEN e.closed_at IS NOT NULL THEN 'CLOSED' END AS ended_by
FROM changes AS c LEFT JOIN ends AS e ON e.connection = c.connection
WHERE c.kind = 'GRAFT'
