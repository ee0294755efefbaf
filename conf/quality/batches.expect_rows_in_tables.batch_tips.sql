-- Each batch has as many tips in batch_tips as its tip_count states.
-- grain: a batch without all of its tips
-- level: error
-- owner: batch
-- hint: Tips of a batch are missing in batch_tips: rows were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: batch_tips
SELECT b.batch_cid, any_value(b.network) AS network, any_value(b.origin) AS origin, max(b.emitted_at) AS seen_at,
    'has ' || count(DISTINCT (t.stream, t.tip)) FILTER (t.tip IS NOT NULL) || ' of its ' || max(b.tip_count)
        || ' rows in batch_tips' AS words
FROM new_batches AS b LEFT JOIN batch_tips AS t ON t.batch_cid = b.batch_cid
GROUP BY b.batch_cid
HAVING count(DISTINCT (t.stream, t.tip)) FILTER (t.tip IS NOT NULL) <> max(b.tip_count)
