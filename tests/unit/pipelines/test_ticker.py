"""kiln.pipelines.batch.ticker while the broker refuses."""

from __future__ import annotations

import pytest

from kiln.pipelines.batch.ticker import Ticker


@pytest.mark.parametrize(("interval", "pause"), [(0.1, 0.5), (2.0, 2.0)])
def test_a_broker_that_refuses_is_asked_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, interval: float, pause: float
) -> None:
    events: list[object] = []

    def refuse(ticker: Ticker) -> None:
        events.append("refused")
        if events.count("refused") == 3:
            ticker._stop.set()
        raise TimeoutError("the broker does not know the topic kiln.updates")

    monkeypatch.setattr(Ticker, "_tick_until_stopped", refuse)
    ticker = Ticker({}, "kiln.updates", interval=interval, window=1)
    ticker.quiet_ends = {0: 1}  # until now
    monkeypatch.setattr(ticker._stop, "wait", events.append)
    ticker._run()
    assert events == ["refused", pause] * 3
    assert ticker.quiet_ends is None
    assert ticker.error == (
        "the driver of batch cannot append ticks, so a window ends only when a later update arrives: "
        "the broker does not know the topic kiln.updates"
    )
