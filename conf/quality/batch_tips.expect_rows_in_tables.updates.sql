-- Some node announced each tip of a batch. Batches that a swap replaced, and the batch at the end of a swapped range,
-- may have other tips, and are ignored.
-- grain: a tip that no node announced
-- level: error
-- owner: sink
-- hint: A batch contains a tip that no node announced. Find the program that writes to kiln.updates or kiln.batches: only Kiln may write there.
-- expires: updates, messages
SELECT t.batch_cid, t.stream, t.tip, NULL::TIMESTAMPTZ AS seen_at, 'there is no such row in updates or messages' AS words
FROM new_batch_tips AS t
WHERE
    NOT EXISTS (SELECT 1 FROM updates AS o WHERE o.stream = t.stream AND o.tip = t.tip)
    AND NOT EXISTS (SELECT 1 FROM messages AS o WHERE o.stream = t.stream AND o.tip = t.tip)
    AND (NOT EXISTS (SELECT 1 FROM backfill_runs WHERE event = 'swapped' AND range_from IS NOT NULL) OR EXISTS (
        SELECT 1 FROM batches AS b WHERE b.batch_cid = t.batch_cid AND NOT EXISTS (SELECT 1 FROM backfill_runs WHERE event = 'swapped' AND range_from IS NOT NULL
            AND b.opened_at < range_to AND b.closed_at > range_to)))
