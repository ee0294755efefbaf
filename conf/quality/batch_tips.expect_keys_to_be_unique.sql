-- No two rows of batch_tips have the same key, unless the batch itself was built again:
-- after dedupe.signed_ttl a batch may have the same tips, and its rows are then repeated.
-- grain: a key that occurs again
-- level: error
-- owner: sink
-- hint: The query sink wrote a tip twice, or its checkpoint was restored from an older copy. Read tips with SELECT DISTINCT; kiln recover finds a checkpoint that is older than its tables.
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
