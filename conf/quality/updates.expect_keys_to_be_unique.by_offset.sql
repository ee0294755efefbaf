-- Each record of kiln.updates has at most one row. Rows of backfill runs are ignored, because they were never in this
-- topic.
-- grain: a key that several rows have
-- level: error
-- owner: sink
-- hint: Two rows of updates have the same Kafka offset: the query sink read a record twice, or the topic kiln.updates was re-created. Batches cannot be rebuilt from this table; rebuild them from frames instead (docs/backfill.md).
WITH repeated AS (
    SELECT hash(log_partition, log_offset) AS h FROM updates
    WHERE hash(log_partition, log_offset) IN (SELECT hash(log_partition, log_offset) FROM new_updates) AND log_partition >= 0
    GROUP BY h HAVING count(*) > 1
)
SELECT log_partition, log_offset, max(observed_at) AS seen_at, 'more than one row' AS words
FROM updates AS t
WHERE hash(log_partition, log_offset) IN (SELECT h FROM repeated) AND log_partition >= 0
GROUP BY log_partition, log_offset
HAVING count(*) > 1
