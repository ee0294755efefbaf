"""What the checks do quickly for values of the usual form is what they say of each value when they take it apart."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kiln.pipelines.quality.expectations import RowValidator
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.wire.cid import USUAL_TEXT, cid_bytes, cid_text, compute_cid

CID = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"

usual = st.from_regex(USUAL_TEXT, fullmatch=True)
near = st.builds(
    lambda text, at, letter: text[: at % len(text)] + letter + text[at % len(text) + 1 :],
    usual,
    st.integers(0, 60),
    st.sampled_from(["", "1", "A", "z", "zz", "é", "\n"]),
)
texts = st.lists(usual | near | st.text(max_size=70), min_size=1, max_size=20, unique=True)


@pytest.fixture(scope="module")
def validator() -> RowValidator:
    return RowValidator()


def check(name: str, **arguments: object) -> SuiteCheck:
    return SuiteCheck("updates", name, arguments, "error", "", "", "")


@settings(max_examples=40)
@given(texts)
@example([f"{CID}\n", f"\n{CID}", CID.upper(), CID, CID[:-1], f"{CID}a", ""])
def test_cids_in_arrows_memory_are_judged_as_one_by_one(validator: RowValidator, values: list[str]) -> None:
    table = pa.table({"tip": pa.array(values), "at": range(len(values))})
    asked = [check("expect_column_values_to_be_cids", column="tip")]
    quick, each = (
        validator.validate_rows(asked, frame, ["at"])[0]
        for frame in (table.to_pandas(types_mapper=pd.ArrowDtype), table.to_pandas())
    )
    assert (quick.failed, list(quick.keys), list(quick.values)) == (each.failed, list(each.keys), list(each.values))


@given(st.binary(max_size=40), st.booleans())
def test_a_block_is_judged_by_its_hash_however_its_cid_is_written(
    validator: RowValidator, block: bytes, right: bool
) -> None:
    cid = cid_text(compute_cid(block if right else block + b"x"))
    written = [cid, f"f{cid_bytes(cid).hex()}", cid.upper(), cid[:-1]]
    frame = pd.DataFrame({"cid": written, "block": [block] * 4, "at": range(4)})
    pair = check("expect_column_pair_cid_to_be_of_block", column_A="cid", column_B="block")
    (seen,) = validator.validate_rows([pair], frame, ["at"])
    assert [one["at"] for one in seen.keys] == ([3] if right else [0, 1, 2, 3])


def test_great_expectations_comes_without_pyspark_and_leaves_pyspark_to_others() -> None:
    script = (
        "import sys, kiln.pipelines.quality.expectations; print(sys.modules.keys() & {'pyspark', 'rfc3987_syntax'}); "
        "import pyspark"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
