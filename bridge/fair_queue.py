"""A queue whose items take turns at each level of a path. No clock, no Kafka, no network."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
Path = tuple[Hashable, ...]


class _Branch(Generic[Item]):
    """A level of the tree: the children take turns, the first one next."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: OrderedDict[Hashable, _Branch[Item] | deque[Item]] = OrderedDict()
        self.count = 0  # number of items below


class FairQueue(Generic[Item]):
    """Items below paths of one length, such as (peer, separator). Items with the same path keep their order.

    At each level, the branches that have items take turns. So if n branches of a level have items, each of them gets at
    least one of any n successive turns of that level, however many items and branches are below the others.
    """

    def __init__(self) -> None:
        self._root: Final[_Branch[Item]] = _Branch()

    def __len__(self) -> int:
        return self._root.count

    def count(self, prefix: Path) -> int:
        """Return the number of items below a prefix of their paths."""
        branch = self._find(prefix)
        if branch is None:
            return 0
        return branch.count if isinstance(branch, _Branch) else len(branch)

    def peek(self, path: Path) -> Item | None:
        """Return the first item of a path."""
        leaf = self._find(path)
        return leaf[0] if isinstance(leaf, deque) else None

    def _find(self, prefix: Path) -> _Branch[Item] | deque[Item] | None:
        branch: _Branch[Item] | deque[Item] | None = self._root
        for key in prefix:
            branch = branch.children.get(key) if isinstance(branch, _Branch) else None
        return branch

    def extend(self, path: Path, items: Iterable[Item]) -> None:
        """Add items after those of the same path. A branch that had no items becomes the last of its level."""
        added = deque(items)
        if not added:
            return
        branch = self._root
        branch.count += len(added)
        for key in path[:-1]:
            child = branch.children.setdefault(key, _Branch())
            assert isinstance(child, _Branch), "the paths of a queue have one length"
            branch = child
            branch.count += len(added)
        leaf = branch.children.setdefault(path[-1], deque())
        assert isinstance(leaf, deque), "the paths of a queue have one length"
        leaf.extend(added)

    def pop(self) -> Item:
        """Remove and return the item whose turn it is.

        Raises:
            IndexError: The queue is empty.
        """
        if not self._root.count:
            raise IndexError("pop from an empty queue")
        branch = self._root
        while True:
            branch.count -= 1
            key, child = next(iter(branch.children.items()))
            if (child.count if isinstance(child, _Branch) else len(child)) == 1:
                del branch.children[key]
            else:
                branch.children.move_to_end(key)
            if isinstance(child, deque):
                return child.popleft()
            branch = child

    def remove(self, path: Path) -> Sequence[Item]:
        """Remove and return all items of a path, in their order."""
        branches = [self._root]
        for key in path[:-1]:
            child = branches[-1].children.get(key)
            if not isinstance(child, _Branch):
                return ()
            branches.append(child)
        leaf = branches[-1].children.pop(path[-1], None)
        if not isinstance(leaf, deque):
            return ()
        for depth in range(len(branches) - 1, -1, -1):
            branches[depth].count -= len(leaf)
            if depth and not branches[depth].count:
                del branches[depth - 1].children[path[depth - 1]]
        return leaf
