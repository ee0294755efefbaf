-- For each peer: number of copies that it relayed, number of messages that it relayed first, and delay of its copies
-- after the first copy of a message. Copies of rejected messages count too.
-- Grain: a network and a peer that sent copies.
WITH timed AS (
    SELECT c.network, c.remote_peer, epoch_us(c.observed_at) - epoch_us(f.first_at) AS behind
    FROM copies AS c
         JOIN (SELECT network, message_id, min(observed_at) AS first_at FROM copies GROUP BY network, message_id) AS f
           ON f.network = c.network AND f.message_id = c.message_id
    WHERE c.remote_peer <> '')
SELECT network, remote_peer, count(*) AS copies, count(*) FILTER (WHERE behind = 0) AS first,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY behind) / 1e6 AS behind_p50_seconds,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY behind) / 1e6 AS behind_p99_seconds
FROM timed
GROUP BY network, remote_peer
