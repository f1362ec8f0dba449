"""The arithmetic of recall on examples computed by hand, the datasets it reads, and `tessera plan`, which uses it."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import PIL.Image
import pytest
from fake_transport import USAGE, FakeTransport, final

import scene
from tessera_client import Client, InvalidRequest, Unavailable
from tessera_command.cli import main
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item, evenly, folder_items, heldout_items
from tessera_evaluation.plan import Measurement, loss, measure, parse_policy, plot, read_document, recommend

HERE = Path("unused.jpg")
ROOT = Path(__file__).resolve().parents[2]


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
    return recall.Outcome(item, text, None if text is not None else Unavailable("full"), seconds)


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
    # of each class: how many yes and no, balanced accuracy, precision, recall
    assert [*result["classes"]["crack"].values()] == [4, 2, 0.625, 0.75, 0.75]
    assert [*result["classes"]["damp"].values()] == [1, 4, 0.75, 1.0, 1.0]
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


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("file,question\na.jpg,q\n", "lacks the column answer"),
        ("file,question,answer\na.jpg,q,yes\nmissing.jpg,q,no\n", r"labels\.csv:3.*missing\.jpg"),
        ("file,question,answer\na.jpg,,yes\n", "must not be empty"),
        ("file,question,answer\n", "no rows"),
        (None, r"cannot read .*labels\.csv"),
    ],
)
def test_a_folder_at_fault_says_where(tmp_path: Path, rows: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        folder_items(tmp_path if rows is None else labelled(tmp_path, rows))


def test_a_limit_is_even_over_classes_and_answers() -> None:
    items = [Item(HERE, f"q{i}", "yes", "presence", "crack") for i in range(50)]
    items += [Item(HERE, "q", "no", "presence", "crack")] * 5 + [Item(HERE, "q", "no", "presence", "damp")] * 5
    picked = evenly(items, 9)
    assert [(i.cls, i.answer) for i in picked] == [("crack", "yes")] * 3 + [("crack", "no")] * 3 + [("damp", "no")] * 3
    assert [i.question for i in picked[:3]] == ["q0", "q1", "q2"]
    assert evenly(items, None) == items and len(evenly(items, 1000)) == 60


def test_the_heldout_set_is_rendered_by_workers_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "build" / "default_model" / "scene")  # found from anywhere inside the checkout
    seen: list[tuple[int, int]] = []

    def drawn() -> list[Item]:
        return heldout_items(3, tmp_path / "cache", progress=lambda *n: seen.append(n))

    items, written = drawn(), scene.heldout(3)
    assert [item.picture.read_bytes() for item in items] == [
        scene.encode_jpeg(scene.sample(each.scene_seed, "heldout")) for each in written
    ]
    assert [(item.question, item.scored) for item in items] == [
        (each.question, each.cls in scene.HAZARDS) for each in written
    ]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert drawn() == items and len(seen) == 3  # nothing to draw again
    with pytest.raises(InvalidRequest, match="--folder"):
        heldout_items(3, tmp_path, root=tmp_path / "cache")


class Judge(FakeTransport):
    """Right on every question but, under "two-tile", on those about damp; knows no policy "mosaic"."""

    def answer_to(self, request: Any) -> Any:
        policy = json.loads(request.sampling)["tile_policy"]
        if policy["name"] == "mosaic":
            return [InvalidRequest("tile policy name 'mosaic' is unknown")]
        tokens = 512 if policy["name"] == "two-tile" else 3328
        wrong = policy["name"] == "two-tile" and "damp" in request.text
        text = "no" if wrong else request.text.rpartition(" ")[2]
        return [replace(final(text), usage=replace(USAGE, image_tokens=tokens))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ["file,question,answer,class"]
    for index in range(16):
        name, answer = ("damp", "crack")[index % 2], ("yes", "no")[index // 2 % 2]
        rows.append(f"{index % 4}.jpg,{name} {index} {answer},{answer},{name}")
    for index in range(4):
        (tmp_path / f"{index}.jpg").write_bytes(b"jpeg %d" % index)
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    return tmp_path


def measured(policy: str, recall: float, qpm: float, errors: int = 0) -> Measurement:
    return Measurement(policy, questions=100, errors=errors, recall=recall, qpm=qpm, image_tokens=256.0, p50_ms=9.0)


SOME = [
    measured("reference", 0.99, 100.0),
    measured("native", 0.985, 250.0),
    measured("two-tile", 0.98, 400.0),
    measured("reference,max_tiles=1", 0.9, 700.0),
    measured("budget", 1.0, 900.0, errors=1),
]


@pytest.mark.parametrize("text", ["", "native,", "native,max_tiles", "native,=3"])
def test_policies_that_are_none(text: str) -> None:
    given = {"name": "budget", "token_budget": 512, "thumbnail": "never"}
    assert parse_policy("budget,token_budget=512, thumbnail=never") == given and parse_policy("a=3") == {"a": 3}
    with pytest.raises(ValueError, match="KEY=VALUE"):
        parse_policy(text)
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--policy", text])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("max_loss", "policy"), [(0.49, "reference"), (0.5, "native"), (8.9, "two-tile"), (9, SOME[3].policy)]
)
def test_the_fastest_within_the_loss_is_recommended(max_loss: float, policy: str) -> None:
    """The loss counts from the best recall, and a policy with errors is neither the best nor recommended."""
    chosen = recommend(SOME, max_loss)
    assert chosen is not None and chosen.policy == policy
    assert loss(SOME[1], SOME) == pytest.approx(0.5)
    assert recommend(SOME[-1:], 100) is None


def test_measuring_asks_every_question_of_pictures_that_no_cache_knows(folder: Path) -> None:
    fake, items = Judge(), folder_items(folder)
    with Client(transport=fake) as under_test:
        found = [measure(under_test, items, policy, "run", concurrency=2) for policy in ("reference", "two-tile")]
    assert [(each.questions, each.errors, each.image_tokens) for each in found] == [(16, 0, 3328), (16, 0, 512)]
    # damp is right on half of its questions, crack on all: the mean of the classes' balanced accuracies
    assert [(each.recall, each.scored) for each in found] == [(1.0, 16), (0.75, 16)]
    assert all(each.qpm > 0 and each.p50_ms > 0 for each in found)
    sent = [request.images[0] for request, *_ in fake.requests]
    assert len(sent) == 2 * (2 + 16)
    assert Counter(image[:6] for image in sent) == {b"jpeg 0": 10, b"jpeg 1": 10, b"jpeg 2": 8, b"jpeg 3": 8}
    # four pictures a policy whose questions share them, and the two of its warm-up
    assert len(set(sent)) == 2 * (4 + 2)


def test_other_answers_count_by_their_share(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    (tmp_path / "labels.csv").write_text("file,question,answer\na.jpg,say red,red\na.jpg,say blue,green\n")
    with Client(transport=Judge()) as under_test:
        found = measure(under_test, folder_items(tmp_path), "native", "run")
    assert (found.recall, found.scored) == (0.5, 2)


def test_the_command(serve: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    serve(fake=Judge())
    picture, figures = tmp_path / "plan.svg", tmp_path / "plan.json"
    policies = ["--policy", "reference", "--policy", "two-tile,thumbnail=always"]
    arguments = ["plan", str(folder), *policies, "--concurrency", "2"]
    assert main([*arguments, "--max-loss", "0.5", "--machine", "a toy & more", "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert (result["recommended"], result["tile_policy"]) == ("reference", {"name": "reference"})
    assert (result["max_loss"], result["concurrency"], result["machine"]) == (0.5, 2, "a toy & more")
    assert [each["recall"] for each in result["policies"]] == [1.0, 0.75]
    assert re.search(r"two-tile,thumbnail=always +75\.00% +25\.00 ", shown.err)
    # of 19% wrong answers, 16 questions show none once in 20 times; of 0.5%, 600 do
    assert "rests on 16 questions" in shown.err and "19 points; for 0.5 ask 600" in shown.err
    assert """TESSERA_PREPROCESS_TILE_POLICY='{"name": "reference"}'""" in shown.err
    assert "16 questions" in picture.read_text() and "a toy &amp; more" in picture.read_text()

    # The printed figures can be looked at again, without a server, and judged by another loss.
    for each, qpm in zip(result["policies"], (100.0, 400.0), strict=True):
        each["qpm"] = qpm
    figures.write_text(json.dumps(result))
    picture.unlink()
    assert main(["plan", str(figures), "--max-loss", "30", "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    again = json.loads(shown.out)
    assert "beware" not in shown.err
    assert again["tile_policy"] == {"name": "two-tile", "thumbnail": "always"}
    assert (again["policies"], again["machine"], again["max_loss"]) == (result["policies"], "a toy & more", 30)
    assert "two-tile,thumbnail=always (recommended)" in picture.read_text()


def test_a_policy_that_the_server_refuses_is_said_and_not_asked_again(serve: Any, folder: Path, capsys: Any) -> None:
    fake = serve(fake=Judge())
    arguments = ["plan", str(folder), "--concurrency", "2", "--policy", "mosaic"]
    assert main([*arguments, "--policy", "reference"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["recommended"] == "reference"
    assert "mosaic: 16 questions failed: tile policy name 'mosaic' is unknown\n" in shown.err
    assert len(fake.requests) == 2 + 2 + 16
    assert main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["recommended"] is None


@pytest.mark.parametrize("text", ["not json", "[]", '{"policies": [{"policy": 1, "speed": 2}]}', '{"policies": []}'])
def test_figures_that_are_none(tmp_path: Path, text: str, capsys: Any) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"plan\.json"):
        read_document(file)
    assert main(["plan", str(file)]) == 2


def test_the_plot_is_to_scale() -> None:
    picture = ElementTree.fromstring(plot(SOME, 1.0, {"data": "rooms", "concurrency": 4, "url": "here"}))
    name = "{http://www.w3.org/2000/svg}"
    circles = {(float(c.attrib["cx"]), float(c.attrib["cy"])): c.attrib["fill"] for c in picture.iter(f"{name}circle")}
    points = sorted(circles)  # from slow to fast
    assert len(points) == 4  # the one with errors is left out
    across, down = zip(*points, strict=True)
    assert (across[3] - across[0]) / (across[1] - across[0]) == pytest.approx((700 - 100) / (250 - 100), rel=0.01)
    assert (down[3] - down[0]) / (down[1] - down[0]) == pytest.approx((99 - 90) / (99 - 98.5), rel=0.05)
    assert [circles[point] == "white" for point in points] == [True, True, False, True]
    (line,) = picture.iter(f"{name}polyline")
    assert len(line.attrib["points"].split()) == 4
    texts = ["".join(text.itertext()) for text in picture.iter(f"{name}text")]
    assert texts[:2] == ["Tile policies: 100 questions of rooms, 4 at a time", "here"]
    assert "2  two-tile (recommended)" in texts and "98.00%, 400 QPM, 256 image tokens" in texts
    assert {"0", "200", "400", "600", "90", "95", "allowed loss: 1"} <= set(texts)
    with pytest.raises(InvalidRequest, match="nothing to plot"):
        plot(SOME[-1:], 1.0, {})
