-- For each reason, the number of rows in the last 24 hours of the table is at most 5% of the copies of messages
-- in that time. Fewer than 20 rows are ignored. Rows from files of other programs do not count.
-- grain: a reason
-- level: warn
-- owner: archive
-- hint: Much of the traffic is rejected. docs/RUNBOOK.md explains what to do for each reason.
-- history: 2d
WITH since AS (
    SELECT greatest((SELECT max(observed_at) FROM copies), (SELECT max(observed_at) FROM quarantine WHERE stage <> 'history'))
        - INTERVAL 24 HOURS AS begins
), rejected AS (
    SELECT stage, reason, count(*) AS n, max(observed_at) AS seen_at FROM quarantine
    WHERE stage <> 'history' AND observed_at >= (SELECT begins FROM since) GROUP BY ALL
)
SELECT stage, reason, seen_at, n || ' rows' AS words
FROM rejected
WHERE n >= 20 AND n > 0.05 * (SELECT count(*) FROM copies WHERE observed_at >= (SELECT begins FROM since))
