"""The ladder: what each rung is served by and asked, and what becomes of the lines it leaves."""

import itertools
import json
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench import ladder as bench_ladder
from bench import ladder_report, ladder_rungs
from bench.ladder_report import Ladder
from bench.ladder_rungs import FLIGHTS, NAMES, jobs
from bench.ladder_transformers import Turn
from serving import DEFAULT_CHECKPOINT
from tiny_checkpoints import hf_native
from turns import Comparison, ratio

from tessera.launcher.settings import set_up
from tessera.linear.formats.int4 import Int4
from tessera.linear.quantization import scheme_selector
from tessera.prompt.sampling import SamplingParameters

ABOUT = {"machine": "a GPU", "commit": "abc", "date": "2026-11-22", "versions": {"torch": "2.11.0"}}


# ---- what a rung is


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_settings_take_what_a_rung_sets(name: str, tmp_path: Path):
    setup = ladder_rungs.setup(name, tmp_path, (), DEFAULT_CHECKPOINT)
    found = set_up(setup.repository, None, {"TESSERA_DEVICE": "cpu"}, setup.settings)
    values = {effective.name: str(effective.value) for effective in found.effective}
    assert {key: values[key] for key in setup.settings} == setup.settings
    for job in jobs(name).values():
        SamplingParameters.parse(job.sampling)


def test_the_shape_in_4_bits_is_one_that_the_engine_reads(tmp_path: Path):
    config = json.loads((ladder_rungs.int4_shape(tmp_path / "int4") / "config.json").read_text())
    select = scheme_selector(config["quantization_config"])
    assert isinstance(select(["model.layers.0.mlp.down_proj"]), Int4)
    assert not isinstance(select(["lm_head"]), Int4)


def test_every_rung_has_a_pair_for_each_job_and_the_steps_lead_from_the_foot_to_the_top():
    for kind in ("equal", "policy"):
        way = ladder_rungs.steps(kind)
        assert (way[0].below, way[-1].rung) == ("transformers", NAMES[-1])
        assert all(below.rung == above.below for below, above in itertools.pairwise(way))
    measured = {(pair.rung, pair.kind) for pair in ladder_rungs.pairs()}
    assert measured == {(name, kind) for name in NAMES for kind in jobs(name)} | {("prefix_cache", "W6")}
    assert [pair.rung for pair in ladder_rungs.pairs() if pair.ends] == [NAMES[-1]] * 2


def test_rungs_go_down_so_that_each_server_starts_once_but_for_the_loop():
    for together in (2, 3, 5):
        options = Namespace(rungs=(*NAMES, "ends"), jobs=ladder_rungs.KINDS, together=together)
        groups = bench_ladder.groups(options)
        assert [pair for group in groups for pair in group] == ladder_rungs.pairs()[::-1]
        up = [bench_ladder.servers(group) for group in groups]
        assert max(map(len, up)) == together
        started = [name for last, own in itertools.pairwise([[], *up]) for name in own if name not in last]
        own = [name for name in reversed(NAMES) if name not in ("labels", "tile_policy")]  # which are asked of others'
        assert started == [own[0], "transformers", *own[1:], "transformers"]


def test_both_sides_of_a_pair_are_asked_the_same_job_or_the_rung_is_in_the_job():
    differ = {(pair.rung, pair.kind) for pair in ladder_rungs.pairs() if pair.job(pair.rung) != pair.job(pair.below)}
    # A policy, more in flight, labels; and the loop of transformers, which takes its own batch and no policy.
    own = {("tile_policy", "policy"), ("batching", "equal"), ("batching", "policy"), ("labels", "policy")}
    assert differ == own | {(NAMES[-1], "equal"), (NAMES[-1], "policy")}


def test_what_is_wanted_stays_and_the_rest_ends_before_the_next_starts(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    @contextmanager
    def start(_: Any, name: str):
        log.append(f"+{name}")
        yield name
        log.append(f"-{name}")

    monkeypatch.setattr(bench_ladder.Sides, "_start", start)
    sides = bench_ladder.Sides(Namespace())
    for wanted in ("cb", "cb", "ba"):
        sides.bring_up(wanted)
    sides.close()
    assert " ".join(log) == "+c +b -c +a -a -b"


@pytest.mark.server
def test_a_pair_on_a_cpu(tmp_path: Path, emitted: Any):
    results = tmp_path / "ladder.jsonl"
    checkpoint = hf_native(tmp_path / "tiny")
    options = ["--checkpoint", str(checkpoint), "--gpus", "", "--in-flight", "2", "--seconds", "0"]
    wanted = ["--rungs", "tile_policy", "fast_preprocessing", "--jobs", "policy", "--parts", "speed", "report"]
    assert emitted(bench_ladder, *wanted, *options, "--results", str(results)) == {}
    many, one = map(json.loads, results.read_text().splitlines())
    assert (many["rung"], many["below"], many["job"]) == ("tile_policy", "fast_preprocessing", "policy")
    assert (many["in_flight"], one["in_flight"], one["flight"]) == ([2, 2], [1, 1], "one")
    assert many["prompt_tokens"][0] == 213 > many["prompt_tokens"][1]
    assert one["turns"] == 2 and one["ratio"] > 0 < one["ci95"]


# ---- what becomes of the lines


def measured(
    rung: str, below: str, job: str, flight: str, ratio: float, ci95: float = 0.02, **more: Any
) -> dict[str, Any]:
    both = {"in_flight": [4, 4], "req_s": [10.0, 10 * ratio], "p50_ms": [200.0, 200 / ratio], "watts": [600.0, 690.0]}
    return {"rung": rung, "below": below, "job": job, "flight": flight, "ratio": ratio, "ci95": ci95, "turns": 6} | {
        **both, **ABOUT, **more,
    }  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Every pair, each rung 1.1 times the one below, one of them superseded; and recalls."""
    lines = [measured("start", "transformers", "equal", "many", 7.0)]
    for pair in ladder_rungs.pairs():
        for flight in FLIGHTS:
            ratio = 5.0 if pair.ends else 1.0 if pair.rung == "mps" else 1.1
            ci95 = 0.044 if (pair.rung, pair.kind, flight) == ("labels", "policy", "one") else 0.011 * ratio
            lines.append(measured(pair.rung, pair.below, pair.kind, flight, ratio, ci95))
    lines += [
        {"rung": "start", "job": "equal", "recall": 1.0, "questions": 3000, "wrong": [7], **ABOUT},
        {"rung": "int4", "job": "policy", "recall": 0.997, "questions": 3000, "wrong": list(range(9)), **ABOUT},
        {"rung": "transformers", "job": "equal", "recall": 1.0, "questions": 100, "wrong": [], **ABOUT},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_figures_are_the_widest_interval_the_ends_with_their_product_and_recall_s_drop(file: Path):
    found = {metric: (value, notes) for metric, value, _, notes in Ladder.read(file).figures()}
    assert {metric: value for metric, (value, _) in found.items()} == {
        "ladder.widest_ratio_interval_pct": 4.0,
        "ladder.equal_tokens.over_best": 5.0,
        "ladder.equal_tokens.over_one": 5.0,
        "ladder.top_over_best": 5.0,
        "ladder.top_over_one": 5.0,
        "ladder.recall_drop": pytest.approx(100 * 8 / 3000, abs=1e-3),
    }
    widest = found["ladder.widest_ratio_interval_pct"][1]
    assert (widest["rung"], widest["job"], widest["flight"], widest["ratios"]) == ("labels", "policy", "one", 46)
    ends = found["ladder.equal_tokens.over_best"][1]
    assert ends["chained"] == pytest.approx(1.1**10, abs=1e-3)  # eleven steps, of which MPS gives nothing
    assert ends["chained_ci95"] == pytest.approx(1.1**10 * (10 * 0.011**2 + 0.011**2) ** 0.5, rel=0.01)
    assert ends.items() >= ABOUT.items()
    notes = found["ladder.recall_drop"][1]
    assert (notes["rung"], notes["below"], notes["questions"]) == ("int4", "start", 3000)
    assert notes["ci95"] == pytest.approx(0.206, abs=0.001)  # by 9 and 1 of 3002


def test_what_is_not_measured_is_said_and_no_product_passes_over_it(file: Path):
    lines = [line for line in file.read_text().splitlines() if '"rung": "batching"' not in line]
    file.write_text("\n".join(lines))
    ladder = Ladder.read(file)
    assert ladder.chain("equal", "many", "rows_on_gpu") is not None
    assert ladder.chain("equal", "many", "mps") is None
    assert "ladder.widest_ratio_interval_pct" not in [metric for metric, *_ in ladder.figures()]
    tables = ladder_report.tables(ladder)
    assert tables.count("not measured yet") == 2 * 2 + 2 * 2  # the rung's cells in two tables, and both products
    assert (
        "- MPS: ViT and language model on the GPU at once, at equal tokens, one in flight (1.000 ± 0.011): a " in tables
    )


def test_pruning_leaves_the_newest(file: Path):
    before = Ladder.read(file)
    ladder_report.prune(file)
    assert Ladder.read(file) == before
    assert len(file.read_text().splitlines()) == 46 + 3


def test_turns_of_one_commit_and_machine_count_together(tmp_path: Path):
    halves = [1.0, 1.1, 1.2, 1.3], [1.25, 1.05]
    pair, file = ladder_rungs.pairs()[0], tmp_path / "lines.jsonl"
    place = pair.rung, pair.below, pair.kind, "one"
    lines = [measured(*place, 9.0, by_turn=[9.0, 9.1], commit="older")]
    lines += [measured(*place, half[0], by_turn=half, turns=len(half), req_s=[half[0]] * 2) for half in halves]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for _ in range(2):
        found = Ladder.read(file)
        whole = ratio(halves[0] + halves[1], [1.0] * 6)
        assert found.ratio((pair, "one")) == whole
        cell = found.cells[pair, "one"]
        assert (cell["turns"], cell["req_s"]) == (6, pytest.approx([(4 * 1.0 + 2 * 1.25) / 6] * 2))
        ladder_report.prune(file)
    assert len(file.read_text().splitlines()) == 2


def test_a_server_that_does_not_work_as_its_rung_says_is_refused():
    bench_ladder.check("start", {"embeddings_on_cpu": 30, "graph_steps": 0.0})
    bench_ladder.check("int4", {"embeddings_on_cpu": 0, "graph_steps": 0.9})
    with pytest.raises(RuntimeError, match="did not work as its rung says: 0 requests' rows came over the CPU"):
        bench_ladder.check("start", {"embeddings_on_cpu": 0, "graph_steps": 0.0})
    with pytest.raises(RuntimeError, match=r"0.5 of its steps ran as CUDA graphs"):
        bench_ladder.check("graph_vit", {"embeddings_on_cpu": 30, "graph_steps": 0.5})


def test_prompts_of_other_lengths_are_refused_at_equal_tokens():
    pair = ladder_rungs.pairs()[0]
    compared = Comparison(lambda _: None, lambda _: None, bench_ladder.WORTH["many"])
    compared.turns += [(Turn(1.0, 1.0, 1852, 1, None), Turn(2.0, 0.5, 316, 4, None))] * 2
    with pytest.raises(RuntimeError, match=r"should be equal, and have \[1852, 316\] tokens"):
        bench_ladder.line(pair, "many", compared)


def test_the_page_holds_what_was_recorded():
    ladder = Ladder.read(ladder_report.RESULTS)
    assert not ladder_report.update(ladder, check=True), "run: python loadtest/bench ladder --parts report"
