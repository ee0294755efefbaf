-- The newest tips of each stream: of the tips that somebody stands by, the newest, and all that were first heard in
-- the 10 s before it. An author stands by what the author announced last for the stream.
-- Grain: a tip of a stream that is among the stream's newest.
-- Most tips are old. So the tips of last words come first, and of the others only those that are late enough.
WITH last_words AS (
    SELECT network, stream, from_peer, max(observed_at) AS said_at
    FROM updates
    WHERE from_peer IS NOT NULL
    GROUP BY network, stream, from_peer),
stood_by AS (
    SELECT u.network, u.stream, u.tip
    FROM updates AS u
         SEMI JOIN last_words AS l
           ON l.network = u.network AND l.stream = u.stream AND l.from_peer = u.from_peer
          AND l.said_at = u.observed_at
    UNION
    SELECT network, stream, tip
    FROM updates
    WHERE from_peer IS NULL),
certain AS (
    SELECT t.network, t.stream, t.tip, min(t.observed_at) AS first_heard, min(t.source) AS one, max(t.source) AS other
    FROM tips AS t JOIN stood_by AS s ON s.network = t.network AND s.stream = t.stream AND s.tip = t.tip
    GROUP BY t.network, t.stream, t.tip),
bounds AS (
    SELECT network, stream, max(first_heard) - INTERVAL '10' SECOND AS since
    FROM certain
    GROUP BY network, stream),
late AS (
    SELECT DISTINCT t.network, t.stream, t.tip
    FROM tips AS t
         LEFT JOIN bounds AS b ON b.network = t.network AND b.stream = t.stream
         ANTI JOIN certain AS c ON c.network = t.network AND c.stream = t.stream AND c.tip = t.tip
    WHERE b.since IS NULL OR t.observed_at >= b.since),
heard AS (
    SELECT t.network, t.stream, t.tip, min(t.observed_at) AS first_heard, min(t.source) AS one, max(t.source) AS other
    FROM tips AS t JOIN late AS l ON l.network = t.network AND l.stream = t.stream AND l.tip = t.tip
    GROUP BY t.network, t.stream, t.tip),
taken_back AS (
    SELECT u.network, u.stream, u.tip
    FROM updates AS u
         SEMI JOIN (SELECT network, stream, tip FROM heard WHERE one = 'update' AND other = 'update') AS h
           ON h.network = u.network AND h.stream = u.stream AND h.tip = u.tip),
standing AS (
    SELECT network, stream, tip, first_heard, one, other
    FROM certain
    UNION ALL
    SELECT h.network, h.stream, h.tip, h.first_heard, h.one, h.other
    FROM heard AS h
         ANTI JOIN taken_back AS b ON b.network = h.network AND b.stream = h.stream AND b.tip = h.tip),
newest AS (
    SELECT network, stream, max(first_heard) AS first_heard
    FROM standing
    GROUP BY network, stream)
SELECT s.network, s.stream, s.tip, s.first_heard,
       split(CASE WHEN s.one = s.other THEN s.one ELSE concat(s.one, ',', s.other) END, ',') AS sources,
       count(*) OVER (PARTITION BY s.network, s.stream) AS tips
FROM standing AS s JOIN newest AS n ON n.network = s.network AND n.stream = s.stream
WHERE s.first_heard >= n.first_heard - INTERVAL '10' SECOND
