"""Speed is asked once: the answer is kept, and a way that cannot run loses."""

import json

from tessera.kernels.tuning import MeasuredChoices


def test_the_fastest_way_is_measured_once_and_read_by_the_next(tmp_path):
    path = tmp_path / "cache" / "choices.json"
    times = {"slow": 3.0, "fast": 1.0}
    asked = []

    def clock(way):
        asked.append(way())
        return times[asked[-1]]

    ways = {name: lambda name=name: name for name in times}
    choices = MeasuredChoices(path, clock)
    assert choices.fastest("on this card", ways) == "fast"
    assert choices.fastest("on this card", ways) == "fast"
    assert asked == ["slow", "fast"]
    assert MeasuredChoices(path, clock).fastest("on this card", ways) == "fast"
    assert asked == ["slow", "fast"]
    times["slow"] = 0.5
    assert choices.fastest("on another card", ways) == "slow"
    assert choices.fastest("on this card", ways | {"new": lambda: "slow"}) in ("slow", "new")


def test_of_ways_that_are_about_as_fast_it_is_the_first(tmp_path):
    times = {"kept well": 1.02, "ours": 1.0, "slow": 3.0}
    ways = {name: lambda name=name: name for name in times}
    choices = MeasuredChoices(tmp_path / "choices.json", lambda way: times[way()])
    assert choices.fastest("?", ways) == "ours"
    assert choices.fastest("?", ways, margin=0.03) == "kept well"
    assert choices.fastest("?", ways, margin=0.01) == "ours"


def test_answers_of_another_process_are_kept(tmp_path):
    path = tmp_path / "choices.json"
    ways = {"only": lambda: None}
    ours, theirs = (MeasuredChoices(path, lambda way: 1.0) for _ in range(2))
    ours.fastest("ours", ways)
    theirs.fastest("theirs", ways)
    assert set(json.loads(path.read_text())) == {"ours", "theirs"}


def test_a_way_that_fails_is_not_chosen(tmp_path, caplog):
    def broken():
        raise RuntimeError("not on this card")

    choices = MeasuredChoices(tmp_path / "choices.json", lambda way: (way(), 5.0)[1])
    assert choices.fastest("?", {"broken": broken, "works": lambda: None}) == "works"
    assert "not on this card" in caplog.text


def test_a_file_that_cannot_be_read_or_written_costs_only_time(tmp_path):
    path = tmp_path / "choices.json"
    path.write_text("{nonsense")
    assert MeasuredChoices(path, lambda way: 1.0).fastest("?", {"only": lambda: None}) == "only"
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "choices.json"
    assert MeasuredChoices(nowhere, lambda way: 1.0).fastest("?", {"only": lambda: None}) == "only"
