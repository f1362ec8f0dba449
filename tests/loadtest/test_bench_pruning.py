"""The bench of equal groups counts them, and says what a model loses without them."""

from pathlib import Path
from typing import Any

from bench import pruning, replay_set
from bench.replay_set import Page, Request
from PIL import Image

CLIENT = replay_set.Client(
    "2.0.7",
    "You are a helpful assistant.",
    {"[layout]": {"prompt": "Layout:", "sampling": {}}, "[default]": {"prompt": "Text:", "sampling": {}}},
    (112, 224),
    28,
    50,
)


def test_shares_are_of_all_groups(tmp_path: Path, emitted: Any) -> None:
    """A white page of 4 x 8 groups and its crop of 4 x 2."""
    requests = Request("[layout]", 7), Request("[default]", 3, (0, 0, 1000, 250))
    replay_set.write(tmp_path / "set.zip", CLIENT, [(Page("a.pdf 1", requests), Image.new("RGB", (112, 224), "white"))])
    found = emitted(pruning, str(tmp_path / "set.zip"))
    for step, groups in (("layout", 32), ("crops", 8)):
        for kind in ("png", "jpeg90"):
            line = found[f"pages.pruned.{step}.{kind}"]
            assert line["value"] == round(1 - 1 / groups, 4)
            assert line["patches_a_page"] == {"whole": 4 * groups, "pruned": 4}
            tokens = line["prompt_tokens_a_page"]
            assert tokens["whole"] - tokens["pruned"] == groups - 1


def test_points_are_of_the_same_questions(emitted: Any, stood_in: Any, monkeypatch: Any) -> None:
    """One of a stand-in is worth nothing, however it is asked."""
    (setup,) = [stood_in(pruning)]
    found = emitted(pruning, "--pages", "1")
    assert len(setup) == 1 and setup[0].checkpoint == pruning.DOCUMENTS
    assert set(found) == {f"pages.pruned.{name}_lost.{kind}" for name in ("cer", "layout_f1") for kind in pruning.FILES}
    for line in found.values():
        assert line["value"] == 0 and line["whole"] == line["pruned"] and line["answers"] > 5
