-- Batches of a separator are published in order, so if a batch has a receipt, the batch before it has one too. Batches
-- that a swap put into its range are never published, and are ignored.
-- grain: a batch without a receipt
-- level: error
-- owner: publishing
-- hint: A batch has no receipt in publications, although a later batch of its separator has one: rows were lost, or the bridge was killed while it published. Restore the newest copy of the table.
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
