-- How many copies of each message gossip delivered, and which peer relayed the message first. Copies of what turned out
-- to be no good message count too, and so does a forged copy, which bears the id of the message that the copy imitates.
-- Grain: a message.
-- The first peer is the least of texts that begin with the time, in 18 digits: of peers at once, the first by name.
SELECT network, message_id, count(*) AS copies,
       substring(min(concat(100000000000000000 + unix_micros(observed_at), remote_peer)), 19) AS first_peer,
       min(observed_at) AS first_at,
       (unix_micros(max(observed_at)) - unix_micros(min(observed_at))) / 1e6 AS spread_seconds
FROM copies
GROUP BY network, message_id
