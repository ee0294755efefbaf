-- Each new update with a separator, and its batch. The batch of an update is the first one that contains its tip and
-- closed after its event time. batch_cid is null while the window is open, or until the batch is in the tables.
-- Grain: a new update with a separator.
SELECT u.network, u.origin, u.message_id, u.separator_key, u.separator_value, u.stream, u.tip, u.heard_at, b.batch_cid,
       b.opened_at, b.closed_at, b.emitted_at, b.window_seconds
FROM (
    SELECT network, origin, message_id, separator_key, separator_value, stream, tip,
           least(observed_at, log_time) AS heard_at
    FROM updates
    WHERE separator_key IS NOT NULL) AS u
    LEFT JOIN batches_with_tips AS b
      ON b.network = u.network AND b.origin = u.origin AND b.separator_key = u.separator_key
     AND b.separator_value = u.separator_value AND b.stream = u.stream AND b.tip = u.tip AND b.closed_at > u.heard_at
    ANTI JOIN held_again AS l
      ON l.network = b.network AND l.origin = b.origin AND l.separator_key = b.separator_key
     AND l.separator_value = b.separator_value AND l.batch_cid = b.batch_cid AND l.opened_at = b.opened_at
     AND l.stream = b.stream AND l.tip = b.tip AND l.earlier_closed_at > u.heard_at
