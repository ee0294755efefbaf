"""What a terminal may have: nothing that a terminal obeys, and nothing that a reader cannot see."""

import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from kiln.schemas.printable import printable, printable_lines


def test_every_control_and_format_character_of_unicode_is_escaped() -> None:
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character) in hidden:
            assert printable(character).isascii(), f"U+{ord(character):04X}"
            assert printable(character).isprintable()


def test_escapes_are_those_of_json() -> None:
    assert printable("\x1b]0;title\x07") == r"\u001b]0;title\u0007"
    assert printable("\x9b2J\x7f") == r"\u009b2J\u007f"
    assert printable("evil\u202etxt.exe") == r"evil\u202etxt.exe"
    assert printable("a\u200bb\u200dc\ufeff") == r"a\u200bb\u200dc\ufeff"
    assert printable("one\r\ntwo\tthree") == r"one\r\ntwo\tthree"
    assert printable("x\U000e0041") == r"x\U000e0041"


def test_letters_of_all_languages_stay() -> None:
    for text in (
        "kiln 0.1.0",
        "Zoë",
        "日本語",
        "עברית",
        "العربية",
        "हिन्दी",
        "한국어",
        "ไทย",
        "👍🏽",
        "❤️",
        "e\u0301",
        "…–×",
    ):
        assert printable(text) == text


def test_the_newlines_of_kiln_stay_in_lines() -> None:
    assert printable_lines("one\n\x1b[2Jtwo\r\n") == "one\n\\u001b[2Jtwo\\r\n"


@given(st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF, exclude_categories=())))
def test_nothing_is_left_to_escape(text: str) -> None:
    once = printable(text)
    assert printable(once) == once
    assert "\n" not in once
    once.encode()


@given(st.text())
def test_text_without_hidden_characters_stays(text: str) -> None:
    if text.isprintable() and printable(text) != text:
        # only letters and marks with no shape of their own, which Python counts as printable
        assert all(unicodedata.category(c) in ("Lo", "Mn", "Cn") for c in text if printable(c) != c)
