from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo.node.versions import version, within

numbers = st.lists(st.integers(0, 999), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("found", "ranges", "holds"),
    [
        ("2.19.4", (">=2.19,<2.20",), True),
        ("2.21.5", (">=2.19,<2.20",), False),
        ("2.21.5", (">=2.18,<2.19", "==2.21.5"), True),
        ("535.161.08", (">=535",), True),
        ("2.9", (">=2.18",), False),
    ],
)
def test_ranges_compare_numbers_and_not_text(found: str, ranges: tuple[str, ...], holds: bool) -> None:
    assert within(found, ranges) is holds


@given(numbers, numbers)
def test_of_two_versions_one_is_at_least_the_other(one: list[int], other: list[int]) -> None:
    first, second = (".".join(map(str, numbers)) for numbers in (one, other))
    assert within(first, (f">={second}",)) or within(second, (f">={first}",))
    assert within(first, (f">{second}",)) == (not within(first, (f"<={second}",)))


@pytest.mark.parametrize("text", ["", "latest", "v"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no version"):
        version(text)
