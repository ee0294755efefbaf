-- Batches of a separator are announced in order: if a batch has a receipt, so has the batch before it.
-- A swap fills its range with other batches, which are not announced.
-- grain: a batch without a receipt
-- level: error
-- owner: publishing
-- hint: The receipt of a batch is not in publications: rows were lost, or the bridge was killed while it announced. Restore the newest copy of the table.
-- expires: publications
WITH in_order AS (
    SELECT *, lead(batch_cid) OVER (PARTITION BY network, separator_key, separator_value ORDER BY emitted_at) AS next
    FROM batches WHERE origin = 'LIVE'
)
SELECT batch_cid, emitted_at AS seen_at, 'a later batch has a receipt, and this one has none' AS words
FROM in_order
WHERE next IN (SELECT batch_cid FROM new_publications) AND batch_cid NOT IN (SELECT batch_cid FROM publications)
    AND batch_cid IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM backfill_runs
        WHERE event = 'swapped' AND opened_at >= range_from AND opened_at < range_to)
