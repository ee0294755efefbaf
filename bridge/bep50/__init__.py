"""BEP 50 (draft of 2016-10-02): publish/subscribe over the BitTorrent DHT.

`overlay` is the protocol, pure; `socket` puts it on UDP; `store` keeps what must outlive a restart; `simulation` runs
many nodes in one process; `carrier` and `tap` are what of the bridge goes over it. No other implementation is known, so
that interoperability is tested, and claimed, for the layer beneath alone (BEP 5, BEP 44).

What the text demands, and where it is met (tests/unit/test_bep50_requirements.py has a test of each number)::

    R1   K is one; home bucket and sibling hold 8; a split resizes the sibling      table.RoutingTable
    R2   every message has `c`, the topic's target                                  transactions, overlay.receive
    R3   get_peers and announce_peer are prohibited                                 topic._answer
    R4   get and put only for the item of the topic                                 topic._answer_get, _answer_put
    R5   an update is valid by BEP 44, and newer than what is stored                topic._answer_put, limits
    R6   a valid put is forwarded to all nodes in the table ...                     topic._accept
    R7   ... as if we had originated it                                             topic._push
    R8   gets have `seq`; a value not newer is left out                             topic._get, _answer_get
    R9   bootstrap by get_peers in the plain DHT                                    topic._join, plain.look_up
    R10  and announce there, with the port we listen on                             topic._announce, plain.announce
    R11  each topic is a node: own table, own transactions                          topic.Topic
    R12  topics of one address share the node id                                    machine.Machine
    R13  the latest value is stored at all times                                    machine.Updated, store.Store
    R14  a publisher is a subscriber                                                overlay.publish
    R15  a new message goes to all in the table, and to nobody else                 topic.publish

What the text leaves open, and how it is read here:

1. `c` is at the top level, also of errors: the text's source has the lines that its printed examples lack.
2. A put needs a token of whom it goes to: each contact's is renewed by a periodic get, and when it is refused (203).
3. An answer names up to 8 nodes (`Settings.nodes`), although K is one; any number is taken.
4. An update is not sent back to where it came from, nor to who is known to have it.
5. What a get brings is pushed on like what a put brings: so losses heal.
6. The same item again is acknowledged, not refused: with flooding it is the commonest put. Another value under the
   same number is refused (302), and told (`ItemConflict`).
7. A prohibited query is answered with error 204, another target or topic with 203.
8. ping and find_node are permitted.
9. Of a bucket resized to one the contact that has been good for longest is kept.
10. An address from get_peers is probed before it is entered; so is every node that others name.
11. Plain queries to our port are answered, since announcing leads to them; nothing of others is stored.
12. IPv6: a table for each family, one item (BEP 32). Rates are limited by address. Nobody says goodbye.
13. A publisher also puts its item into the plain DHT, at first and then hourly; everybody looks it up there as often as
    peers.
"""

from kiln.bridge.bep50.core import (
    ConnectivityChange,
    Datagram,
    Event,
    ItemAcknowledgement,
    ItemConflict,
    ItemTransfer,
    ItemUpdate,
    OverlayEffects,
    OverlaySettings,
    PlainStoreResult,
)
from kiln.bridge.bep50.overlay import Overlay
from kiln.bridge.bep50.topic import ItemPublishError

__all__ = [
    "ConnectivityChange",
    "Datagram",
    "Event",
    "ItemAcknowledgement",
    "ItemConflict",
    "ItemPublishError",
    "ItemTransfer",
    "ItemUpdate",
    "Overlay",
    "OverlayEffects",
    "OverlaySettings",
    "PlainStoreResult",
]
