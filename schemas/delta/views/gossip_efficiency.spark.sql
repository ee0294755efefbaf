-- Number of message ids in IHAVE and IWANT, for each peer. announced: the peer sent the id in an IHAVE. requested:
-- Kiln's node sent the peer an IWANT for the id. delivered: it was requested, and the peer sent the message.
-- announced_to_peer and requested_by_peer count the other direction. Only ids stored in the table controls count: the
-- first 5,000 of each RPC.
-- Grain: a local and a remote peer.
WITH listed AS (
    SELECT DISTINCT local_peer, remote_peer, kind, direction, explode(message_ids) AS message_id
    FROM controls
    WHERE kind IN ('IHAVE', 'IWANT')),
received AS (
    SELECT DISTINCT l.local_peer, l.remote_peer, l.message_id
    FROM listed AS l JOIN copies AS c ON c.remote_peer = l.remote_peer AND c.message_id = l.message_id
    WHERE l.kind = 'IWANT' AND l.direction = 'OUT')
SELECT l.local_peer, l.remote_peer, count(*) FILTER (WHERE l.kind = 'IHAVE' AND l.direction = 'IN') AS announced,
       count(*) FILTER (WHERE l.kind = 'IWANT' AND l.direction = 'OUT') AS requested,
       count(*) FILTER (WHERE l.kind = 'IWANT' AND l.direction = 'OUT' AND r.message_id IS NOT NULL) AS delivered,
       count(*) FILTER (WHERE l.kind = 'IHAVE' AND l.direction = 'OUT') AS announced_to_peer,
       count(*) FILTER (WHERE l.kind = 'IWANT' AND l.direction = 'IN') AS requested_by_peer
FROM listed AS l
     LEFT JOIN received AS r
       ON r.local_peer = l.local_peer AND r.remote_peer = l.remote_peer AND r.message_id = l.message_id
GROUP BY l.local_peer, l.remote_peer
