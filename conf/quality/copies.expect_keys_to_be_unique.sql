-- No two rows of copies have the same key. Hashes find the few keys that may occur twice; only these keys are compared
-- in full.
-- grain: a key that several rows have
-- level: error
-- owner: archive
-- hint: Two instances of the query archive wrote to the table, or the checkpoint of archive was restored from an older copy. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(kafka_partition, kafka_offset, message_index) AS h FROM copies
    WHERE hash(kafka_partition, kafka_offset, message_index) IN (SELECT hash(kafka_partition, kafka_offset, message_index) FROM new_copies)
    GROUP BY h HAVING count(*) > 1
)
SELECT kafka_partition, kafka_offset, message_index, max(observed_at) AS seen_at, 'more than one row' AS words
FROM copies AS t
WHERE hash(kafka_partition, kafka_offset, message_index) IN (SELECT h FROM repeated)
GROUP BY kafka_partition, kafka_offset, message_index
HAVING count(*) > 1
