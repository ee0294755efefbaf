-- Every UPDATE message, new or repeated. New updates come from the table updates. Repeats of earlier updates (again is
-- true) come from the table messages, and have the separator of the update that they repeat.
-- Grain: an UPDATE message; two rows if it is new both in live traffic and in a replay.
-- If an update's message is not in messages yet, update_bytes is the length of an UPDATE of the newest form without a
-- model. Lengths are computed before the joins, so that the joins do not carry the bytes.
SELECT u.network, u.origin, u.message_id, u.separator_key, u.separator_value, u.stream, u.tip, false AS again,
       least(u.observed_at, u.log_time) AS heard_at,
       CAST(coalesce(m.bytes, 30 + length(u.stream) + length(u.tip)) AS BIGINT) AS update_bytes
FROM updates AS u
     LEFT JOIN (SELECT network, message_id, octet_length(data) AS bytes FROM messages WHERE type = 'UPDATE') AS m
       ON m.network = u.network AND m.message_id = u.message_id
UNION ALL
SELECT m.network, m.origin, m.message_id, u.separator_key, u.separator_value, m.stream, m.tip, true AS again,
       m.observed_at AS heard_at, CAST(m.bytes AS BIGINT) AS update_bytes
FROM (
    SELECT a.network, a.origin, a.message_id, a.stream, a.tip, a.observed_at, a.bytes
    FROM (
        SELECT network, origin, message_id, stream, tip, observed_at, octet_length(data) AS bytes
        FROM messages
        WHERE type = 'UPDATE') AS a
         ANTI JOIN updates AS n ON n.network = a.network AND n.origin = a.origin AND n.message_id = a.message_id) AS m
    LEFT JOIN updates AS u ON u.network = m.network AND u.stream = m.stream AND u.tip = m.tip
QUALIFY row_number() OVER (
    PARTITION BY m.network, m.message_id
    ORDER BY CASE WHEN u.message_id = m.message_id THEN 0 ELSE 1 END, CASE WHEN u.origin = m.origin THEN 0 ELSE 1 END,
             CASE WHEN u.separator_source = 'genesis' THEN 0 ELSE 1 END,
             CASE WHEN u.separator_key IS NULL THEN 1 ELSE 0 END, u.log_partition, u.log_offset) = 1
