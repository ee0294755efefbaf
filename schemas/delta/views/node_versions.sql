-- Software versions of each node, from its newest KEEPALIVE. ver or ipfs_ver is null if the node is too old to send
-- it.
-- Grain: an author of KEEPALIVEs on a network.
SELECT network, from_peer, ver, ipfs_ver, observed_at AS heard_at
FROM messages
WHERE type = 'KEEPALIVE' AND from_peer IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY network, from_peer ORDER BY observed_at DESC, message_id) = 1
