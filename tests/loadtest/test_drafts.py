"""The benchmark of drafts: its pages' text layers, its requests, and how it tells two answers apart."""

import argparse
import json
from collections import Counter
from importlib import import_module
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pypdfium2
import pytest
import seeds
from bench import drafts, drafts_documents, drafts_exact, drafts_pages, drafts_report
from bench.drafts_exact import Case, Difference, chi_square, difference
from bench.replay_set import Page, ReplaySet, Request, write
from engine.engine_fakes import make_request

from tessera.engine.drafts.drafter import Drafting
from tessera.engine.drafts.text import TextDraft
from tessera.engine.process import messages
from tessera.engine.sequence import Sequence
from tessera.models.registry import read_config
from tessera.prompt import grammar
from tessera.prompt.sampling import SamplingParameters
from tessera.prompt.tokenizer import Tokenizer
from tessera_client import Answer


def read(path: Path, number: int) -> list[tuple[str, str]]:
    """Of each of a page's blocks of text what it says, and what PDFium finds in its box."""
    import pages

    page, sheet = pages.sample(drafts_pages.FIRST + number, "heldout"), pypdfium2.PdfDocument(path)[number]
    text, (width, height) = sheet.get_textpage(), sheet.get_size()
    found = []
    for block in (each for each in page.blocks if each.kind not in ("table", "equation", "image")):
        left, top, right, bottom = (side * drafts_pages.POINTS for side in block.box)
        found.append((block.answer, text.get_text_bounded(left, height - bottom, right, height - top)))
    assert (round(width / drafts_pages.POINTS), round(height / drafts_pages.POINTS)) == page.picture.shape[::-1]
    return found


def test_the_pages_are_the_same_bytes_and_their_text_stands_where_it_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "pages.pdf"
    first = drafts_pages.write(path, 5)
    plain = [pair for number in range(4) for pair in read(path, number)]
    assert len(plain) > 20 and [pair for pair in plain if pair[0].split() != pair[1].split()] == []
    # PDFium writes ligatures as letters, and a hyphen that divides a word as a control character.
    harder = [pair for pair in read(path, 4) if pair[0].split() != pair[1].split()]
    assert len(harder) > 5 and any("\x02" in text for _, text in harder)
    assert not {*"".join(text for _, text in harder)} & {*drafts_pages.LIGATURES.values()}
    assert drafts_pages.write(path, 5) == first
    with pytest.raises(SystemExit, match="is not the set of pages"):
        drafts_pages.check(path)


def test_a_perfect_draft_of_a_crop_is_its_answer(tmp_path: Path) -> None:
    requests = tuple(
        Request(kind, 3, None, {"seed": seed, **more})
        for seed, (kind, more) in enumerate([("[layout]", {}), ("table", {"draft": "x"}), ("equation", {})])
    )
    write(tmp_path / "set.zip", drafts_documents.CLIENT, [(Page("page 1", requests), None)])
    path = drafts_documents.perfect(ReplaySet(tmp_path / "set.zip"), ["a", "b", "c"], tmp_path / "perfect.zip")
    found = ReplaySet(path).pages[0].requests
    assert [each.more for each in found] == [{"seed": 0}, {"seed": 1, "draft": "b"}, {"seed": 2, "draft": "c"}]
    assert [(each.kind, each.tokens) for each in found] == [("[layout]", 3), ("table", 3), ("equation", 3)]


def test_a_word_is_divided_at_a_lines_end_and_loses_no_letter() -> None:
    def line(*texts: str) -> list[drafts_pages.Word]:
        return [drafts_pages.Word(text, 10.0 * at, 10.0 * at + 9, 5.0) for at, text in enumerate(texts)]

    found = [line("a", "suffices"), line("office", "of"), line("it")]
    drafts_pages.harden(found, Random(1))
    assert "".join(word.text for row in found for word in row).replace("-", "").replace(" ", "") == "asuﬃcesoﬃceofit"
    assert any(word.text.endswith("-") for row in found for word in row)


def test_every_schema_is_one_that_the_server_takes() -> None:
    for schema in (drafts.SCHEMA, *(drafts_exact.random_schema(Random(seed)) for seed in range(60))):
        grammar.check(SamplingParameters.parse({"json_schema": schema}))
    kinds = Counter("enum" if "enum" in each else each["type"] for each in drafts.SCHEMA["properties"].values())
    assert kinds == {"enum": 4, "boolean": 2, "integer": 3, "string": 3}
    assert list(drafts.SCHEMA["properties"]) == drafts.SCHEMA["required"]
    assert {each["maxLength"] for each in drafts.SCHEMA["properties"].values() if "maxLength" in each} == {24}


def answer(*tokens: tuple[int, float], text: str = "") -> Answer:
    entries = [{"token_id": token, "logprob": logprob, "top": []} for token, logprob in tokens]
    return Answer(text, "stop", None, None, entries, "", 0.0)


def test_where_two_answers_part() -> None:
    one = answer((1, -0.1), (2, -0.7))
    assert difference(one, answer((1, -0.125), (2, -0.7))) == Difference(None, 0.0, pytest.approx(0.025))
    assert difference(one, answer((1, -0.1), (3, -0.72))) == Difference(1, pytest.approx(0.02), 0.0)
    assert difference(one, answer((1, -0.1))) == Difference(1, inf, 0.0)
    assert difference(one, answer((1, -0.1), (2, -0.7), text="cut elsewhere")).place == 2


def test_only_greedy_near_ties_and_sampled_answers_count_apart_and_only_on_a_gpu(printed: Any) -> None:
    cases = [Case("a", [], {}), Case("a", [], {}), Case("b", [], {"temperature": 1.0}), Case("b", [], {})]
    found = [Difference(3, 0.04, 0.0), Difference(3, 0.06, 0.5), Difference(3, 0.01, 0.0), Difference(None, 0.0, 0.1)]
    differ, every = {"a": 1}, {"a": 2, "b": 1}
    for gpus, settings, expected in (("0", [], differ), ("", [], every), ("0", ["deterministic=on"], every)):
        options = argparse.Namespace(gpus=gpus, settings=settings, label="", below=None)
        drafts_exact.report("rooms", options, cases, found, found[:1], {})
        (line,) = printed().values()
        assert (line["value"], line["differ"]) == (sum(expected.values()), expected)
        assert (line["near_ties"], line["sampled"]) == ((1, 1) if expected == differ else (0, 0))
        assert line["most_logprobs_differ"] == 0.5 and line["undrafted"]["near_ties"] == (expected == differ)
        assert line["metric"] == "trial." * (not gpus) + "drafts.differences.rooms"


def test_samples_of_one_distribution_are_likely_and_of_two_are_not() -> None:
    dice = Random(3)
    one, other = (["yes" if dice.random() < 0.6 else "no" for _ in range(500)] for _ in range(2))
    assert chi_square(one, other) > 0.05
    assert chi_square(one, ["yes" if dice.random() < 0.4 else "no" for _ in range(500)]) < 1e-6
    # The textbook's case: 10 and 20 of 30 each, chi-square 6.667 with one degree of freedom.
    assert chi_square(["a"] * 10 + ["b"] * 20, ["a"] * 20 + ["b"] * 10) == pytest.approx(0.00982, abs=1e-4)
    assert chi_square(["a"] * 9, ["a"] * 9) == 1.0 and chi_square(["a", "b"], ["c", "d"]) == 1.0


def test_a_block_of_a_layout_has_as_many_tokens_as_with_mineru25(tmp_path: Path) -> None:
    words = Tokenizer.from_folder(drafts_documents.mineru(tmp_path))
    block = "<|box_start|>045 123 456 789<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>\n"
    assert len(words.encode(block)) == 22 and {*words.encode("0123456789")} <= words.numbers
    assert words.vocab_size < read_config(tmp_path / drafts.MINERU.name).text.vocab_size


def test_what_a_draft_has_of_an_answer() -> None:
    assert drafts_documents.marks([5, 6, 7, 8], [5, 6, 9, 8]) == "==x="
    assert drafts_documents.marks([], [5, 6]) == "--"
    assert drafts_documents.summed(["==x=", "--"]) == {"count": 6, "share": 0.5, "between": 2.0}


def test_the_stage_gives_the_recorded_answer_and_drafters_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "start_process", messages.start_process)
    monkeypatch.setenv("PYTHONPATH", "")
    stage = import_module("bench.drafts_stage")
    monkeypatch.setattr(stage, "ANSWERS", [[], [(token, None) for token in (5, 6, 9, 8, 4)]])
    drafting = Drafting([TextDraft([5, 6, 7, 8, 4])], 10)
    sequence = Sequence(make_request([1, 2, 3], max_tokens=6, seed=1), drafting=drafting)
    # Whatever the model chooses, behind a wrong token of the draft too; its own counts behind the answer's end.
    for drafted, known in ((0, 1), (3, 3), (0, 4), (1, 6)):
        sequence.expect(drafting.propose(sequence.outputs, drafted).tokens if drafted else ())
        assert len(sequence.draft) == drafted
        sequence.in_flight, sequence.computed = 0, sequence.length
        stage.taken(sequence, [(3, None)] * (drafted + 1))
        assert len(sequence.outputs) == known
    assert sequence.outputs == [5, 6, 9, 8, 4, 3] and sequence.finished
    assert (drafting.proposed, drafting.accepted) == (4, 2)
    cut = stage.Cut(TextDraft([5, 6, 7, 8, 4]), stage.ANSWERS[1])
    assert [cut.propose(outputs, 15) for outputs in ([], [5, 6], [5, 6, 9])] == [[5, 6], [], [8, 4]]


def test_grammar_forces_all_but_the_choices() -> None:
    tokenizer = Tokenizer.from_folder(drafts.DOCUMENTS)
    room = {name: each["enum"][0] if "enum" in each else True if each["type"] == "boolean" else
            7 if each["type"] == "integer" else "x" for name, each in drafts.SCHEMA["properties"].items()}  # fmt: skip
    found = drafts.forced(drafts.DOCUMENTS, [answer(*((each, 0.0) for each in tokenizer.encode(json.dumps(room))))])
    assert found["tokens"] == len(tokenizer.encode(json.dumps(room)))
    assert found["tokens"] * 0.8 < found["forced"] < found["tokens"]


def test_the_page_names_what_was_not_measured() -> None:
    about = {"unit": "ratio", "machine": "m", "commit": "c", "date": "d"}
    table = seeds.tables({"drafts.json.c10.ratio": {"value": 2.5, "ci95": 0.1, **about}}, drafts_report.GOALS)
    assert "`drafts.json.c10.ratio*`" not in table and "`drafts.json.c10.ratio` 2.5 ± 0.1 ratio<br>" in table
    assert "`drafts.json.c64.ratio*` not measured yet" in table
