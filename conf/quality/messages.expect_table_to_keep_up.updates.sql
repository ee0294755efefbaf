-- The newest LIVE row of messages is at most 15 minutes older than the newest LIVE row of updates.
-- grain: the table
-- level: error
-- owner: archive
-- hint: The table messages is behind updates: the query archive does not run, while the query updates does. Check kiln status and logs/spark.log.
-- show: SELECT max(observed_at) FROM messages
WITH own AS (SELECT max(observed_at) AS newest FROM messages WHERE origin = 'LIVE'), ahead AS (SELECT max(observed_at) AS newest FROM updates WHERE origin = 'LIVE')
SELECT 'messages' AS table, ahead.newest AS seen_at,
    coalesce('the newest row is of ' || strftime(own.newest AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S'), 'there is no row')
        || ', and that of updates of ' || strftime(ahead.newest AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words
FROM own, ahead WHERE ahead.newest IS NOT NULL AND (own.newest IS NULL OR own.newest < ahead.newest - INTERVAL 15 MINUTES)
