"""Pages that are made from code are what the code says."""

from __future__ import annotations

from scripts.draw_states import TARGET, page


def test_the_states_page_is_fresh() -> None:
    assert TARGET.read_text() == page(), "run python -m scripts.draw_states"
