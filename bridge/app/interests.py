"""Rules for the topics that the node joins, and the file of the interests.

On a Ceramic network, the node joins the network's topic and the topics that the interests cover (CIP-120,
Specification). On another network, it joins the topics that the settings name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kiln.conf.process.files import replace_file
from kiln.conf.settings.addresses import check_topic
from kiln.conf.settings.model import Settings
from kiln.schemas.wire.signing_policy import match_topic
from kiln.schemas.wire.topics import Interest, Separator, format_topic, network_topics, parse_interest, parse_topic


@dataclass(frozen=True)
class CeramicTopics:
    """Topics of a Ceramic network: its own topic, and the topics of the separators that an interest covers."""

    network: str
    interests: tuple[Interest, ...]

    @property
    def shared(self) -> frozenset[str]:
        """Topics that every bridge of the network joins, while the bridges share out the other topics."""
        return frozenset(network_topics(self.network))

    def select(self, seen: Iterable[str]) -> set[str]:
        """Select the topics to join.

        Args:
            seen: Topics that peers subscribe to. A topic is selected if an interest covers its separator, or if it is
                the network's topic in the form of CIP-120.
        """
        name, cip120_name = network_topics(self.network)
        seen = set(seen)
        selected = {name, *({cip120_name} & seen)}
        selected |= {
            format_topic(self.network, Separator(interest.key, interest.value))
            for interest in self.interests
            if interest.key is not None and interest.value is not None
        }
        for name in seen:
            topic = parse_topic(name)
            if topic is None or topic.network != self.network or topic.separator is None:
                continue
            # peers treat another spelling of the name as another topic
            if (
                any(interest.covers(topic.separator) for interest in self.interests)
                and format_topic(self.network, topic.separator) == name
            ):
                selected.add(name)
        return selected


@dataclass(frozen=True)
class GossipTopics:
    """Topics of another network: names, and patterns in which `*` stands for any characters."""

    patterns: tuple[str, ...]

    @property
    def shared(self) -> frozenset[str]:
        """Topics that every bridge of the network joins: none."""
        return frozenset()

    def select(self, seen: Iterable[str]) -> set[str]:
        """Select the topics to join: the named topics, and the topics in `seen` that match a pattern."""
        names = {pattern for pattern in self.patterns if "*" not in pattern}
        globs = [pattern for pattern in self.patterns if "*" in pattern]
        return names | {name for name in seen if any(match_topic(name, glob) for glob in globs)}


TopicRule = CeramicTopics | GossipTopics


def build_topic_rule(network: str, texts: Iterable[str], *, is_ceramic: bool) -> TopicRule:
    """Build the rule by which topics are joined.

    Args:
        network: Name of the network.
        texts: On a Ceramic network, interests in separators; on another network, topics and patterns of topics.
        is_ceramic: True for a Ceramic network.
    """
    return CeramicTopics(network, tuple(map(parse_interest, texts))) if is_ceramic else GossipTopics(tuple(texts))


class InterestsFile:
    """File in the state folder with the interests, as a JSON list of texts. It may change while the bridge runs.

    On a Ceramic network, a text is an interest in separators, on another network a topic or a pattern of topics.
    Without the file, the interests of the settings apply. If the file cannot be read, the previous interests stay in
    force, and `error` gives the reason.
    """

    def __init__(self, path: Path, default: Sequence[str], *, is_ceramic: bool = True) -> None:
        self._path = path
        self._default = tuple(default)
        self._check: Callable[[str], object] = parse_interest if is_ceramic else check_topic
        self._stamp: tuple[int, int] | None = None
        self._texts = self._default
        self.error: str | None = None

    def read(self) -> tuple[str, ...]:
        """Return the current interests. The file is read only if it has changed."""
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
            ValueError: A text is not an interest, or not a topic or pattern.
        """
        interests = list(dict.fromkeys(texts))
        for text in interests:
            self._check(text)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, json.dumps(interests).encode() + b"\n")

    def _load(self) -> None:
        try:
            texts = json.loads(self._path.read_bytes())
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError("not a list of strings")
            for text in texts:
                self._check(text)
        except (OSError, ValueError) as error:
            self.error = (
                f"cannot read the interests in {self._path} ({error}). The previous interests stay in force. Fix the "
                "file, or replace it with the command kiln interests."
            )
            if isinstance(error, OSError):
                self._stamp = None  # retry an unchanged file too, since the cause may be a lack of descriptors
        else:
            self._texts, self.error = tuple(texts), None


def open_interests(settings: Settings) -> InterestsFile:
    """Open the interests file of a bridge. Each thread needs its own object, because the object caches the content."""
    default = settings.bridge.interests if settings.is_ceramic else settings.network.topics
    return InterestsFile(settings.bridge_dir / "interests.json", default, is_ceramic=settings.is_ceramic)
