-- Each tip in batch_tips belongs to a batch in batches. After a swap the check always passes, because the tips of
-- replaced batches stay.
-- grain: a tip without its batch
-- level: error
-- owner: sink
-- hint: A tip in batch_tips belongs to a batch that is not in batches: rows of batches were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: batches
SELECT t.batch_cid, t.stream, t.tip, NULL::TIMESTAMPTZ AS seen_at, 'there is no such row in batches' AS words
FROM new_batch_tips AS t
WHERE
    NOT EXISTS (SELECT 1 FROM batches AS o WHERE o.batch_cid = t.batch_cid)
    AND NOT EXISTS (SELECT 1 FROM backfill_runs WHERE event = 'swapped' AND range_from IS NOT NULL)
