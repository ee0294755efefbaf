"""BEP 50 (draft of 2016-10-02): publish/subscribe over the BitTorrent DHT.

`overlay` implements the protocol as a state machine, and `socket` runs it on UDP. `store` saves state for a restart.
`carrier` and `tap` connect the overlay to the bridge. No other implementation of BEP 50 is known, so interoperability
is tested only for the protocols that it extends (BEP 5, BEP 44).

A topic is one mutable item. Its *target* is the 20-byte key of the item in the DHT (BEP 44).

The draft's requirements and the code that meets them (tests/unit/bridge/test_bep50_requirements.py tests each)::

    R1   K is one; home bucket and sibling hold 8; a split resizes the sibling      table.RoutingTable
    R2   every message has `c`, the topic's target                                  transactions, overlay.receive
    R3   get_peers and announce_peer are prohibited                                 topic._answer
    R4   get and put only for the item of the topic                                 topic._answer_get, _answer_put
    R5   an update is valid by BEP 44, and newer than the stored item               topic._answer_put, limits
    R6   a valid put is forwarded to all nodes in the table ...                     topic._accept
    R7   ... as if we had originated it                                             topic._push
    R8   gets have `seq`; a value that is not newer is left out                     topic._get, _answer_get
    R9   bootstrap by get_peers in the plain DHT                                    topic._join, plain.look_up
    R10  and announce there, with the port we listen on                             topic._announce, plain.announce
    R11  each topic is a node: own table, own transactions                          topic.TopicNode
    R12  topics of one address share the node id                                    core.OverlayCore
    R13  the latest value is stored at all times                                    core.ItemUpdate, store.TopicStore
    R14  a publisher is a subscriber                                                overlay.publish
    R15  a new message goes to all in the table, and to no other node               topic.publish

How this implementation reads what the draft leaves open:

1. `c` is a top-level key, in errors too, as in the draft's source. Its published examples lack two lines.
2. A put needs a token from its receiver. A get renews a contact's token, at intervals and after a refused put (203).
3. A response names up to 8 nodes (`OverlaySettings.nodes`), although K is one; any number is accepted.
4. An update is not sent back to its sender, nor to a node that is known to have it.
5. An item from a get response is pushed on like an item from a put, so a lost put does not stop an item.
6. A put of the stored item is acknowledged, not refused: nodes flood items, so it is the most common put. A put of
   another value with the same sequence number is refused (302) and reported (`ItemConflict`).
7. A prohibited query is answered with error 204, and a query with another target or topic with error 203.
8. ping and find_node are permitted.
9. A bucket resized to one retains the contact that has been good for longest.
10. An address from get_peers is probed before it enters the table; so is every node that other nodes name.
11. Queries of the plain DHT to our port are answered, because announcing our port there causes them. Items of other
    nodes are not stored.
12. IPv4 and IPv6 have separate routing tables, and share the item (BEP 32). Rates are limited by address. A node leaves
    without a message.
13. A publisher also puts its item into the plain DHT, at once and then hourly. Every node looks up the item there
    whenever it looks up peers.
"""

from kiln.bridge.bep50.core import (
    Datagram,
    Event,
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
    "Datagram",
    "Event",
    "ItemConflict",
    "ItemPublishError",
    "ItemTransfer",
    "ItemUpdate",
    "Overlay",
    "OverlayEffects",
    "OverlaySettings",
    "PlainStoreResult",
]
