-- Each new update that has a separator, and the batch that holds its tip: the first that closed after Kiln heard the
-- update. Without a batch are updates whose window is open, or whose batch is not in the tables yet.
-- Grain: a new update that has a separator.
SELECT u.network, u.origin, u.message, u.separator_key, u.separator_value, u.stream, u.tip, u.heard_at,
       min_by(b.cid, b.closed_at) AS cid, min_by(b.opened_at, b.closed_at) AS opened_at,
       min(b.closed_at) AS closed_at, min_by(b.emitted_at, b.closed_at) AS emitted_at,
       min_by(b.window_seconds, b.closed_at) AS window_seconds
FROM (
    SELECT network, origin, message, separator_key, separator_value, stream, tip,
           least(observed_at, updated_at) AS heard_at
    FROM updates
    WHERE separator_key IS NOT NULL) AS u
    LEFT JOIN (
        SELECT t.network, t.origin, t.separator_key, t.separator_value, t.cid, t.opened_at, t.closed_at, t.emitted_at,
               t.window_seconds, i.stream, i.tip
        FROM batch_times AS t JOIN batch_tips AS i ON i.cid = t.cid) AS b
      ON b.network = u.network AND b.origin = u.origin AND b.separator_key = u.separator_key
     AND b.separator_value = u.separator_value AND b.stream = u.stream AND b.tip = u.tip AND b.closed_at > u.heard_at
GROUP BY u.network, u.origin, u.message, u.separator_key, u.separator_value, u.stream, u.tip, u.heard_at
