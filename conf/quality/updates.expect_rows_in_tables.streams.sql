-- If the separator of an update comes from a genesis, the stream of the update is in streams.
-- grain: an update without its genesis
-- level: error
-- owner: sink
-- hint: The stream of an update with a verified separator is not in streams: rows of streams were lost. Restore the newest copy of the table.
-- expires: streams
SELECT t.network, t.message_id, t.stream, t.tip, observed_at AS seen_at, 'there is no such row in streams' AS words
FROM new_updates AS t
WHERE separator_source = 'genesis'
    AND NOT EXISTS (SELECT 1 FROM streams AS o WHERE o.network = t.network AND o.stream = t.stream)
