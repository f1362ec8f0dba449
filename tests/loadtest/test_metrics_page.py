"""The metrics page as numbers."""

from __future__ import annotations

from metrics_page import counted


def test_values_are_added_over_their_labels_and_what_is_not_there_is_none(tmp_path):
    page = tmp_path / "page"
    page.write_text('# TYPE a counter\na{b="x y"} 40\na{b="z"} 2\n\nseconds 0.5\n')
    values = counted(page.as_uri())
    assert (values["a"], values["seconds"], values["missing"]) == (42, 0.5, 0)
