-- While a bridge runs, the newest LIVE row is at most 15 minutes old.
-- grain: the table
-- level: error
-- owner: bridge
-- hint: A bridge runs, but no new frame reaches the table frames. Check the bridge's peers, its spool, and the query archive (kiln status).
-- show: SELECT max(observed_at) FROM frames
SELECT 'frames' AS table, max(observed_at) AS seen_at,
    'the newest LIVE row is of ' || strftime(max(observed_at) AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words
FROM frames, context WHERE origin = 'LIVE' AND bridge_runs
GROUP BY now HAVING max(observed_at) < now - INTERVAL 15 MINUTES
