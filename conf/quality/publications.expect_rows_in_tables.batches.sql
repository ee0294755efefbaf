-- Each receipt belongs to a batch, or to tips of a batch: a swap keeps only the tips of the batches that it replaces.
-- grain: a row of publications without its counterpart
-- level: error
-- owner: publishing
-- hint: The bridge announced a batch that is not in batches. If the query sink lags (kiln status), wait. Otherwise, rows were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: batches, batch_tips
SELECT t.batch_cid, t.transport, t.topic, t.target, t.published_at, published_at AS seen_at, 'there is no such row in batches or batch_tips' AS words
FROM new_publications AS t
WHERE
    NOT EXISTS (SELECT 1 FROM batches AS o WHERE o.batch_cid = t.batch_cid)
    AND NOT EXISTS (SELECT 1 FROM batch_tips AS o WHERE o.batch_cid = t.batch_cid)
