-- No two rows of publications have the same key. Hashes find the few keys that may occur twice; only these keys are
-- compared in full.
-- grain: a key that several rows have
-- level: error
-- owner: publishing
-- hint: The query sink wrote a receipt twice, or the checkpoint of sink was restored from an older copy. Run kiln recover, which finds a checkpoint that is older than its tables. Until then, read receipts with SELECT DISTINCT.
WITH repeated AS (
    SELECT hash(batch_cid, transport, topic, published_at) AS h FROM publications
    WHERE hash(batch_cid, transport, topic, published_at) IN (SELECT hash(batch_cid, transport, topic, published_at) FROM new_publications)
    GROUP BY h HAVING count(*) > 1
)
SELECT batch_cid, transport, topic, published_at, max(published_at) AS seen_at, 'more than one row' AS words
FROM publications AS t
WHERE hash(batch_cid, transport, topic, published_at) IN (SELECT h FROM repeated)
GROUP BY batch_cid, transport, topic, published_at
HAVING count(*) > 1
