-- The tips in the batches that Kiln built, each with the separator, times and window length of its batch.
-- Grain: a tip in a batch.
SELECT b.network, b.origin, b.separator_key, b.separator_value, batch_cid, b.opened_at, b.closed_at, b.emitted_at,
       t.stream, t.tip, b.window_seconds
FROM batch_times AS b JOIN batch_tips AS t USING (batch_cid)
