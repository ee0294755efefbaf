-- Connections of gossipsub and of the BEP 50 overlay, with frames, bytes and control bytes in each direction. Control
-- bytes are those of subscriptions and control entries. If closed_at is null, the connection is open, or its last
-- frames were lost. agent, end_reason and dialled are null until the connection has ended.
-- Grain: a connection.
WITH sides AS (
    SELECT network, origin, connection, local_peer, remote_peer, protocol, direction, min(observed_at) AS opened_at,
           max(CASE WHEN octet_length(payload) = 0 THEN observed_at END) AS closed_at, max(observed_at) AS last_at,
           max(hello_in) AS hello_in, max(hello_out) AS hello_out, max(remote_address) AS remote_address,
           max(agent) AS agent, max(end_reason) AS end_reason,
           max(CASE WHEN dialled THEN 1 WHEN NOT dialled THEN 0 END) AS dialled,
           count(*) FILTER (WHERE octet_length(payload) > 0) AS frames,
           CAST(sum(greatest(octet_length(payload), declared_length)) AS BIGINT) AS bytes
    FROM frames
    GROUP BY network, origin, connection, local_peer, remote_peer, protocol, direction),
parts AS (
    SELECT connection, CAST(sum(CASE WHEN direction = 'IN' THEN wire_bytes ELSE 0 END) AS BIGINT) AS control_bytes_in,
           CAST(sum(CASE WHEN direction = 'OUT' THEN wire_bytes ELSE 0 END) AS BIGINT) AS control_bytes_out
    FROM (SELECT connection, direction, wire_bytes FROM controls
          UNION ALL SELECT connection, direction, wire_bytes FROM subscriptions) AS entries
    GROUP BY connection),
joined AS (
    SELECT network, origin, connection, local_peer, remote_peer, protocol, min(opened_at) AS opened_at,
           CASE WHEN count(*) = count(closed_at) THEN max(closed_at) END AS closed_at, max(last_at) AS last_at,
           max(hello_in) AS hello_in, max(hello_out) AS hello_out, max(remote_address) AS remote_address,
           max(agent) AS agent, max(end_reason) AS end_reason, max(dialled) = 1 AS dialled,
           CAST(sum(CASE WHEN direction = 'IN' THEN frames ELSE 0 END) AS BIGINT) AS frames_in,
           CAST(sum(CASE WHEN direction = 'OUT' THEN frames ELSE 0 END) AS BIGINT) AS frames_out,
           CAST(sum(CASE WHEN direction = 'IN' THEN bytes ELSE 0 END) AS BIGINT) AS bytes_in,
           CAST(sum(CASE WHEN direction = 'OUT' THEN bytes ELSE 0 END) AS BIGINT) AS bytes_out
    FROM sides
    GROUP BY network, origin, connection, local_peer, remote_peer, protocol)
SELECT j.network, j.origin, lower(hex(j.connection)) AS connection, j.local_peer, j.remote_peer, j.protocol,
       j.remote_address, j.agent, j.dialled, j.end_reason, j.hello_in, j.hello_out, j.opened_at, j.closed_at, j.last_at, j.frames_in, j.frames_out,
       j.bytes_in, j.bytes_out, coalesce(p.control_bytes_in, 0) AS control_bytes_in,
       coalesce(p.control_bytes_out, 0) AS control_bytes_out,
       (coalesce(p.control_bytes_in, 0) + coalesce(p.control_bytes_out, 0))
       / CAST(nullif(j.bytes_in + j.bytes_out, 0) AS DOUBLE) AS control_share
FROM joined AS j LEFT JOIN parts AS p ON p.connection = j.connection
