-- No two rows of batches have the same key. Hashes find the few keys that may occur twice; only these keys are compared
-- in full.
-- grain: a key that several rows have
-- level: error
-- owner: batch
-- hint: The query sink wrote a batch twice, or the checkpoint of sink was restored from an older copy. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(network, origin, separator_key, separator_value, opened_at, batch_cid) AS h FROM batches
    WHERE hash(network, origin, separator_key, separator_value, opened_at, batch_cid) IN (SELECT hash(network, origin, separator_key, separator_value, opened_at, batch_cid) FROM new_batches)
    GROUP BY h HAVING count(*) > 1
)
SELECT network, origin, separator_key, separator_value, opened_at, batch_cid, max(emitted_at) AS seen_at, 'more than one row' AS words
FROM batches AS t
WHERE hash(network, origin, separator_key, separator_value, opened_at, batch_cid) IN (SELECT h FROM repeated)
GROUP BY network, origin, separator_key, separator_value, opened_at, batch_cid
HAVING count(*) > 1
