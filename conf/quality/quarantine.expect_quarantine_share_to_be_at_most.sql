-- For each reason, the number of rows in the last 24 hours of the table is at most 5% of the number of message copies
-- in this time. Fewer than 20 rows are ignored, and so are rows from files of other programs.
-- grain: a reason
-- level: warn
-- owner: archive
-- hint: Kiln rejects much of the traffic for one reason. docs/RUNBOOK.md has the remedy for each reason.
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
