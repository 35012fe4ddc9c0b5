import re

from hypothesis import given
from hypothesis import strategies as st

from launcher.formatting import bytes_text, count_text, duration_text, harmless, loss_text


def test_numbers_read_as_people_say_them() -> None:
    assert [count_text(count) for count in (12_345, 999_600, 175e9)] == ["12,345", "1.00 M", "175 B"]
    assert count_text(1.7976931348623157e308).endswith(" T"), "the largest number that a row can hold"
    assert [bytes_text(size) for size in (999, 1500, 54e9)] == ["999 bytes", "1.50 kB", "54.0 GB"]
    assert [loss_text(loss) for loss in (3.14159, float("nan"), None)] == ["3.1416", "not a number", "–"]
    assert [duration_text(seconds) for seconds in (None, 9.94, 3599.7)] == ["–", "9.9 s", "1 h"]


@given(st.floats(min_value=10, max_value=1e8))
def test_a_duration_is_right_to_its_smaller_unit(seconds: float) -> None:
    sizes = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
    parts = re.findall(r"(\d+) (d|h|min|s)", duration_text(seconds))
    shown = sum(int(number) * sizes[unit] for number, unit in parts)
    smaller = next(below for size, below in ((86_400, 3_600), (3_600, 60), (0, 1)) if seconds >= size)
    assert abs(shown - seconds) <= smaller / 2 + 1e-6


@given(st.text(st.characters(exclude_categories=())))
def test_whatever_others_write_only_colours_reach_the_terminal(text: str) -> None:
    assert harmless("\x1b[31mred \x1b[2J 漢字\r\n") == "\x1b[31mred \\x1b[2J 漢字\\r\n\x1b[0m"
    shown = re.sub(r"\x1b\[[0-9;:]*m", "", harmless(text))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode()
