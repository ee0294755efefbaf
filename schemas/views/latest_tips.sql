-- The newest tips of each stream: of the tips that somebody stands by, the newest, and all that were first heard in
-- the 10 s before it. An author stands by what the author announced last for the stream.
-- Grain: a tip of a stream that is among the stream's newest.
WITH words AS (
    SELECT network, stream, tip, from_peer, max(observed_at) AS said_at,
           max(max(observed_at)) OVER (PARTITION BY network, stream, from_peer) AS last_said_at
    FROM updates
    GROUP BY network, stream, tip, from_peer),
taken_back AS (
    SELECT network, stream, tip
    FROM words
    GROUP BY network, stream, tip
    HAVING bool_and(from_peer IS NOT NULL AND said_at < last_said_at)),
heard AS (
    SELECT network, stream, tip, min(observed_at) AS first_heard, array_sort(array_agg(DISTINCT source)) AS sources,
           bool_or(source <> 'update') AS from_batch
    FROM tips
    GROUP BY network, stream, tip),
standing AS (
    SELECT h.network, h.stream, h.tip, h.first_heard, h.sources,
           max(h.first_heard) OVER (PARTITION BY h.network, h.stream) AS newest
    FROM heard AS h
         LEFT JOIN taken_back AS t ON t.network = h.network AND t.stream = h.stream AND t.tip = h.tip
    WHERE h.from_batch OR t.tip IS NULL)
SELECT network, stream, tip, first_heard, sources, count(*) OVER (PARTITION BY network, stream) AS tips
FROM standing
WHERE first_heard >= newest - INTERVAL '10' SECOND
