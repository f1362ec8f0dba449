"""The replay asks a page's layout, then its crops, no more at once than it says, and reports what came of it."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import counting
import load
import pytest
from bench import replay as bench_replay
from bench import replay_set
from bench.replay import LOADS, Load
from bench.replay_set import Page, ReplaySet, Request
from closed_loop import Answered, Reply
from gpu_power import Draw
from measuring import Taken
from mineru_vl_utils.vlm_client.base_client import SamplingParams
from mineru_vl_utils.vlm_client.http_client import HttpVlmClient
from PIL import Image

CLIENT = replay_set.Client(
    "2.0.7",
    "You are a helpful assistant.",
    {"[layout]": {"prompt": "Layout:", "sampling": {}}, "[default]": {"prompt": "Text:", "sampling": {"top_k": 1}}},
    (84, 84),
    28,
    50,
)
PAGES = [
    Page(
        name,
        (
            Request("[layout]", 7),
            *(Request("[default]", 2 + crop, (0, 100 * crop, 900, 100 * crop + 90)) for crop in range(crops)),
        ),
    )
    for name, crops in (("a.pdf 1", 5), ("a.pdf 2", 2), ("b.pdf 1", 9))
]


@pytest.fixture
def set_file(tmp_path: Path) -> Path:
    path = tmp_path / "set.zip"
    replay_set.write(
        path, CLIENT, [(page, Image.new("RGB", (120, 150), (40 * k, 9, 9))) for k, page in enumerate(PAGES)]
    )
    return path


def test_every_page_has_its_turn_and_runs_are_whole_rounds() -> None:
    turns = [bench_replay.in_turn(turn, 5) for turn in range(15)]
    assert [sorted(turns[at : at + 5]) for at in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert turns[:5] != turns[5:10]
    assert [bench_replay.pages_of_a_run(each, 200) for each in LOADS.values()] == [205, *[720] * 5]
    assert bench_replay.pages_of_a_run(LOADS["c10"], 3) == counting.requests(10)


def page_answer(ended: float) -> Answered:
    """A layout of 21 tokens and two crops, of 11 each: 0.2 s to the first token, then one every 10 ms."""
    layout = Answered(ended - 1, 0.4, 0.2, 21, 4, (1.0,) * 6)
    crop = Answered(ended, 0.3, 0.2, 11, 2, (2.0,) * 6)
    return Answered(ended, 1.5, None, 43, 8, (), (layout, crop, crop))


def test_the_figures_of_a_run(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", "replay.zip"])
    asked = Load("t", 4, 16, pace=1)
    answers = [page_answer(100 + 0.5 * turn) for turn in range(1, counting.requests(4) + 1)]
    run = counting.count(100.0, answers, 4)
    taken = Taken(run, Draw(700.0, 1500.4, 0.98), {}, counting.steady_part(answers, 4))
    bench_replay.report(asked, taken, "seeds.replay", seed=3)
    found = printed()
    assert {name.removeprefix("seeds.replay."): (line["value"], line["unit"]) for name, line in found.items()} == {
        "pages_s": (2.0, "pages/s"),
        "whole": (2.0, "pages/s"),
        "req_s": (6.0, "req/s"),
        "tok_s": (86.0, "tok/s"),
        "prefill_p50_ms": (200.0, "ms"),
        "decode_p50_ms": (10.0, "ms"),
        "page_p50_s": (1.5, "s"),
        "watts": (700.0, "W"),
        "mhz": (1500, "MHz"),
        "joules": (350.0, "J/page"),
    }
    line = found["seeds.replay.pages_s"]
    assert line["what"].startswith("a replay") and line["command"] == 'make bench NAME=replay ARGS="replay.zip"'
    assert (line["pages"], line["tokens_a_page"], line["requests_a_page"], line["seed"]) == (20, 43.0, 3.0, 3)
    assert line["stages_p50"]["decode_ms"] == 2.0


def test_joules_are_split_by_difference_and_only_of_three_runs() -> None:
    def run(pages_s: float, watts: float) -> Taken:
        answers = [page_answer(100 + turn / pages_s) for turn in range(1, counting.requests(4) + 1)]
        return Taken(counting.count(100.0, answers, 4), Draw(watts, 1500.0, 1.0), {}, [])

    taken = {"saturated": run(10, 700), "layouts": run(40, 680), "crops": run(20, 600)}
    parts = bench_replay.split(taken)
    assert {part: pytest.approx(joules) for part, (joules, _) in parts.items()} == {
        "layout": 17.0,
        "crops": 30.0,
        "decode": 23.0,
    }
    assert all(margin == pytest.approx(0, abs=1e-6) for _, margin in parts.values())  # the ends are evenly spaced
    assert bench_replay.split(taken | {"crops": taken["crops"]._replace(power=None)}) == {}
    assert bench_replay.split({"saturated": taken["saturated"]}) == {}


def test_joules_without_equal_groups_are_of_the_same_turns(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", "replay.zip"])

    def run(watts: float) -> Taken:
        answers = [page_answer(100 + turn / 10) for turn in range(1, counting.requests(4) + 1)]
        return Taken(counting.count(100.0, answers, 4), Draw(watts, 1500.0, 1.0), {}, [])

    turns = {"saturated": [run(600), run(400)], "pruned": [run(450), run(300)], "pruned_crops": [run(500)]}
    bench_replay.report_pruned(turns, "")
    (line,) = printed().values()
    assert (line["metric"], line["value"], line["whole"]) == ("pages.pruned.joules", 37.5, 50.0)
    assert (line["share"], line["share_ci95"], line["turns"], line["at_most"]) == (0.75, 0.0, 2, 48)


ENDING = replace(LOADS["c10"], crops_end=True)


@pytest.mark.parametrize(
    ("load", "pruned"), [(LOADS["c10"], 0), (LOADS["pruned_crops"], 9), (LOADS["pruned"], 10), (ENDING, 0)]
)
def test_what_is_asked_without_equal_groups_and_where_crops_end(
    set_file: Path, tmp_path: Path, load: Load, pruned: int
) -> None:
    asked: list[Any] = []
    tokens: list[int] = []

    def chat(messages: Any, sampling: dict[str, Any]) -> Reply:
        asked.append(sampling.get("tile_policy"))
        tokens.append(sampling["max_tokens"])
        return Reply(None, 1, 1)

    bench_replay.encode(set_file, tmp_path, 2)
    reader = bench_replay.Reader(lambda: nullcontext(chat), set_file, tmp_path, load, 3)
    with reader.prepare(0, 0):
        pages = ReplaySet(set_file)
        for number in range(10):
            reader._ask(pages, chat, 1, number)
    assert len(asked) == 10 and asked.count({"prune": "equal"}) == pruned and (pruned == 10) == (asked[0] is not None)
    assert tokens[0] > 1 and (max(tokens[1:]) == 1) is load.crops_end


NAMES = ("pages_s", "whole", "req_s", "tok_s", "prefill_p50_ms", "decode_p50_ms", "page_p50_s")
FEW = ["--gpus", "", "--processes", "2", "--pages", "2", "--requests", "3", "--least", "3"]


def test_a_replay_of_a_server_that_does_nothing(set_file: Path, emitted: Any, stood_in: Any) -> None:
    stood_in(load)
    found = emitted(bench_replay, str(set_file), *FEW, "--loads", "c10")
    assert set(found) == {f"trial.seeds.replay.c10.{name}" for name in NAMES}
    line = found["trial.seeds.replay.c10.pages_s"]
    assert (line["pages"], line["pages_in_flight"], line["requests_in_flight"], line["streamed"]) == (10, 2, 3, True)
    assert line["value"] > 0


def test_any_server_of_openais_api_is_replayed_and_parts_alone_have_a_token_each(set_file: Path, emitted: Any) -> None:
    found = emitted(bench_replay, str(set_file), *FEW, "--target", "openai", "--ceiling", "--label", "it")
    prefix = "trial.openai.seeds.replay.it"
    assert {f"{prefix}.{name}" for name in NAMES} <= set(found)
    asked = {part: found[f"{prefix}{part}.pages_s"] for part in ("", ".layouts", ".crops")}
    for part in (".layouts", ".crops"):  # of its own pages: each run ends with others
        assert asked[part]["tokens_a_page"] == asked[part]["requests_a_page"], part
        assert f"{prefix}{part}.tok_s" not in found
    assert asked[".layouts"]["requests_a_page"] == 1 < asked[".crops"]["requests_a_page"]
    assert asked[""]["tokens_a_page"] > asked[""]["requests_a_page"] + 7


def test_a_request_is_written_as_minerus_http_client_does() -> None:
    sampling = {"temperature": 0.0, "top_k": 1, "no_repeat_ngram_size": 100, "max_tokens": 9, "ignore_eos": True}
    request = bench_replay.openai_request(CLIENT.messages(PAGES[0].requests[0], b"PNG"), sampling)
    theirs = HttpVlmClient("m", "http://localhost", skip_model_name_checking=True).build_request_body(
        CLIENT.system,
        [b"PNG"],
        "Layout:",
        SamplingParams(temperature=0.0, top_k=1, no_repeat_ngram_size=100),
        "png",
        None,
    )
    assert request["messages"] == theirs["messages"]
    assert request["vllm_xargs"].items() <= theirs["vllm_xargs"].items()
    assert {name: request[name] for name in ("temperature", "top_k")} == {
        name: theirs[name] for name in ("temperature", "top_k")
    }
    assert (request["max_tokens"], request["ignore_eos"]) == (9, True) and "no_repeat_ngram_size" not in request
