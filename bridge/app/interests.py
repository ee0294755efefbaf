"""The topics that the node joins: the network's topic, and the topics of the interests (CIP-120, Specification)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from kiln.schemas.wire.topics import Interest, Separator, format_topic, parse_interest, parse_topic


def network_topics(network: str) -> tuple[str, str]:
    """Return the network's topic in the form that nodes use, and in CIP-120's form."""
    name = format_topic(network, None)
    return name, f"{name}/"


def select_topics(network: str, interests: Iterable[Interest], seen: Iterable[str]) -> set[str]:
    """Select the topics to join.

    Args:
        seen: Topics that peers subscribe to. Selected of these are the separator topics that an interest covers, and
            the network's topic in CIP-120's form.
    """
    interests = list(interests)
    name, cip120_name = network_topics(network)
    seen = set(seen)
    selected = {name, *({cip120_name} & seen)}
    selected |= {
        format_topic(network, Separator(each.key, each.value))
        for each in interests
        if each.key is not None and each.value is not None
    }
    for name in seen:
        topic = parse_topic(name)
        if topic is None or topic.network != network or topic.separator is None:
            continue
        # another spelling of the same topic would be a topic of its own
        if any(each.covers(topic.separator) for each in interests) and format_topic(network, topic.separator) == name:
            selected.add(name)
    return selected


class InterestsFile:
    """Interests that may change while the bridge runs: a JSON list of texts in the state folder.

    Without a file, the interests of the settings apply. If a file cannot be read, the last interests stay in force, and
    `error` reports it.
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
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._texts, self.error = None, self._default, None
            return self._texts
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._stamp = stamp
            self._load()
        return self._texts

    def write(self, texts: Iterable[str]) -> None:
        """Replace the interests.

        Raises:
            TopicError: A text is no interest.
        """
        interests = list(dict.fromkeys(texts))
        for text in interests:
            parse_interest(text)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(interests) + "\n")
        new.replace(self._path)

    def _load(self) -> None:
        try:
            texts = json.loads(self._path.read_text())
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError("not a list of strings")
            for text in texts:
                parse_interest(text)
        except (OSError, ValueError) as error:
            self.error = (
                f"cannot read the interests in {self._path} ({error}); the previous ones stay in force. Fix the file, "
                "or write it with kiln interests."
            )
            if isinstance(error, OSError):
                self._stamp = None  # retry an unchanged file too, since the cause may be a lack of descriptors
        else:
            self._texts, self.error = tuple(texts), None
