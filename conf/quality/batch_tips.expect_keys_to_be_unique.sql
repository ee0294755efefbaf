-- No two rows of batch_tips have the same key, unless the same block was built twice: a later batch with the same tips
-- repeats the rows.
-- grain: a key that several rows have
-- level: error
-- owner: sink
-- hint: The query sink wrote the tips of a batch twice, or the checkpoint of sink was restored from an older copy. Run kiln recover, which finds a checkpoint that is older than its tables. Until then, read tips with SELECT DISTINCT.
WITH repeated AS (
    SELECT hash(batch_cid, stream, tip) AS h FROM batch_tips
    WHERE hash(batch_cid, stream, tip) IN (SELECT hash(batch_cid, stream, tip) FROM new_batch_tips)
    GROUP BY h HAVING count(*) > 1
)
SELECT batch_cid, stream, tip, NULL::TIMESTAMPTZ AS seen_at, 'more than one row' AS words
FROM batch_tips AS t
WHERE hash(batch_cid, stream, tip) IN (SELECT h FROM repeated)
GROUP BY batch_cid, stream, tip
HAVING count(*) > 1
    AND (SELECT count(*) FROM batches AS b WHERE b.batch_cid = t.batch_cid) < 2
