"""Which topics the node is on: the topic of the network, and the topics of the interests (CIP-120, Specification)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from kiln.schemas.wire.topics import Interest, Separator, parse_interest, parse_topic, topic_name


def network_topics(network: str) -> tuple[str, str]:
    """Return the network's topic as nodes name it, and as CIP-120 writes it."""
    name = topic_name(network, None)
    return name, f"{name}/"


def wanted_topics(network: str, interests: Iterable[Interest], seen: Iterable[str]) -> set[str]:
    """The topics to be on. `seen`: names that peers are on; of these, the separator topics that an interest covers, and
    the topic of the network in the spelling of CIP-120."""
    followed = list(interests)
    usual, written = network_topics(network)
    seen = set(seen)
    wanted = {usual, *({written} & seen)}
    wanted |= {
        topic_name(network, Separator(each.key, each.value))
        for each in followed
        if each.key is not None and each.value is not None
    }
    for name in seen:
        topic = parse_topic(name)
        if topic is None or topic.network != network or topic.separator is None:
            continue
        # a name of another form of the same topic would be a topic of its own
        if any(each.covers(topic.separator) for each in followed) and topic_name(network, topic.separator) == name:
            wanted.add(name)
    return wanted


class InterestsFile:
    """Interests that may change while the bridge runs: a JSON list of texts in the state folder.

    Where there is no file, or one that cannot be read, those of the settings count; `error` says what is wrong with it.
    """

    def __init__(self, path: Path, default: Sequence[str]) -> None:
        self._path = path
        self._default = tuple(default)
        self._stamp: tuple[int, int] | None = None
        self._texts = self._default
        self.error: str | None = None

    def read(self) -> tuple[str, ...]:
        """Read the current interests; cheap if the file has not changed."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._texts, self.error = None, self._default, None
            return self._texts
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            self._stamp = stamp
            self._load()
        return self._texts

    def write(self, texts: Iterable[str]) -> None:
        """Replaces them. TopicError: one is no interest."""
        kept = list(dict.fromkeys(texts))
        for text in kept:
            parse_interest(text)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(kept) + "\n")
        fresh.replace(self._path)

    def _load(self) -> None:
        try:
            texts = json.loads(self._path.read_text())
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError("not a list of texts")
            for text in texts:
                parse_interest(text)
        except (OSError, ValueError) as error:
            self.error = f"{self._path}: {error}; what was followed before still is"
            if isinstance(error, OSError):
                self._stamp = None  # read again, though nobody changes the file: no descriptor was free, say
        else:
            self._texts, self.error = tuple(texts), None
