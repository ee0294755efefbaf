-- Each UPDATE whose separator is known at once has a row in updates: its own or, if it is a repeat, that of an earlier
-- UPDATE with the same tip.
-- grain: an UPDATE without a row in updates
-- level: error
-- owner: archive
-- hint: An UPDATE in messages is not in updates. If the query updates or sink lags (kiln status), wait. Otherwise, rows of updates were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: updates
SELECT t.network, t.message_id, t.origin, t.stream, t.tip, observed_at AS seen_at, 'there is no such row in updates' AS words
FROM new_messages AS t
WHERE
    type = 'UPDATE' AND model IS NOT NULL AND kafka_partition >= 0
    AND NOT EXISTS (SELECT 1 FROM updates AS o WHERE o.network = t.network AND o.origin = t.origin AND o.stream = t.stream AND o.tip = t.tip)
