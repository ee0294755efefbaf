-- The tip of each update is in tips.
-- grain: an update without its tip
-- level: error
-- owner: sink
-- hint: The tip of an update is not in tips: rows of tips were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: tips
SELECT t.network, t.message_id, t.stream, t.tip, observed_at AS seen_at, 'there is no such row in tips' AS words
FROM new_updates AS t
WHERE
    NOT EXISTS (SELECT 1 FROM tips AS o WHERE o.network = t.network AND o.stream = t.stream AND o.tip = t.tip)
