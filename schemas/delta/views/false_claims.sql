-- Tips in batches of the wrong separator. The genesis of the stream names the right separator (true_key, true_value).
-- Grain: a tip in a batch.
-- Batches of two separators with the same tips have the same CID, so the separator comes from the row of the batch.
WITH known AS (
    SELECT network, stream, min(log_time) AS known_since
    FROM updates
    WHERE separator_source = 'genesis'
    GROUP BY network, stream),
held AS (
    SELECT t.batch_cid, t.stream, t.tip, s.network, s.separator_key, s.separator_value, k.known_since
    FROM batch_tips AS t
         JOIN streams AS s ON s.stream = t.stream
         LEFT JOIN known AS k ON k.network = s.network AND k.stream = s.stream
    WHERE s.source = 'genesis' AND s.separator_key IS NOT NULL)
SELECT network, b.origin, b.separator_key, b.separator_value, batch_cid, b.opened_at, b.closed_at, h.stream, h.tip,
       h.separator_key AS true_key, h.separator_value AS true_value, h.known_since
FROM batches AS b JOIN held AS h USING (batch_cid, network)
WHERE h.separator_key <> b.separator_key OR h.separator_value <> b.separator_value
