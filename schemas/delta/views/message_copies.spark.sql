-- Number of copies that gossip delivered of each message, and the peer that relayed the message first. Copies of
-- rejected messages count too, and so does a forged copy, which has the id of the message that it imitates.
-- Grain: a message.
-- The first peer is the minimum of texts that begin with the time in 18 digits. Of several peers at the same time it is
-- the first by name.
SELECT network, message_id, count(*) AS copies,
       substring(min(concat(100000000000000000 + unix_micros(observed_at), remote_peer)), 19) AS first_peer,
       min(observed_at) AS first_at,
       (unix_micros(max(observed_at)) - unix_micros(min(observed_at))) / 1e6 AS spread_seconds
FROM copies
GROUP BY network, message_id
