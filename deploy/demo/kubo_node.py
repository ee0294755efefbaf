"""Client of the demo network's Kubo node, a process (deploy/demo/kubo_peer.py) with commands on stdin and events on
stdout."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from kiln.deploy.demo.events import EventCounts, Events, event_line
from kiln.deploy.demo.kubo_peer import KuboError, find_library
from kiln.deploy.demo.traffic.messages import TopicData
from kiln.deploy.stack.child_process import bind_to_parent

KUBO: Final = "kubo"

_KUBO_PATIENCE: Final = 40.0  # s until Kubo listens; at its first start, Kubo makes an RSA key
_IN_FLIGHT: Final = 32  # commands that Kubo has not answered
_LINE: Final = 32 << 20  # bytes; a line has all messages that Kubo received since the previous line
_FAREWELL: Final = 2.0  # s for Kubo to end by itself


class KuboProcess:
    """Kubo's process; `running` is true while Kubo listens."""

    def __init__(self, folder: Path, tally: EventCounts, out: Events) -> None:
        self._folder = folder
        self._tally = tally
        self._out = out
        self._process: subprocess.Popen[bytes] | None = None
        self._unanswered: set[int] = set()
        self._commands = 0
        self._answered = trio.Event()
        self._started = trio.Event()  # set when Kubo listens or has ended
        self.peer = ""
        self.addresses: list[str] = []
        self.running = False

    def start(self) -> None:
        """Start the process, and return at once.

        Raises:
            KuboError: Kubo is not installed.
        """
        find_library()
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kiln.deploy.demo.kubo_peer", str(self._folder)]
        commands, self._to = os.pipe()
        self._from, events = os.pipe()
        try:
            with (self._folder / "stderr.log").open("wb") as log:
                # not in a thread as trio would, because the process dies with the thread that starts it
                self._process = subprocess.Popen(
                    bind_to_parent(command),
                    stdin=commands,
                    stdout=events,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C must not reach Kubo, which this process ends
                )
        finally:
            os.close(commands)
            os.close(events)
        self._stdin = trio.lowlevel.FdStream(self._to)
        self._stdout = trio.lowlevel.FdStream(self._from)

    async def listen(self) -> None:
        """Read Kubo's events until the process ends."""
        pending = bytearray()
        try:
            async for some in self._stdout:
                pending += some
                *lines, rest = pending.split(b"\n") if b"\n" in some else [pending]
                pending = bytearray(rest)
                if len(pending) > _LINE:
                    raise KuboError(f"Kubo wrote a line of more than {_LINE:,} bytes")
                for line in lines:
                    self._handle_event(json.loads(line))
        except (OSError, ValueError, KuboError) as error:
            self._tally.error(f"cannot read the output of Kubo: {error}")
            if self._process is not None:
                self._process.kill()
        self._tally.error(f"Kubo has ended{self._read_last_line()}; the demo network continues without Kubo")
        self.running = False
        self._started.set()
        self._answered.set()

    async def await_ready(self) -> bool:
        """Wait until Kubo listens, and return false if it does not start."""
        with trio.move_on_after(_KUBO_PATIENCE):
            await self._started.wait()
            return self.running
        self._tally.error(f"Kubo did not listen within {_KUBO_PATIENCE:g} s{self._read_last_line()}")
        return False

    async def join(self, names: tuple[str, ...]) -> None:
        """Subscribe Kubo to topics, and wait until it has confirmed each."""
        for name in names:
            await self._send({"cmd": "subscribe", "topic": name})
        while self._unanswered and self.running:
            await self._answer()

    async def publish(self, message: TopicData) -> None:
        data = base64.b64encode(message.data).decode()
        await self._send({"cmd": "publish", "topic": message.topic, "data": data})

    async def _send(self, command: Mapping[str, object]) -> None:
        while len(self._unanswered) >= _IN_FLIGHT and self.running:
            await self._answer()
        if not self.running:
            return
        self._commands += 1
        self._unanswered.add(self._commands)
        try:
            await self._stdin.send_all(event_line({**command, "id": self._commands}))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.running = False

    async def _answer(self) -> None:
        self._answered = trio.Event()
        await self._answered.wait()

    def _handle_event(self, event: dict[str, object]) -> None:
        match event:
            case {"event": "messages", "items": list(items)}:
                for item in items:
                    self._record_item(item)
            case {"event": "ready", "peer": str(peer), "addrs": list(addresses)}:
                self.peer, self.addresses = peer, [str(address) for address in addresses]
                self.running = True
                self._started.set()
            case {"event": "published", "sent": int(sent), "failed": int(failed)}:
                self._tally.published[KUBO] += sent
                self._tally.failed += failed
            case {"event": "fetched"}:
                self._tally.fetched[KUBO] += 1
            case {"event": "error", "text": str(text)}:
                self._tally.error(f"Kubo: {text}")
        number = event.get("id")
        if isinstance(number, int):
            self._unanswered.discard(number)
            self._answered.set()

    def _record_item(self, item: Mapping[str, str]) -> None:
        data = base64.b64decode(item["data"])
        cid = self._tally.count_received(KUBO, data)
        if cid is not None:
            self._out.batch(
                {
                    "event": "batch",
                    "node": KUBO,
                    "topic": item["topic"],
                    "from": item["from"],
                    "cid": cid,
                    "data": item["data"],
                }
            )

    def _read_last_line(self) -> str:
        log = self._folder / "stderr.log"
        with suppress(OSError):
            lines = log.read_text(errors="replace").split("\n")
            words = " ".join(line.strip() for line in lines[-6:] if line.strip())
            if words:
                return f": {words[-500:]} ({log})"
        return f" (nothing is in {log})"

    async def stop(self) -> None:
        """Stop the process: close its stdin, and send SIGKILL if it does not end."""
        process = self._process
        if process is None:
            return
        await self._stdin.aclose()
        with trio.move_on_after(_FAREWELL):
            while process.poll() is None:
                await trio.sleep(0.02)
        if process.poll() is None:
            process.kill()
        process.wait()
        await self._stdout.aclose()
