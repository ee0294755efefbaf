-- No two rows of publications have the same key.
-- The hashes find the few keys that may occur twice; only those are compared in full.
-- grain: a key that occurs again
-- level: error
-- owner: publishing
-- hint: The query sink wrote a receipt twice, or its checkpoint was restored from an older copy. Read receipts with SELECT DISTINCT; kiln recover finds a checkpoint that is older than its tables.
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
