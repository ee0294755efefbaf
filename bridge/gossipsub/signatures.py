"""Signature verification for the router."""

from __future__ import annotations

from collections.abc import Callable

from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import Judgement, Policy, check

Verify = Callable[[Message], Judgement]


def make_verifier(policy: Policy) -> Verify:
    """Make a Router's `verify`: a function that checks signatures under a network's policy."""

    def verify(message: Message) -> Judgement:
        return check(message, policy)

    return verify
