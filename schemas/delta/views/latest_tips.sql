-- The newest tips of each stream: its newest current tip, and the current tips that are at most 10 s older. A tip is
-- current as long as it is the last tip of the stream that one of its authors announced; a tip from a batch of another
-- node is always current. The age of a tip counts from its first announcement or, if the newest update of the stream
-- returns to an earlier tip, from that update.
-- Grain: a stream and one of its newest tips.
-- The tip of a stream's newest update is current, because its author has announced no other tip since. So only tips
-- that were observed at most 10 s before that tip, or later, can be among the newest. Most streams have no other such
-- tip, so the steps below process few rows.
WITH last_said AS (
    SELECT network, stream, max_by(tip, observed_at) AS tip, max_by(from_peer, observed_at) AS from_peer,
           max(observed_at) AS said_at
    FROM updates
    GROUP BY network, stream),
bounds AS (
    SELECT t.network, t.stream, min(t.observed_at) - INTERVAL '10' SECOND AS since
    FROM tips AS t JOIN last_said AS l ON l.network = t.network AND l.stream = t.stream AND l.tip = t.tip
    GROUP BY t.network, t.stream),
fresh AS (
    SELECT t.network, t.stream, t.tip, min(t.observed_at) AS first_heard, min(t.source) AS one, max(t.source) AS other
    FROM tips AS t LEFT JOIN bounds AS b ON b.network = t.network AND b.stream = t.stream
    WHERE b.since IS NULL OR t.observed_at >= b.since
    GROUP BY t.network, t.stream, t.tip),
older AS (
    SELECT DISTINCT f.network, f.stream, f.tip
    FROM tips AS t JOIN fresh AS f ON f.network = t.network AND f.stream = t.stream AND f.tip = t.tip
    WHERE t.observed_at < f.first_heard),
heard AS (
    SELECT f.network, f.stream, f.tip, f.first_heard, f.one, f.other
    FROM fresh AS f ANTI JOIN older AS o ON o.network = f.network AND o.stream = f.stream AND o.tip = f.tip),
doubtful AS (
    SELECT h.network, h.stream, h.tip
    FROM heard AS h ANTI JOIN last_said AS l ON l.network = h.network AND l.stream = h.stream AND l.tip = h.tip
    WHERE h.one = 'update' AND h.other = 'update'),
said AS (
    SELECT u.network, u.stream, u.tip, u.from_peer, u.observed_at
    FROM updates AS u SEMI JOIN doubtful AS d ON d.network = u.network AND d.stream = u.stream),
stood_by AS (
    SELECT network, stream, tip
    FROM (
        SELECT network, stream, tip, from_peer, observed_at,
               max(observed_at) OVER (PARTITION BY network, stream, from_peer) AS said_at
        FROM said)
    WHERE from_peer IS NULL OR observed_at = said_at),
taken_back AS (
    SELECT d.network, d.stream, d.tip
    FROM doubtful AS d
         SEMI JOIN said AS s ON s.network = d.network AND s.stream = d.stream AND s.tip = d.tip
         ANTI JOIN stood_by AS b ON b.network = d.network AND b.stream = d.stream AND b.tip = d.tip),
standing AS (
    SELECT h.network, h.stream, h.tip, h.first_heard, h.one, h.other
    FROM heard AS h
         ANTI JOIN taken_back AS b ON b.network = h.network AND b.stream = h.stream AND b.tip = h.tip),
left_before AS (
    SELECT s.network, s.stream, s.tip, l.from_peer, l.said_at, s.first_heard
    FROM standing AS s JOIN last_said AS l ON l.network = s.network AND l.stream = s.stream AND l.tip = s.tip
    WHERE s.first_heard < l.said_at),
returns AS (
    SELECT DISTINCT b.network, b.stream, b.tip, b.said_at
    FROM left_before AS b
         JOIN updates AS u ON u.network = b.network AND u.stream = b.stream AND u.from_peer = b.from_peer
    WHERE u.tip <> b.tip AND u.observed_at BETWEEN b.first_heard AND b.said_at),
aged AS (
    SELECT s.network, s.stream, s.tip, s.first_heard, s.one, s.other, coalesce(r.said_at, s.first_heard) AS since
    FROM standing AS s LEFT JOIN returns AS r ON r.network = s.network AND r.stream = s.stream AND r.tip = s.tip),
latest AS (
    SELECT network, stream, tip, first_heard, one, other
    FROM (
        SELECT network, stream, tip, first_heard, one, other, since,
               max(since) OVER (PARTITION BY network, stream) AS newest
        FROM aged)
    WHERE since >= newest - INTERVAL '10' SECOND)
SELECT network, stream, tip, first_heard,
       split(CASE WHEN one = other THEN one ELSE concat(one, ',', other) END, ',') AS sources,
       count(*) OVER (PARTITION BY network, stream) AS tips
FROM latest
