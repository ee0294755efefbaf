"""How a router has signatures judged."""

from __future__ import annotations

from collections.abc import Callable

from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import Judgement, Policy, check

Verify = Callable[[Message], Judgement]


def verifier(policy: Policy) -> Verify:
    """The usual `verify` of a Router: signatures judged under a network's policy."""

    def verify(message: Message) -> Judgement:
        return check(message, policy)

    return verify
