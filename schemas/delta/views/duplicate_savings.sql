-- Duplicates that each peer sent, and duplicates that IDONTWANT saved. A duplicate is a copy of a message after its
-- first copy from any peer. after_idontwant counts the duplicates that the peer sent after Kiln's node had sent it an
-- IDONTWANT for the message; without_idontwant counts all others. saved counts the IDONTWANTs for messages of which the
-- peer sent no copy, though it might have sent none anyway.
-- Grain: a peer that sent copies, or to which Kiln's node sent an IDONTWANT.
WITH told AS (
    SELECT remote_peer, message_id, min(observed_at) AS told_at
    FROM (SELECT remote_peer, unnest(message_ids) AS message_id, observed_at FROM controls
          WHERE kind = 'IDONTWANT' AND direction = 'OUT') AS ids
    GROUP BY remote_peer, message_id),
by_copy AS (
    SELECT c.remote_peer, count(*) AS copies, count(*) FILTER (WHERE c.observed_at > f.first_at) AS duplicates,
           count(*) FILTER (WHERE c.observed_at > f.first_at AND c.observed_at >= t.told_at) AS after_idontwant,
           count(DISTINCT t.message_id) AS came_anyway
    FROM copies AS c
         JOIN (SELECT network, message_id, min(observed_at) AS first_at FROM copies GROUP BY network, message_id) AS f
           ON f.network = c.network AND f.message_id = c.message_id
         LEFT JOIN told AS t ON t.remote_peer = c.remote_peer AND t.message_id = c.message_id
    GROUP BY c.remote_peer),
by_peer AS (SELECT remote_peer, count(*) AS idontwants FROM told GROUP BY remote_peer)
SELECT coalesce(c.remote_peer, p.remote_peer) AS remote_peer, coalesce(c.copies, 0) AS copies,
       coalesce(c.duplicates, 0) AS duplicates, coalesce(c.after_idontwant, 0) AS after_idontwant,
       coalesce(c.duplicates - c.after_idontwant, 0) AS without_idontwant, coalesce(p.idontwants, 0) AS idontwants,
       coalesce(p.idontwants, 0) - coalesce(c.came_anyway, 0) AS saved
FROM by_copy AS c FULL JOIN by_peer AS p ON p.remote_peer = c.remote_peer
