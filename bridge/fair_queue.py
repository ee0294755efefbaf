"""A fair queue, in which groups of items take turns. Does no I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
Path = tuple[Hashable, ...]


class _Branch(Generic[Item]):
    """An inner node of the tree of paths. The children take turns: the first child is next."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: OrderedDict[Hashable, _Branch[Item] | deque[Item]] = OrderedDict()
        self.count = 0  # number of items below


class FairQueue(Generic[Item]):
    """A queue in which each item has a path, such as (peer, separator). All paths of a queue have the same length.

    At each level of the paths, the keys take turns. In the example, peers take turns, and a peer's turns go to its
    separators in turn. So a peer waits for at most one item of each other peer, however many items the others have.
    Items with the same path keep their order.
    """

    def __init__(self) -> None:
        self._root: Final[_Branch[Item]] = _Branch()

    def __len__(self) -> int:
        return self._root.count

    def count(self, prefix: Path) -> int:
        """Return the number of items whose path begins with a prefix."""
        branch = self._find(prefix)
        if branch is None:
            return 0
        return branch.count if isinstance(branch, _Branch) else len(branch)

    def peek(self, path: Path) -> Item | None:
        """Return the first item with this path, if any."""
        leaf = self._find(path)
        return leaf[0] if isinstance(leaf, deque) else None

    def _find(self, prefix: Path) -> _Branch[Item] | deque[Item] | None:
        branch: _Branch[Item] | deque[Item] | None = self._root
        for key in prefix:
            branch = branch.children.get(key) if isinstance(branch, _Branch) else None
        return branch

    def extend(self, path: Path, items: Iterable[Item]) -> None:
        """Add items with one path, after earlier items with this path. A key that had no items gets the last turn."""
        added = deque(items)
        if not added:
            return
        branch = self._root
        branch.count += len(added)
        for key in path[:-1]:
            child = branch.children.setdefault(key, _Branch())
            assert isinstance(child, _Branch), "all paths of a queue must have the same length"
            branch = child
            branch.count += len(added)
        leaf = branch.children.setdefault(path[-1], deque())
        assert isinstance(leaf, deque), "all paths of a queue must have the same length"
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
        """Remove and return all items with this path, in their order."""
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
