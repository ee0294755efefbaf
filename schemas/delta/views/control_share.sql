-- Share of subscriptions and control entries in the bytes of gossipsub, by peer and direction.
-- Grain: a network, local peer, remote peer and direction.
WITH parts AS (
    SELECT connection, direction, CAST(sum(wire_bytes) AS BIGINT) AS bytes
    FROM (SELECT connection, direction, wire_bytes FROM controls
          UNION ALL SELECT connection, direction, wire_bytes FROM subscriptions) AS entries
    GROUP BY connection, direction),
whole AS (
    SELECT network, local_peer, remote_peer, connection, direction,
           CAST(sum(greatest(octet_length(payload), declared_length)) AS BIGINT) AS bytes
    FROM frames
    WHERE protocol <> 'bep50'
    GROUP BY network, local_peer, remote_peer, connection, direction)
SELECT w.network, w.local_peer, w.remote_peer, w.direction, CAST(sum(w.bytes) AS BIGINT) AS bytes,
       CAST(coalesce(sum(p.bytes), 0) AS BIGINT) AS control_bytes,
       coalesce(sum(p.bytes), 0) / CAST(nullif(sum(w.bytes), 0) AS DOUBLE) AS share
FROM whole AS w LEFT JOIN parts AS p ON p.connection = w.connection AND p.direction = w.direction
GROUP BY w.network, w.local_peer, w.remote_peer, w.direction
