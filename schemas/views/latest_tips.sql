-- The newest tips of each stream: of the tips that somebody stands by, the newest, and all that were first heard in
-- the 10 s before it. An author stands by what the author announced last for the stream.
-- Grain: a tip of a stream that is among the stream's newest.
WITH words AS (
    SELECT network, stream, tip, from_peer, max(observed_at) AS said_at
    FROM updates
    GROUP BY network, stream, tip, from_peer),
last_words AS (
    SELECT network, stream, from_peer, max(observed_at) AS said_at
    FROM updates
    WHERE from_peer IS NOT NULL
    GROUP BY network, stream, from_peer),
taken_back AS (
    SELECT w.network, w.stream, w.tip
    FROM words AS w
         LEFT JOIN last_words AS l ON l.network = w.network AND l.stream = w.stream AND l.from_peer = w.from_peer
    GROUP BY w.network, w.stream, w.tip
    HAVING bool_and(l.said_at IS NOT NULL AND w.said_at < l.said_at)),
heard AS (
    SELECT network, stream, tip, min(observed_at) AS first_heard, min(source) AS one, max(source) AS other
    FROM tips
    GROUP BY network, stream, tip),
standing AS (
    SELECT h.network, h.stream, h.tip, h.first_heard, h.one, h.other
    FROM heard AS h LEFT JOIN taken_back AS t ON t.network = h.network AND t.stream = h.stream AND t.tip = h.tip
    WHERE t.tip IS NULL OR h.one <> 'update' OR h.other <> 'update'),
newest AS (
    SELECT network, stream, max(first_heard) AS first_heard
    FROM standing
    GROUP BY network, stream)
SELECT s.network, s.stream, s.tip, s.first_heard,
       split(CASE WHEN s.one = s.other THEN s.one ELSE concat(s.one, ',', s.other) END, ',') AS sources,
       count(*) OVER (PARTITION BY s.network, s.stream) AS tips
FROM standing AS s JOIN newest AS n ON n.network = s.network AND n.stream = s.stream
WHERE s.first_heard >= n.first_heard - INTERVAL '10' SECOND
