-- Savings by batching: number and bytes of the messages if only UPDATEs are sent (unbatched), if batches replace them
-- (batched), or if both are sent (both). Rows without window_seconds count UPDATEs in no window, which are sent in any
-- case.
-- Grain: a network, origin, separator and window length.
-- A new update counts for the batch that contains its tip. Event time alone does not determine the batch, because
-- windows may overlap in event time. A repeated UPDATE counts for the window that was open when it arrived.
WITH opened AS (
    SELECT network, origin, separator_key, separator_value, opened_at, max(closed_at) AS closed_at,
           max(window_seconds) AS window_seconds
    FROM batch_times
    GROUP BY network, origin, separator_key, separator_value, opened_at),
times AS (
    SELECT network, origin, separator_key, separator_value, opened_at AS happened_at, opened_at, NULL AS update_bytes
    FROM opened
    UNION ALL
    SELECT network, origin, separator_key, separator_value, heard_at, NULL, update_bytes
    FROM announcements
    WHERE again),
repeats AS (
    SELECT network, origin, separator_key, separator_value, happened_at, update_bytes,
           max(opened_at) OVER (
               PARTITION BY network, origin, separator_key, separator_value ORDER BY happened_at
               RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS last_opened_at
    FROM times),
placed AS (
    SELECT u.network, u.origin, u.separator_key, u.separator_value, b.window_seconds, u.update_bytes
    FROM announcements AS u
         LEFT JOIN batches_with_tips AS b
           ON b.network = u.network AND b.origin = u.origin AND b.separator_key = u.separator_key
          AND b.separator_value = u.separator_value AND b.stream = u.stream AND b.tip = u.tip
          AND b.closed_at > u.heard_at
         ANTI JOIN held_again AS l
           ON l.network = b.network AND l.origin = b.origin AND l.separator_key = b.separator_key
          AND l.separator_value = b.separator_value AND l.batch_cid = b.batch_cid AND l.opened_at = b.opened_at
          AND l.stream = b.stream AND l.tip = b.tip AND l.earlier_closed_at > u.heard_at
    WHERE NOT u.again AND (b.batch_cid IS NOT NULL OR u.separator_key IS NULL)
    UNION ALL
    SELECT r.network, r.origin, r.separator_key, r.separator_value,
           CASE WHEN r.happened_at < o.closed_at THEN o.window_seconds END AS window_seconds, r.update_bytes
    FROM repeats AS r
         LEFT JOIN opened AS o
           ON o.network = r.network AND o.origin = r.origin AND o.separator_key = r.separator_key
          AND o.separator_value = r.separator_value AND o.opened_at = r.last_opened_at
    WHERE r.update_bytes IS NOT NULL),
replaced AS (
    SELECT network, origin, separator_key, separator_value, window_seconds,
           count(*) AS updates, CAST(sum(update_bytes) AS BIGINT) AS update_bytes
    FROM placed
    GROUP BY network, origin, separator_key, separator_value, window_seconds),
made AS (
    SELECT network, origin, separator_key, separator_value, window_seconds, count(*) AS batches,
           CAST(sum(message_bytes) AS BIGINT) AS batch_bytes, CAST(sum(block_bytes) AS BIGINT) AS block_bytes
    FROM batch_times
    GROUP BY network, origin, separator_key, separator_value, window_seconds),
summed AS (
    SELECT r.network, r.origin, r.separator_key, r.separator_value, r.window_seconds, r.updates, r.update_bytes,
           coalesce(m.batches, 0) AS batches, coalesce(m.batch_bytes, 0) AS batch_bytes,
           coalesce(m.block_bytes, 0) AS block_bytes
    FROM replaced AS r
         LEFT JOIN made AS m
           ON m.network = r.network AND m.origin = r.origin AND m.separator_key = r.separator_key
          AND m.separator_value = r.separator_value AND m.window_seconds = r.window_seconds)
SELECT network, origin, separator_key, separator_value, window_seconds, batches, block_bytes,
       updates AS messages_unbatched, update_bytes AS bytes_unbatched,
       CASE WHEN window_seconds IS NULL THEN updates ELSE batches END AS messages_batched,
       CASE WHEN window_seconds IS NULL THEN update_bytes ELSE batch_bytes END AS bytes_batched,
       updates + batches AS messages_both, update_bytes + batch_bytes AS bytes_both
FROM summed
