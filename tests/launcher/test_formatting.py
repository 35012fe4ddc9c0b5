from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.formatting import (
    NOTHING,
    bytes_text,
    count_text,
    duration_text,
    harmless,
    loss_text,
    rate_text,
    share_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (12_345, "12,345"),
        (999_499, "999,499"),
        (999_600, "1.00 M"),
        (1_234_567, "1.23 M"),
        (14_067_712, "14.1 M"),
        (999_999_999, "1.00 B"),
        (9.03e9, "9.03 B"),
        (175e9, "175 B"),
        (15e12, "15.0 T"),
        (20_000e12, "20,000 T"),
    ],
)
def test_counts_read_as_people_say_them(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, NOTHING),
        (float("nan"), NOTHING),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (180, "3 min"),
        (3599.7, "1 h"),
        (18_130, "5 h 2 min"),
        (86_399, "1 d"),
        (12 * 86_400 + 3 * 3600 + 700, "12 d 3 h"),
    ],
)
def test_durations_show_their_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(min_value=10, max_value=1e8))
def test_a_duration_is_right_to_its_smaller_unit(seconds: float) -> None:
    sizes = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
    parts = re.findall(r"(\d+) (d|h|min|s)", duration_text(seconds))
    shown = sum(int(number) * sizes[unit] for number, unit in parts)
    largest = next(size for size in sizes.values() if seconds >= size)
    smaller = {86_400: 3_600, 3_600: 60, 60: 1, 1: 1}[largest]
    assert abs(shown - seconds) <= smaller / 2 + 1e-6
    limits = {"h": 24, "min": 60, "s": 60}
    assert all(int(number) < limits.get(unit, 10**9) for number, unit in parts)


def test_sizes_are_decimal() -> None:
    assert [bytes_text(size) for size in (999, 1500, 54e9)] == ["999 bytes", "1.50 kB", "54.0 GB"]


def test_rates_keep_a_decimal_only_where_it_matters() -> None:
    assert [rate_text(rate) for rate in (3.21, 12_345.4, 2_345_678.0, None)] == [
        "3.2 tok/s",
        "12,345 tok/s",
        "2.35 M tok/s",
        NOTHING,
    ]


def test_losses_have_four_decimals_or_say_why_not() -> None:
    losses = (3.14159, float("nan"), float("inf"), None)
    assert [loss_text(loss) for loss in losses] == ["3.1416", "not a number", "infinite", NOTHING]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.4125, "41 %"), (0.0996, "10 %"), (0.0321, "3.2 %"), (0.00071, "0.071 %"), (1.2, "120 %"), (None, NOTHING)],
)
def test_shares_have_two_digits(share: float | None, text: str) -> None:
    assert share_text(share) == text


# --- others' text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss 3.2\tstep 1\n", "loss 3.2\tstep 1\n"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[1;38;2;9;9;9mbold", "\x1b[1;38;2;9;9;9mbold\x1b[0m"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b]52;c;cm0gLXJm\x1b\\", "\\x1b]52;c;cm0gLXJm\\x1b\\"),
        ("\x9b2J\x90q", "\\x9b2J\\x90q"),
        ("good\rbad\x08\x7f\x00", "good\\rbad\\x08\\x7f\\x00"),
        ("\u202etxt.exe\u2066", "\\u202etxt.exe\\u2066"),
        ("half \ud800", "half \\ud800"),
        ("žluťoučký 漢字 مرحبا 🙂", "žluťoučký 漢字 مرحبا 🙂"),
    ],
)
def test_text_of_others_is_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert harmless(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_whatever_others_write_only_colours_reach_the_terminal(text: str) -> None:
    shown = re.sub(r"\x1b\[[0-9;:]*m", "", harmless(text))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode()


def test_the_largest_number_that_a_row_can_hold_is_shown() -> None:
    assert count_text(1.7976931348623157e308).endswith(" T")
