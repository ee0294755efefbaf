"""Claims of a sender about an update's separator, checked against a verified genesis (docs/design, decision 4)."""

from __future__ import annotations

from typing import Final, NamedTuple

from kiln.schemas.wire.topics import Separator

CONTRADICTS: Final = "contradicts_genesis"
"""Quarantine reason of a false claim."""


CONTRADICTS_TOPIC: Final = "contradicts_topic"
"""Quarantine reason of a BATCH_UPDATE on the topic of another separator."""


class Claims(NamedTuple):
    """The separators that the topic and the field `model` claim. The key of the field's separator is always "model"."""

    topic: Separator | None
    model: Separator | None

    @property
    def first(self) -> Separator | None:
        """The claim that applies while no genesis is known."""
        return self.topic or self.model

    @property
    def disagree(self) -> bool:
        """True if one of the two claims must be false. A field `model` claims nothing about another key."""
        return (
            self.topic is not None
            and self.model is not None
            and self.topic.key == self.model.key
            and self.topic != self.model
        )

    def find_contradicted(self, verified: Separator) -> Separator | None:
        """Return the first claim that this verified separator contradicts, if any."""
        if self.topic is not None and self.topic != verified:
            return self.topic
        if self.model is not None and self.model != verified and self.model.key == verified.key:
            return self.model
        return None


def describe_contradiction(claimed: Separator, verified: Separator) -> str:
    """Describe a false claim for quarantine."""
    return f"claimed {claimed.key}/{claimed.value}; the genesis names {verified.key}/{verified.value}"
