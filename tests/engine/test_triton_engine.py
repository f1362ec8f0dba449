"""The engine on the GPU's path: our attention kernels, steps planned ahead, decode steps from static buffers.

Without a GPU the kernels run in triton's interpreter and a graph's replay runs its steps one by one.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_fakes import ByteTokenizer, Guess, TextEngine, draft, make_request, run, tiny_model, tokens_of
from penalties_reference import plain_answer

from tessera.checkpoint.config import ExpertsConfig
from tessera.engine.execution.model_runner import ModelRunner
from tessera.engine.execution.step_graphs import DecodeGraphs, PromptGraphs, graph_sizes, prompt_sizes
from tessera.errors import InvalidRequest
from tessera.settings.stages import EngineConfig

pytest.importorskip("triton", reason="the kernels need triton")

from tessera.attention import triton_backend
from tessera.kernels import reference
from tessera.kernels.graphs import GraphPool

BLOCK = 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = tiny_model(device=DEVICE, hidden_size=64, head_dim=16, num_hidden_layers=2)
ROWS = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(4))


def make_engine(graphs=(), prompt_graphs=(), async_launch=True, model=MODEL, eos=(), **settings):
    defaults = dict(block_size=BLOCK, max_batched_tokens=256, max_sequences=4, attention="triton", graph_batch_size=0)
    config = EngineConfig(**(defaults | settings))
    runner = ModelRunner.of_model(model, config, 128)
    runner.async_launch = async_launch
    runner.capture_graphs(list(graphs), list(prompt_graphs), 128 // BLOCK)
    return TextEngine(runner, ByteTokenizer(), config, 128, eos)


def requests(count=4, **sampling):
    """Prompts that begin alike, every second with one of two pictures."""
    made = []
    for number in range(count):
        picture, ids = number // 2 % 2, [7, 8, 9] * 8 + [number + 20] * (1 + 3 * number)
        wishes = dict(max_tokens=3 + number, ignore_eos=True) | sampling
        request = make_request(ids, f"{number}", [(3, 20, picture)] * (number % 2 == 0), **wishes)
        made.append(replace(request, embeddings=ROWS[picture]) if number % 2 == 0 else request)
    return made


def answers(engine, made):
    for request in made:
        engine.submit(request)
    events = run(engine)
    assert engine.scheduler.blocks.used == 0
    return [tokens_of(events, request.request_id) for request in made]


@pytest.fixture(scope="module", params=["auto", "fp8"])
def expected(request):
    """How the cache stores, and each request alone on the readable backend with such a one."""
    settings = dict(attention="sdpa", prefix_cache="off", async_launch=False, kv_cache_dtype=request.param)
    return request.param, [answers(make_engine(**settings), [each])[0] for each in requests()]


WAYS = {  # four decode beside each other, then three: one of the static buffer's is a dummy
    "graphs": dict(graphs=(1, 2, 4), prompt_graphs=(16, 48, 128)),
    "graphs for few": dict(graphs=(1, 2), async_launch=False),
    "prompt graphs alone": dict(prompt_graphs=(16, 48), async_launch=False, max_batched_tokens=40),
    "one order": dict(graphs=(1, 2, 4), prompt_graphs=(16, 48, 128), attention="fixed_triton"),
    "uncached pieces": dict(max_batched_tokens=23, prefix_cache="off"),
}


@pytest.fixture
def ran(monkeypatch):
    """How often each kind of graph ran."""
    ran = Counter()

    def count(graphs, name):
        run = getattr(graphs, name)

        def counting(self, *given):
            ran[name] += 1
            return run(self, *given)

        monkeypatch.setattr(graphs, name, counting)

    put, put_prompts = DecodeGraphs.put, PromptGraphs.put

    def verified(self, packed):
        ran["verified"] += len(packed.ids) > len(packed.table.row)
        return put(self, packed)

    def after_others(self, *given):  # whatever the step before left must not count
        self._x.fill_(torch.nan)
        self._hidden.fill_(torch.nan)
        return put_prompts(self, *given)

    replay = GraphPool.replay

    def replayed(self, size):
        ran[self._what] += 1
        return replay(self, size)

    monkeypatch.setattr(GraphPool, "replay", replayed)
    monkeypatch.setattr(DecodeGraphs, "put", verified)
    monkeypatch.setattr(PromptGraphs, "put", after_others)
    for name in ("greedy", "hidden", "penalized"):
        count(DecodeGraphs, name)
    count(PromptGraphs, "run")
    return ran


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens(way, expected, ran, monkeypatch):
    stored, wanted = expected
    if DEVICE == "cpu" and stored == "fp8":  # the interpreter's cast to e4m3 loses carries
        monkeypatch.setattr(triton_backend, "rotate_and_store", reference.rotate_and_store)
    engine = make_engine(kv_cache_dtype=stored, **WAYS[way])
    assert answers(engine, requests()) == wanted
    assert (engine.metrics.graph_steps > 0) == bool({"graphs", "prompt_graphs"} & WAYS[way].keys())
    assert (ran["run"] > 0) == ("prompt_graphs" in WAYS[way])
    assert bool(ran["greedy"]) == ("graphs" in WAYS[way]) and not ran["hidden"]  # greedy steps run whole graphs alone


def every_second(wanted, wrong):
    """Beside sequences that nothing is drafted for."""
    return lambda request: [Guess(wanted[int(request.request_id)], wrong)] * (int(request.request_id) % 2 == 0)


@pytest.mark.parametrize("expected", ["auto"], indirect=True)
@pytest.mark.parametrize(("way", "wrong"), [("graphs", 3), ("uncached pieces", 0)])
def test_same_tokens_of_drafts(way, wrong, expected, ran):
    _, wanted = expected
    engine = make_engine(drafts=3, **WAYS[way])
    draft(engine, every_second(wanted, wrong))
    assert answers(engine, requests()) == wanted
    assert engine.metrics.drafted_tokens > engine.metrics.accepted_tokens * bool(wrong)
    assert (ran["run"] > 1) == ("prompt_graphs" in WAYS[way]) and not ran["verified"]  # none is that large
    if "prompt_graphs" in WAYS[way]:  # those that may choose more have more rows in their last layer
        held = {rows: pool.sizes for rows, pool in engine._runner._prompt_graphs._graphs.items()}
        assert held == {16: [16, 48, 128], 8: [16, 48, 128], 4: [16, 48, 128]}
        used = [ran[f"prompt graphs of {rows} tokens to choose"] > 0 for rows in (4, 8, 16)]
        assert used == [True, True, False]


@pytest.mark.parametrize("expected", ["auto"], indirect=True)
def test_same_tokens_where_a_step_chooses_the_most(expected, ran):
    _, wanted = expected
    engine = make_engine(drafts=3, prompt_graphs=(16,))
    draft(engine, lambda request: [Guess(wanted[int(request.request_id)])])
    assert answers(engine, requests()) == wanted
    assert ran["prompt graphs of 16 tokens to choose"] > 0


def test_graphs_of_more_tokens_to_choose_than_a_step_has_are_not_recorded():
    engine = make_engine(drafts=3, max_sequences=20, prompt_graphs=(16, 48))
    held = {rows: pool.sizes for rows, pool in engine._runner._prompt_graphs._graphs.items()}
    assert held == {20: [16, 48], 40: [48], 80: [48]}


PENALIZED = dict(repetition_penalty=0.7, frequency_penalty=0.2, presence_penalty=-0.3, no_repeat_ngram_size=2)
SAMPLED = {
    "log probabilities": dict(logprobs=1),
    "draws under penalties": dict(temperature=1.5, seed=7, **PENALIZED),
}


VERIFIED = SAMPLED | {"greedy": {}, "greedy under penalties": PENALIZED}


@pytest.mark.parametrize("asked", VERIFIED)
def test_drafts_are_verified_in_decode_graphs(asked, ran):
    """Of more columns than products that fetch early have rows, beside decode steps in the same graphs."""
    sampling = dict(max_tokens=9, **VERIFIED[asked])
    plain = answers(make_engine(attention="sdpa", async_launch=False), requests(**sampling))
    engine = make_engine(graphs=(20,), drafts=3, max_sequences=10)
    draft(engine, every_second(plain, 3))
    assert answers(engine, requests(**sampling)) == plain
    assert engine.metrics.drafted_tokens > engine.metrics.accepted_tokens > 0
    assert 0 < ran["verified"] < ran["hidden" if asked != "greedy" else "greedy"]


@pytest.mark.parametrize("asked", SAMPLED)
def test_a_step_with_anything_but_greedy_choice_runs_its_layers_as_a_graph(asked, ran):
    sampling = dict(max_tokens=5, **SAMPLED[asked])
    plain = answers(make_engine(attention="sdpa", async_launch=False), requests(2, **sampling))
    engine = make_engine(graphs=(1, 2, 4))
    assert answers(engine, requests(2, **sampling)) == plain
    assert ran["hidden"] == engine.metrics.graph_steps > 0 and not ran["greedy"]


def test_same_tokens_after_preemption(ran):
    """And under penalties on tokens that the host does not know yet: of all but one, and before and after the first
    that may be a stop token."""
    block = 2 * BLOCK * 2 * 16 * 4
    asked = [PENALIZED, {}, PENALIZED | dict(min_tokens=4, stop_token_ids=[5]), PENALIZED]
    made = [requests(max_tokens=9, **sampling)[number] for number, sampling in enumerate(asked)]
    runner = make_engine(attention="sdpa", async_launch=False, prefix_cache="off")._runner
    expected = [plain_answer(runner, request) for request in made]
    engine = make_engine(graphs=(1, 2, 4), prompt_graphs=(16, 48, 128), kv_cache_bytes=16 * block, prefix_cache="off")
    assert answers(engine, made) == expected
    assert engine.metrics.preemptions > 0 and all(ran[each] for each in ("run", "hidden", "penalized"))


def test_rows_that_fill_up_a_graph_are_nobodys(ran):
    """Answers end one after the other; the last line is the first that there is."""
    made = requests(max_tokens=9, **PENALIZED | dict(repetition_penalty=0.1))
    made = [replace(each, sampling=replace(each.sampling, max_tokens=2 + 3 * n)) for n, each in enumerate(made)]
    runner = make_engine(attention="sdpa", async_launch=False, prefix_cache="off")._runner
    expected = [plain_answer(runner, request) for request in made]
    assert answers(make_engine(graphs=(4,), prompt_graphs=(16, 48, 128)), made) == expected
    assert ran["penalized"] > ran["hidden"] > 0, "after prompts too"


def test_sizes_of_graphs():
    assert prompt_sizes(40, 1) == [40] and prompt_sizes(100, 1) == [64, 100] and prompt_sizes(8192, 1)[-1] == 8192
    assert (
        prompt_sizes(8192, 6_525_288_448)[-1] == 2605
    )  # of 7B; a small model's steps are worth a graph whatever their size
    assert all(b <= 1.125 * (a + 1) for a, b in pairwise(prompt_sizes(8192, 1)) if a >= 640)

    assert graph_sizes(5) == [1, 2, 3, 4, 5]
    assert all(graph_sizes(size)[-1] == size for size in (256, 300))
    assert all(b <= 1.51 * a or b <= 4 for a, b in pairwise(graph_sizes(500)))


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 30,  # some prompts are longer, some answers grow longer
    "short_factor": [1.0 + 0.1 * i for i in range(24)],
    "long_factor": [1.5 + 0.4 * i for i in range(24)],
}
PHI3 = dict(architecture="Phi3ForCausalLM", head_dim=48, attention_bias=False, rope_scaling=LONGROPE)


def test_another_body_in_kernels_and_graphs():
    model = tiny_model(device=DEVICE, hidden_size=64, num_hidden_layers=2, **PHI3)
    plain = dict(attention="sdpa", prefix_cache="off", async_launch=False, model=model)
    expected = [answers(make_engine(**plain), [request])[0] for request in requests()]
    engine = make_engine(graphs=(1, 2, 4), prompt_graphs=(48, 128), model=model)
    assert answers(engine, requests()) == expected and engine.metrics.graph_steps > 0


def test_experts_in_kernels_and_graphs(monkeypatch):
    """Of which one layer has none; by the kernels and by their twins."""
    from tessera.kernels import fast
    from tessera.models.text import qwen3_moe

    experts = ExpertsConfig(4, 2, 32, True, 1, mlp_only_layers=(0,))
    body = dict(architecture="Qwen3MoeForCausalLM", hidden_size=64, head_dim=16, num_hidden_layers=2, experts=experts)
    model = tiny_model(device=DEVICE, **body)
    plain = dict(attention="sdpa", prefix_cache="off", async_launch=False, model=model)
    expected = [answers(make_engine(**plain), [request])[0] for request in requests(2)]
    monkeypatch.setattr(qwen3_moe, "layer_kernels", lambda device: fast)
    engine = make_engine(graphs=(1, 2), prompt_graphs=(64,), model=model)
    assert answers(engine, requests(2)) == expected and engine.metrics.graph_steps > 0


MROPE = tiny_model(
    device=DEVICE,
    architecture="Qwen3ForCausalLM",
    hidden_size=64,
    head_dim=16,
    num_hidden_layers=2,
    mrope_section=(2, 3, 3),
)


def placed(number, axes=3):
    """A prompt whose 20 rows of a picture stand on a grid, as Qwen2-VL counts them."""
    (request,) = requests(1)
    row = np.arange(20)
    grid = 3 + np.stack([np.zeros(20, int), row // 5, row % 5])[:axes]
    length = len(request.input_ids)
    text = np.arange(length - 23) + 3 + 5 + number
    positions = np.concatenate([np.tile(np.arange(3), (axes, 1)), grid, np.tile(text, (axes, 1))], axis=1)
    return replace(request, request_id=f"p{number}", positions=positions.astype(np.int32), number=1000 + number)


def test_positions_of_three_axes_in_kernels_and_graphs():
    """Beside a request without positions, in steps of both kinds, cached and not."""

    def made():
        return [placed(0), requests(2)[1], placed(1)]

    def engine(**settings):
        return make_engine(model=MROPE, **settings)

    plain = [answers(engine(attention="sdpa", prefix_cache="off", async_launch=False), [each])[0] for each in made()]
    assert plain[0] != plain[2], "positions matter"
    graphs = engine(graphs=(1, 2, 4), prompt_graphs=(80,))
    assert answers(graphs, made()) == plain and graphs.metrics.graph_steps > 0
    assert answers(graphs, made()) == plain and graphs.metrics.cached_tokens > 0
    with pytest.raises(InvalidRequest, match=r"positions must be \[3, "):
        graphs.submit(placed(2, axes=2))


DEEP = tiny_model(
    device=DEVICE,
    architecture="Qwen3VLTextModel",
    hidden_size=64,
    head_dim=16,
    num_hidden_layers=3,
    mrope_section=(3, 3, 2),
    mrope_interleaved=True,
    row_depth=3,
)


def test_rows_of_several_depths_in_kernels_and_graphs(ran):
    """A picture beside text alone: in pieces, in steps of both kinds of graphs, cached and not."""
    rows = torch.randn(20, 3 * 64, generator=torch.Generator().manual_seed(5)) * 300  # as its sums

    def made(rows=rows):
        return [replace(placed(0), embeddings=rows), requests(2)[1], replace(placed(1), embeddings=rows)]

    def engine(**settings):
        return make_engine(model=DEEP, **settings)

    def alone(requests):
        readable = dict(attention="sdpa", prefix_cache="off", async_launch=False)
        return [answers(engine(**readable), [each])[0] for each in requests]

    plain = alone(made())
    for depth in (1, 2):
        without = rows.clone().unflatten(1, (3, 64))
        without[:, depth] = 0
        assert alone(made(without.flatten(1))[:1]) != plain[:1], "each depth matters"
    assert answers(engine(max_batched_tokens=23, prefix_cache="off"), made()) == plain
    graphs = engine(graphs=(1, 2, 4), prompt_graphs=(16, 80))
    assert answers(graphs, made()) == plain and ran["run"] and ran["greedy"] and graphs.metrics.graph_steps > 0
    assert answers(graphs, made()) == plain and graphs.metrics.cached_tokens > 0
    with pytest.raises(InvalidRequest, match=r"embeddings has shape \[20, 64\]; spans ask for \[20, 192\]"):
        graphs.submit(placed(2))
