"""kiln.schemas.wire.genesis: which claim a genesis contradicts (decision 4)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kiln.schemas.wire.genesis import Claims, describe_contradiction
from kiln.schemas.wire.topics import Separator

separators = st.builds(Separator, st.sampled_from(("model", "controller")), st.sampled_from(("ka", "kb", "kc")))
models = st.builds(Separator, st.just("model"), st.sampled_from(("ka", "kb", "kc")))
claims = st.builds(Claims, st.none() | separators, st.none() | models)


@given(claims, separators)
def test_a_false_claim_is_told_and_a_true_one_is_not(said: Claims, verified: Separator) -> None:
    false = said.find_contradicted(verified)
    assert false != verified
    assert (false is None) == (
        said.topic in (None, verified) and (said.model in (None, verified) or verified.key != "model")
    )
    assert false in (None, *said)


@given(claims, separators)
def test_of_claims_that_disagree_one_is_false_whatever_the_genesis_names(said: Claims, verified: Separator) -> None:
    if said.disagree:
        assert said.find_contradicted(verified) is not None
    else:
        assert said.first is None or said.find_contradicted(said.first) is None


def test_what_quarantine_says() -> None:
    said = describe_contradiction(Separator("model", "ka"), Separator("controller", "kb"))
    assert said == "claimed model/ka; the genesis names controller/kb"
