-- The batches are those that follow from the updates by the rule of decision 1. The table `windows` has the windows
-- that this rule builds from the updates, each with its batch. `is_closed` is true if a later update has closed the
-- window. A missing or additional update shifts all windows of its separator up to the next pause. So a chain of
-- overlapping windows is not checked if one of them cannot be judged: because its batch has another length (other
-- settings) or contains tips that are not in updates (which another check reports), or because it is at the start of a
-- range that a swap replaced.
-- grain: a batch without a window, or a window without its batch
-- level: error
-- owner: batch
-- hint: A batch does not follow from the updates: rows of updates or batches were lost, batch.window or batch.grace was changed, or the query batch has a bug. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: updates, batches
-- show: SELECT * FROM updates WHERE network = {network} AND origin = {origin} AND separator_key = {separator_key} AND separator_value = {separator_value} AND least(observed_at, log_time) BETWEEN {opened_at} - INTERVAL 5 SECONDS AND {opened_at} + INTERVAL 5 SECONDS ORDER BY log_partition, log_offset
WITH unmatched AS (
    SELECT w.network, w.origin, w.separator_key, w.separator_value, w.opened_at,
        w.opened_at + to_microseconds(window_us) AS ends_at, w.batch_cid, w.is_closed AS is_due,
        'the batch of this window is missing' AS words,
        EXISTS (SELECT 1 FROM backfill_runs WHERE event = 'swapped' AND w.opened_at >= range_from
            AND w.opened_at < range_from + to_microseconds(window_us + grace_us)) AS is_excused
    FROM windows AS w ANTI JOIN batches USING (network, origin, separator_key, separator_value, opened_at, batch_cid),
        context
    UNION ALL
    SELECT b.network, b.origin, b.separator_key, b.separator_value, b.opened_at, b.closed_at, b.batch_cid, true,
        'no window of the updates makes this batch',
        epoch_us(b.closed_at) - epoch_us(b.opened_at) <> window_us OR EXISTS (
            SELECT 1 FROM batch_tips AS t WHERE t.batch_cid = b.batch_cid AND NOT EXISTS (
                SELECT 1 FROM updates AS u WHERE u.network = b.network AND u.origin = b.origin AND u.stream = t.stream
                    AND u.tip = t.tip AND u.separator_key = b.separator_key AND u.separator_value = b.separator_value))
    FROM (SELECT DISTINCT ON (network, origin, separator_key, separator_value, opened_at, batch_cid) * FROM new_batches)
        AS b ANTI JOIN windows USING (network, origin, separator_key, separator_value, opened_at, batch_cid), context
), starts AS (
    SELECT *, coalesce(opened_at >= max(ends_at) OVER (
        PARTITION BY network, origin, separator_key, separator_value ORDER BY opened_at
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS is_start
    FROM unmatched
), chains AS (
    SELECT *, sum(is_start::INT) OVER (
        PARTITION BY network, origin, separator_key, separator_value ORDER BY opened_at ROWS UNBOUNDED PRECEDING) AS chain
    FROM starts
)
SELECT network, origin, separator_key, separator_value, opened_at, batch_cid, opened_at AS seen_at, words
FROM chains
QUALIFY is_due AND NOT bool_or(is_excused) OVER (PARTITION BY network, origin, separator_key, separator_value, chain)
