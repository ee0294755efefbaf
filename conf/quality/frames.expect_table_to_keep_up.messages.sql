-- The newest LIVE row of frames is at most 15 minutes older than the newest LIVE row of messages.
-- grain: the table
-- level: error
-- owner: bridge
-- hint: The table frames is behind messages, although the query archive writes both at once: rows of frames were lost. While Kafka still has the records, rebuild the rows: kiln backfill run {range} --source kafka --run repair, then kiln backfill swap repair.
-- show: SELECT max(observed_at) FROM frames
WITH own AS (SELECT max(observed_at) AS newest FROM frames WHERE origin = 'LIVE'), ahead AS (SELECT max(observed_at) AS newest FROM messages WHERE origin = 'LIVE')
SELECT 'frames' AS table, ahead.newest AS seen_at,
    coalesce('the newest row is of ' || strftime(own.newest AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S'), 'there is no row')
        || ', and that of messages of ' || strftime(ahead.newest AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words
FROM own, ahead WHERE ahead.newest IS NOT NULL AND (own.newest IS NULL OR own.newest < ahead.newest - INTERVAL 15 MINUTES)
