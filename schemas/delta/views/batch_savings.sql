-- Savings by batching: number and bytes of the messages if only UPDATEs are sent (unbatched), if batches replace them
-- (batched), or if both are sent (both). Rows without window_seconds count UPDATEs in no window, which are sent in any
-- case.
-- Grain: a network, origin, separator and window length.
-- A new update counts for the batch that contains its tip. Event time alone does not determine the batch, because
-- windows may overlap in event time. A repeated UPDATE counts for the window that was open when it arrived. The number
-- `place` stands for a network, origin and separator. Each large table is joined once: updates with messages for the
-- lengths, and with batches for the few updates without a batch. If all windows of a separator have the same length,
-- the batch of an update does not matter. The list in `separators` shows DuckDB that there are few separators.
WITH separators AS MATERIALIZED (
    SELECT unnest(list(each), recursive := true), generate_subscripts(list(each), 1) AS place
    FROM (
        SELECT network, origin, separator_key, separator_value FROM updates
        UNION
        SELECT network, origin, separator_key, separator_value FROM batches) AS each),
windows AS MATERIALIZED (
    SELECT s.place, b.batch_cid, b.opened_at, b.closed_at, b.window_seconds, b.message_bytes, b.block_bytes
    FROM batch_times AS b
         JOIN separators AS s
           ON s.network = b.network AND s.origin = b.origin AND s.separator_key = b.separator_key
          AND s.separator_value = b.separator_value),
made AS MATERIALIZED (
    SELECT place, window_seconds, count(*) AS batches, CAST(sum(message_bytes) AS BIGINT) AS batch_bytes,
           CAST(sum(block_bytes) AS BIGINT) AS block_bytes
    FROM windows
    GROUP BY place, window_seconds),
lengths AS MATERIALIZED (
    SELECT place, min(window_seconds) AS window_seconds, count(*) > 1 AS several
    FROM made
    GROUP BY place),
several AS MATERIALIZED (
    SELECT place
    FROM lengths
    WHERE several),
opened AS (
    SELECT place, opened_at, closed_at, window_seconds
    FROM windows AS w ANTI JOIN several AS l ON l.place = w.place
    UNION ALL
    SELECT place, opened_at, max(closed_at) AS closed_at, max(window_seconds) AS window_seconds
    FROM windows AS w SEMI JOIN several AS l ON l.place = w.place
    GROUP BY place, opened_at),
news AS NOT MATERIALIZED (
    SELECT u.network, u.origin, u.message_id, s.place, u.stream, u.tip, least(u.observed_at, u.log_time) AS heard_at
    FROM updates AS u
         JOIN separators AS s
           ON s.network = u.network AND s.origin = u.origin
          AND s.separator_key IS NOT DISTINCT FROM u.separator_key
          AND s.separator_value IS NOT DISTINCT FROM u.separator_value),
sent AS NOT MATERIALIZED (
    SELECT network, origin, message_id, stream, tip, observed_at, CAST(octet_length(data) AS BIGINT) AS bytes
    FROM messages
    WHERE type = 'UPDATE'),
-- by separator: sums over its new updates, and lists of messages that are repeats or have another origin
heard AS MATERIALIZED (
    SELECT u.place, m.network, count(*) AS updates, CAST(coalesce(sum(m.bytes), 0) AS BIGINT) AS update_bytes,
           list(u.message_id) FILTER (WHERE m.message_id IS NULL) AS unsized,
           list({'message_id': m.message_id, 'bytes': m.bytes}) FILTER (WHERE u.message_id IS NULL) AS repeats,
           list(m.message_id) FILTER (WHERE m.origin <> u.origin) AS elsewhere
    FROM (SELECT network, origin, message_id, place FROM news) AS u
         FULL JOIN (SELECT network, origin, message_id, bytes FROM sent) AS m
           ON m.network = u.network AND m.message_id = u.message_id
    GROUP BY u.place, m.network),
unsized AS (
    SELECT n.place, CAST(sum(30 + length(n.stream) + length(n.tip)) AS BIGINT) AS update_bytes
    FROM news AS n
         SEMI JOIN (SELECT place, unnest(unsized) AS message_id FROM heard) AS h
           ON h.place = n.place AND h.message_id = n.message_id
    GROUP BY n.place),
again AS (
    SELECT m.network, m.origin, m.message_id, m.stream, m.tip, m.observed_at, h.bytes
    FROM sent AS m
         JOIN (SELECT network, unnest(repeats, recursive := true) FROM heard) AS h
           ON h.network = m.network AND h.message_id = m.message_id
    UNION ALL
    SELECT m.network, m.origin, m.message_id, m.stream, m.tip, m.observed_at, m.bytes
    FROM sent AS m
         SEMI JOIN (SELECT network, unnest(elsewhere) AS message_id FROM heard) AS h
           ON h.network = m.network AND h.message_id = m.message_id
         ANTI JOIN updates AS u ON u.network = m.network AND u.origin = m.origin AND u.message_id = m.message_id),
repeated AS (
    SELECT a.network, a.origin, u.separator_key, u.separator_value, a.observed_at AS heard_at, a.bytes
    FROM (SELECT *, row_number() OVER () AS number FROM again) AS a
         LEFT JOIN updates AS u ON u.network = a.network AND u.stream = a.stream AND u.tip = a.tip
    QUALIFY row_number() OVER (
        PARTITION BY a.number
        ORDER BY CASE WHEN u.message_id = a.message_id THEN 0 ELSE 1 END,
                 CASE WHEN u.origin = a.origin THEN 0 ELSE 1 END,
                 CASE WHEN u.separator_source = 'genesis' THEN 0 ELSE 1 END,
                 CASE WHEN u.separator_key IS NULL THEN 1 ELSE 0 END, u.log_partition, u.log_offset) = 1),
-- new updates that `heard` counts wrongly: they are in no batch yet, or their separator has several window lengths
odd AS MATERIALIZED (
    SELECT u.network, u.message_id, u.place, 30 + length(u.stream) + length(u.tip) AS least_bytes,
           NULL AS window_seconds
    FROM (SELECT n.* FROM news AS n JOIN lengths AS l ON l.place = n.place AND NOT l.several) AS u
         ANTI JOIN (
             SELECT w.place, w.closed_at, t.stream, t.tip
             FROM batch_tips AS t JOIN windows AS w USING (batch_cid)) AS b
           ON b.place = u.place AND b.stream = u.stream AND b.tip = u.tip AND b.closed_at > u.heard_at
    UNION ALL
    SELECT u.network, u.message_id, u.place, 30 + length(u.stream) + length(u.tip) AS least_bytes, b.window_seconds
    FROM (SELECT n.* FROM news AS n SEMI JOIN several AS l ON l.place = n.place) AS u
         LEFT JOIN (
             SELECT w.place, batch_cid, w.opened_at, w.closed_at, w.window_seconds, t.stream, t.tip
             FROM batch_tips AS t
                  JOIN (SELECT * FROM windows AS w SEMI JOIN several AS l ON l.place = w.place) AS w
                    USING (batch_cid)) AS b
           ON b.place = u.place AND b.stream = u.stream AND b.tip = u.tip AND b.closed_at > u.heard_at
    QUALIFY row_number() OVER (
        PARTITION BY u.place, u.message_id ORDER BY b.closed_at, b.opened_at, b.batch_cid) = 1),
moved AS MATERIALIZED (
    SELECT o.place, o.window_seconds, count(*) AS updates,
           CAST(sum(coalesce(m.bytes, o.least_bytes)) AS BIGINT) AS update_bytes
    FROM odd AS o
         LEFT JOIN (
             SELECT m.network, m.message_id, m.bytes
             FROM sent AS m SEMI JOIN odd AS o ON o.network = m.network AND o.message_id = m.message_id) AS m
           ON m.network = o.network AND m.message_id = o.message_id
    GROUP BY o.place, o.window_seconds),
placed AS (
    SELECT s.network, s.origin, s.separator_key, s.separator_value, n.window_seconds, n.updates, n.update_bytes
    FROM (
        SELECT n.place, l.window_seconds, n.updates, n.update_bytes
        FROM (
            SELECT place, updates, update_bytes FROM heard
            UNION ALL
            SELECT place, 0, update_bytes FROM unsized
            UNION ALL
            SELECT place, -updates, -update_bytes FROM moved) AS n
             LEFT JOIN lengths AS l ON l.place = n.place
        UNION ALL
        SELECT place, window_seconds, updates, update_bytes
        FROM moved
        WHERE window_seconds IS NOT NULL) AS n
         JOIN separators AS s ON s.place = n.place
    WHERE n.window_seconds IS NOT NULL OR s.separator_key IS NULL
    UNION ALL
    SELECT r.network, r.origin, r.separator_key, r.separator_value,
           CASE WHEN r.heard_at < o.closed_at THEN o.window_seconds END AS window_seconds, 1, r.bytes
    FROM (
        SELECT r.*, s.place
        FROM repeated AS r
             LEFT JOIN separators AS s
               ON s.network = r.network AND s.origin = r.origin AND s.separator_key = r.separator_key
              AND s.separator_value = r.separator_value) AS r
         ASOF LEFT JOIN opened AS o ON o.place = r.place AND o.opened_at <= r.heard_at),
replaced AS (
    SELECT network, origin, separator_key, separator_value, window_seconds,
           CAST(sum(updates) AS BIGINT) AS updates, CAST(sum(update_bytes) AS BIGINT) AS update_bytes
    FROM placed
    GROUP BY network, origin, separator_key, separator_value, window_seconds
    HAVING sum(updates) > 0),
summed AS (
    SELECT r.network, r.origin, r.separator_key, r.separator_value, r.window_seconds, r.updates, r.update_bytes,
           coalesce(m.batches, 0) AS batches, coalesce(m.batch_bytes, 0) AS batch_bytes,
           coalesce(m.block_bytes, 0) AS block_bytes
    FROM replaced AS r
         LEFT JOIN (
             SELECT s.network, s.origin, s.separator_key, s.separator_value, m.window_seconds, m.batches, m.batch_bytes,
                    m.block_bytes
             FROM made AS m JOIN separators AS s ON s.place = m.place) AS m
           ON m.network = r.network AND m.origin = r.origin AND m.separator_key = r.separator_key
          AND m.separator_value = r.separator_value AND m.window_seconds = r.window_seconds)
SELECT network, origin, separator_key, separator_value, window_seconds, batches, block_bytes,
       updates AS messages_unbatched, update_bytes AS bytes_unbatched,
       CASE WHEN window_seconds IS NULL THEN updates ELSE batches END AS messages_batched,
       CASE WHEN window_seconds IS NULL THEN update_bytes ELSE batch_bytes END AS bytes_batched,
       updates + batches AS messages_both, update_bytes + batch_bytes AS bytes_both
FROM summed
