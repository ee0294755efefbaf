-- The message of each update is in messages.
-- grain: an update without its message
-- level: error
-- owner: sink
-- hint: The message of an update is not in messages: rows of messages were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: messages
SELECT t.network, t.message_id, t.origin, t.stream, t.tip, observed_at AS seen_at, 'there is no such row in messages' AS words
FROM new_updates AS t
WHERE
    NOT EXISTS (SELECT 1 FROM messages AS o WHERE o.network = t.network AND o.message_id = t.message_id)
