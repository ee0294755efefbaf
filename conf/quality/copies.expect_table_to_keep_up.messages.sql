-- The newest row of copies is at most 15 minutes older than the newest LIVE row of messages.
-- grain: the table
-- level: error
-- owner: archive
-- hint: The table copies is behind messages, although the query archive writes both at once: rows of copies were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- show: SELECT max(observed_at) FROM copies
WITH own AS (SELECT max(observed_at) AS newest FROM copies), ahead AS (SELECT max(observed_at) AS newest FROM messages WHERE origin = 'LIVE')
SELECT 'copies' AS table, ahead.newest AS seen_at,
    coalesce('the newest row is of ' || strftime(own.newest AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S'), 'there is no row')
        || ', and that of messages of ' || strftime(ahead.newest AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words
FROM own, ahead WHERE ahead.newest IS NOT NULL AND (own.newest IS NULL OR own.newest < ahead.newest - INTERVAL 15 MINUTES)
