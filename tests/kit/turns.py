"""Which of several bridges leads, as a test says."""

from __future__ import annotations


class Turns:
    """One of several leads: `of(name)` is what the bridge of that name is told."""

    def __init__(self, leader: str | None = None) -> None:
        self.leader = leader
        """None: nobody is known to lead"""

    def of(self, name: str) -> Turn:
        return Turn(self, name)


class Turn:
    """The Leadership of one bridge."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name

    def is_leader(self) -> bool:
        return self._turns.leader == self._name

    def another_bridge_leads(self) -> bool:
        return self._turns.leader not in (None, self._name)

    def describe(self) -> str:
        return f"{self._turns.leader} leads"
