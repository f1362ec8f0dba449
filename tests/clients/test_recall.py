"""The arithmetic of recall on examples computed by hand, and the datasets it reads."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import PIL.Image
import pytest

from tessera_client import InvalidRequest
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item, evenly, folder_items, heldout_items

HERE = Path("unused.jpg")


def outcome(
    cls: str,
    answer: str,
    text: str | None,
    kind: str = "presence",
    size: tuple[int, int] = (640, 480),
    scored: bool = True,
    seconds: float = 0.1,
) -> recall.Outcome:
    item = Item(HERE, "q", answer, kind, cls, *size, scored)
    return recall.Outcome(item, text, "" if text is not None else "Unavailable: full", seconds)


def test_figures_of_a_run_computed_by_hand() -> None:
    big = (1280, 960)
    result = recall.figures(
        [
            # crack: yes 3 of 4 found; no 1 of 2 rejected, one false alarm -> balanced (0.75 + 0.5) / 2
            outcome("crack", "yes", "yes", size=big),
            outcome("crack", "yes", "Yes.", size=(600, 1400)),
            outcome("crack", "yes", "yes, on the wall"),
            outcome("crack", "yes", "no", size=big),
            outcome("crack", "no", " no"),
            outcome("crack", "no", "YES"),
            # damp: yes 1 of 1; no 2 of 4: one answer is neither, one request failed -> balanced (1 + 0.5) / 2
            outcome("damp", "yes", "yes"),
            outcome("damp", "no", "no", size=big),
            outcome("damp", "no", "no"),
            outcome("damp", "no", "a sofa"),
            outcome("damp", "no", None),
            # not a hazard: counts for the kind, not for the classes
            outcome("sofa", "yes", "no", scored=False),
            outcome("socket", "3", "3.", kind="count", size=big),
            outcome("socket", "2", "two", kind="count"),
            outcome("", "a red room", "A red  room", kind="description", seconds=2.0),
            outcome("", "a red room", "a blue room", kind="description", seconds=3.0),
        ],
        seconds=30.0,
    )
    assert result["classes"]["crack"] == {
        "yes": 4,
        "no": 2,
        "balanced_accuracy": 0.625,
        "precision": 0.75,
        "recall": 0.75,
    }
    assert result["classes"]["damp"] == {
        "yes": 1,
        "no": 4,
        "balanced_accuracy": 0.75,
        "precision": 1.0,
        "recall": 1.0,
    }
    assert result["recall.macro"] == pytest.approx((0.625 + 0.75) / 2)
    assert result["recall.min_class"] == 0.625
    assert result["recall.precision"] == pytest.approx(4 / 5)
    assert result["recall.yes"] == pytest.approx(4 / 5)
    assert result["kinds"]["presence"] == {"questions": 12, "accuracy": pytest.approx(7 / 12)}
    assert result["kinds"]["count"] == {"questions": 2, "accuracy": 0.5}
    assert result["kinds"]["description"]["accuracy"] == 0.5
    assert result["kinds"]["description"]["word_f1"] == pytest.approx((1 + 2 / 3) / 2)
    # large: cracks yes, yes, no (wrong), damp no, count -> 4 of 5; presence (2/3 + 1/1) / 2
    assert result["large"]["questions"] == 5
    assert result["large"]["accuracy"] == pytest.approx(4 / 5)
    assert result["large"]["presence"]["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert (result["questions"], result["errors"], result["seconds"], result["qpm"]) == (16, 1, 30.0, 30.0)
    assert result["latency_ms"] == {"p50": 100.0, "p99": 3000.0}


def labelled(folder: Path, rows: str) -> Path:
    for name in ("a.jpg", "b.jpg"):
        PIL.Image.new("RGB", (800, 600)).save(folder / name)
    (folder / "labels.csv").write_text(rows, encoding="utf-8")
    return folder


def test_a_labelled_folder(tmp_path: Path) -> None:
    folder = labelled(
        tmp_path,
        'file,question,answer,class\na.jpg,"Damp, anywhere?",yes,damp\nb.jpg,Colour?,red,\n',
    )
    first, second = folder_items(folder)
    assert first == Item(folder / "a.jpg", "Damp, anywhere?", "yes", "presence", "damp", 800, 600)
    assert (second.kind, second.cls) == ("other", "all")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("file,question\na.jpg,q\n", "lacks the column answer"),
        ("file,question,answer\na.jpg,q,yes\nmissing.jpg,q,no\n", r"labels\.csv:3.*missing\.jpg"),
        ("file,question,answer\na.jpg,,yes\n", "must not be empty"),
        ("file,question,answer\n", "no rows"),
    ],
)
def test_a_folder_at_fault_says_where(tmp_path: Path, rows: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        folder_items(labelled(tmp_path, rows))


def test_no_labels_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"labels\.csv"):
        folder_items(tmp_path)


def test_a_limit_is_even_over_classes_and_answers() -> None:
    items = [Item(HERE, f"q{i}", "yes", "presence", "crack") for i in range(50)]
    items += [Item(HERE, "q", "no", "presence", "crack")] * 5 + [Item(HERE, "q", "no", "presence", "damp")] * 5
    picked = evenly(items, 9)
    assert [(i.cls, i.answer) for i in picked] == [("crack", "yes")] * 3 + [("crack", "no")] * 3 + [("damp", "no")] * 3
    assert [i.question for i in picked[:3]] == ["q0", "q1", "q2"]
    assert evenly(items, None) == items and len(evenly(items, 1000)) == 60


SCENE = """
    from collections import namedtuple
    HAZARDS = ("crack",)
    _Item = namedtuple("_Item", "index scene_seed question answer kind cls width height")
    def heldout(n=4):
        return [_Item(i, 100 + i, f"q{i}", "yes", "presence", "crack" if i % 2 else "sofa", 9, 9) for i in range(n)]
    def sample(seed, split):
        assert split == "heldout"
        return seed
    def encode_jpeg(scene):
        return f"picture {scene}".encode()
"""


def test_the_heldout_set_is_rendered_by_workers_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "build" / "default_model" / "scene"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(SCENE))
    monkeypatch.chdir(package)  # found from anywhere inside the checkout
    for name in [name for name in sys.modules if name.partition(".")[0] == "scene"]:
        monkeypatch.delitem(sys.modules, name)  # the real one, which other tests use
    seen: list[tuple[int, int]] = []

    def drawn() -> list[Item]:
        return heldout_items(3, tmp_path / "cache", progress=lambda *n: seen.append(n))

    items = drawn()
    assert [i.picture.read_bytes() for i in items] == [b"picture 100", b"picture 101", b"picture 102"]
    assert [(i.question, i.scored) for i in items] == [("q0", False), ("q1", True), ("q2", False)]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert drawn() == items and len(seen) == 3  # nothing to draw again


def test_outside_a_checkout_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--folder"):
        heldout_items(3, tmp_path, root=tmp_path)
