-- Each new update with a separator, and its batch. The batch of an update is the first one that contains its tip and
-- closed after its event time. batch_cid is null while the window is open, or until the batch is in the tables.
-- Grain: a new update with a separator.
-- A number stands for the four texts of a separator, so that the expensive join with the tips compares few texts. The
-- last condition means separator_key IS NOT NULL, as each batch has a separator. DuckDB would push that shorter
-- condition below the join, expect few rows from it, and build the hash table on the updates, which have the longer
-- rows.
WITH separators AS MATERIALIZED (
    SELECT network, origin, separator_key, separator_value, row_number() OVER () AS place
    FROM (SELECT DISTINCT network, origin, separator_key, separator_value FROM batches)),
held AS (
    SELECT s.place, batch_cid, b.opened_at, b.closed_at, b.emitted_at, b.window_seconds, t.stream, t.tip
    FROM batch_tips AS t
         JOIN batch_times AS b USING (batch_cid)
         JOIN separators AS s ON s.network = b.network AND s.origin = b.origin AND s.separator_key = b.separator_key
          AND s.separator_value = b.separator_value)
SELECT u.network, u.origin, u.message_id, u.separator_key, u.separator_value, u.stream, u.tip, u.heard_at, b.batch_cid,
       b.opened_at, b.closed_at, b.emitted_at, b.window_seconds
FROM (
    SELECT u.network, u.origin, u.message_id, u.separator_key, u.separator_value, u.stream, u.tip,
           least(u.observed_at, u.log_time) AS heard_at, s.place
    FROM updates AS u
         LEFT JOIN separators AS s ON s.network = u.network AND s.origin = u.origin
          AND s.separator_key = u.separator_key AND s.separator_value = u.separator_value) AS u
    LEFT JOIN held AS b
      ON b.place = u.place AND b.stream = u.stream AND b.tip = u.tip AND b.closed_at > u.heard_at
    ANTI JOIN held_again AS l
      ON l.network = u.network AND l.origin = u.origin AND l.separator_key = u.separator_key
     AND l.separator_value = u.separator_value AND l.batch_cid = b.batch_cid AND l.opened_at = b.opened_at
     AND l.stream = u.stream AND l.tip = u.tip AND l.earlier_closed_at > u.heard_at
WHERE u.separator_key IS NOT NULL OR b.batch_cid IS NOT NULL
