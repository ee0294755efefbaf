-- The batch of each receipt is in batches or in batch_tips. A swap removes the batches that it replaces from batches,
-- but keeps their tips.
-- grain: a receipt without its batch
-- level: error
-- owner: publishing
-- hint: A published batch is not in batches. If the query sink lags (kiln status), wait. Otherwise, rows of batches were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: batches, batch_tips
SELECT t.batch_cid, t.transport, t.topic, t.target, t.published_at, published_at AS seen_at, 'there is no such row in batches or batch_tips' AS words
FROM new_publications AS t
WHERE
    NOT EXISTS (SELECT 1 FROM batches AS o WHERE o.batch_cid = t.batch_cid)
    AND NOT EXISTS (SELECT 1 FROM batch_tips AS o WHERE o.batch_cid = t.batch_cid)
