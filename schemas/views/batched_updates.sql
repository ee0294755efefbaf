-- Each new update that has a separator, and the batch that holds its tip: the first that closed after Kiln heard the
-- update. Without a batch are updates whose window is open, or whose batch is not in the tables yet.
-- Grain: a new update that has a separator.
-- Few tips are in several batches, so only for those is it asked which batch was the first.
WITH held AS (
    SELECT t.network, t.origin, t.separator_key, t.separator_value, t.cid, t.opened_at, t.closed_at, t.emitted_at,
           t.window_seconds, i.stream, i.tip
    FROM batch_times AS t JOIN batch_tips AS i ON i.cid = t.cid),
repeated AS (
    SELECT stream, tip
    FROM held
    GROUP BY stream, tip
    HAVING count(*) > 1),
later AS (
    SELECT h.network, h.origin, h.separator_key, h.separator_value, h.cid, h.opened_at, h.stream, h.tip,
           lag(h.closed_at) OVER (
               PARTITION BY h.network, h.origin, h.separator_key, h.separator_value, h.stream, h.tip
               ORDER BY h.closed_at, h.opened_at, h.cid) AS earlier_closed_at
    FROM held AS h JOIN repeated AS r ON r.stream = h.stream AND r.tip = h.tip)
SELECT u.network, u.origin, u.message, u.separator_key, u.separator_value, u.stream, u.tip, u.heard_at, b.cid,
       b.opened_at, b.closed_at, b.emitted_at, b.window_seconds
FROM (
    SELECT network, origin, message, separator_key, separator_value, stream, tip,
           least(observed_at, updated_at) AS heard_at
    FROM updates
    WHERE separator_key IS NOT NULL) AS u
    LEFT JOIN held AS b
      ON b.network = u.network AND b.origin = u.origin AND b.separator_key = u.separator_key
     AND b.separator_value = u.separator_value AND b.stream = u.stream AND b.tip = u.tip AND b.closed_at > u.heard_at
    LEFT JOIN later AS l
      ON l.network = b.network AND l.origin = b.origin AND l.separator_key = b.separator_key
     AND l.separator_value = b.separator_value AND l.cid = b.cid AND l.opened_at = b.opened_at
     AND l.stream = b.stream AND l.tip = b.tip AND l.earlier_closed_at > u.heard_at
WHERE l.cid IS NULL
