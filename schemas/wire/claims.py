"""What a sender claims of an update's separator, and what of that a verified genesis contradicts (docs/design,
decision 4)."""

from __future__ import annotations

from typing import Final, NamedTuple

from kiln.schemas.wire.topics import Separator

CONTRADICTS: Final = "contradicts_genesis"
"""Why a claim is in quarantine."""


class Claims(NamedTuple):
    """The separator of the topic; and the one that the field `model` names, whose key is always "model"."""

    topic: Separator | None
    model: Separator | None

    @property
    def first(self) -> Separator | None:
        """The claim that counts while no genesis is known; None: there is none."""
        return self.topic or self.model

    @property
    def disagree(self) -> bool:
        """Whether one of the two must be false. A field `model` says nothing of a stream of another key."""
        return (
            self.topic is not None
            and self.model is not None
            and self.topic.key == self.model.key
            and self.topic != self.model
        )

    def contradicted(self, verified: Separator) -> Separator | None:
        """The first claim that is false, where the genesis names this separator; None: none is."""
        if self.topic is not None and self.topic != verified:
            return self.topic
        if self.model is not None and self.model != verified and self.model.key == verified.key:
            return self.model
        return None


def contradiction(claimed: Separator, verified: Separator) -> str:
    """What quarantine says of a false claim."""
    return f"claimed {claimed.key}/{claimed.value}; the genesis says {verified.key}/{verified.value}"
