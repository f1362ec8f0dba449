"""What the two reports say that this project repeats, statement by statement, beside our figures: the rows of
docs/seeds.md, which report.py writes with the newest of each figure.

Figures are those of results/metrics.jsonl, by name or by pattern; of names with ``|`` between the first that is there.
The ladder's rungs over the ones below are none of those: they come from results/ladder.jsonl, as :func:`rungs` calls
them.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from figures import rounded

NOT_YET = "not measured yet"


class Claim(NamedTuple):
    """A statement of a report. ``ours``: what we have in its place; ``command``: what gives the figures."""

    theirs: str
    ours: str
    command: str
    metrics: tuple[str, ...]


REPORTS: dict[str, tuple[Claim, ...]] = {
    "Optimization of Multimodal Visual Large Model Inference (58.com: InternVL2-8B, LMDeploy 0.6, RTX 4090)": (
        Claim("more than 98 % of the requests have answers of at most 5 tokens",
            "an open loop of that mix: the most a second with p99 of short answers at most 2 s; p99 at 80 % of it",
            'make bench NAME=load ARGS="--mix $MODEL"', ("open_loop.mix.req_s", "open_loop.mix.p99_ms")),
        Claim("preprocessing by OpenCV in place of Pillow: 23.67 to 12.03 ms a picture",
            "OpenCV's pictures a second over Pillow's (`preprocess`, last in the tree at d3a52728), and served",
            'make bench NAME=ladder ARGS="--parts speed report"',
            ("preprocess.opencv_over_pillow", "ladder: fast_preprocessing *")),
        Claim("ViT as a TensorRT plan: features in about 45 % less time",
            "our kernels: the time of a forward of 32 tiles and of one over transformers'; a plan is offered too",
            "make bench NAME=vision", ("vision.tiles32.over_transformers", "vision.b1.over_transformers")),
        Claim("that, and no copies by the CPU: about 70 ms less a request", "rows stay on the GPU",
            'make bench NAME=ladder ARGS="--parts speed report"', ("ladder: rows_on_gpu *",)),
        Claim("ViT as CUDA graphs, a pool by batch size: about 30 ms less a batch",
            "a decode step and a forward of one tile, with graphs and without; the ladder's rungs of both",
            "make bench NAME=graphs",
            ("ladder: graph_vit *", "ladder: graph_decoder *", "engine.graphs.*.eager_over_graphs", "seeds.timeline")),
        Claim("480x320 in 512 tokens in place of 3,328: twice the throughput",
            "2 tiles over 13, on InternVL3-8B's shape; recall by tiles in [tile_policies.md](tile_policies.md)",
            "make bench NAME=tiles", ("seeds.tiles_13_to_2.*",)),
        Claim("a tile of 448x448 has (448 / 14)^2 x 0.5^2 = 256 tokens",
            "the same 256; a test counts those 3,328 and 512, and our 1,792, for that picture",
            "pytest tests/models/test_tile_policy.py", ()),
        Claim("image tokens are kept out of the prefix cache, so that no answer is wrong",
            "they are cached too, by the picture's content: four questions about each picture, picture or text first",
            'make bench NAME=load ARGS="--workloads W1 W6 W6.text_first $MODEL"',
            ("serve.W1.bf16.req_s", "serve.W6.bf16.req_s", "serve.W6.text_first.bf16.req_s", "ladder: prefix_cache *")),
        Claim("W4A16 by AWQ and GPTQ: little for short answers, more for long ones",
            "long answers in bf16 and in 4 bits, a layer's products over bf16's by rows, and points of recall lost",
            'make bench NAME=load ARGS="--workloads W4b $MODEL --label w4a16" (of a checkpoint in 4 bits)', (*(
                    "serve.W4b.bf16.tok_s", "serve.W4b.w4a16.tok_s", "quant.w4a16.m1", "quant.w4a16.m64"),
                *("quant.recall_drop.awq", "quant.recall_drop.gptq"))),
        Claim("3.05 times the questions a minute in all, recall not degraded (4,524 pictures)",
            "over transformers' loop at batch 1 and at its best batch, at equal tokens too; points of recall lost",
            "make bench NAME=ladder", (*("ladder.top_over_one", "ladder.top_over_best"),
                *("ladder.equal_tokens.over_one", "ladder.equal_tokens.over_best"),
                *("ladder.recall_drop", "ladder.widest_ratio_interval_pct")))),
    "MinerU2.5 in LightLLM (H200, RTX 4090D)": (
        Claim(
            "without TCP_NODELAY a remote ViT's call takes about 20 ms more; with it 30 to 60 req/s of 448x448 (H200)",
            "the remote vision stage with it over without, W5b; W5b on one server",
            'make bench NAME=remote ARGS="--gpus 0"', ("seeds.nodelay.over_delay", "docs.W5b.req_s")),
        Claim("the ViT is a service of its own, its batches apart from what it sends: prefill in batches, less jitter",
            "the vision stage on a server of its own over one server, batches of its own in either; W5b's p99 over p50",
            'make bench NAME=remote ARGS="--gpus 0,1"', ("seeds.separate.*", "docs.W5b.p99_over_p50")),
        Claim("4K: resizing takes 20 ms on a CPU and 3 ms on a GPU",
            "the same step's time on a CPU over a GPU's (the benchmark `preprocess`), and 4K and 8K served either way",
            "make bench NAME=pixels",
            ("preprocess.gpu_4k_resize_ratio", "preprocess.gpu_crossover_pixels", "serve.W8*", "seeds.pixels.W8*")),
        Claim("attention of 1 x 16 x 7956 x 80 in bf16 on a 4090: sgl_kernel 2.711, xFormers 2.791, SDPA 2.906 ms; "
            "FlashAttention-3 is the fastest on H-series", "ours on an H200, and what can be carried there",
            "make bench NAME=attention", ("vision.attention_seed.ms", "vision.attention_seed.*_over_ours")),
        Claim("4090D, 10 in flight, 1,000 pictures: vLLM 1.40 req/s, LightLLM 1.56",
            "documents in two steps with 10 in flight, and the same shape beside vLLM",
            'make bench NAME=replay ARGS="replay.zip $DOCUMENTS"', (*(
                    "seeds.replay.c10.pages_s|docs.replay.c10.pages_s", "seeds.replay.c10.req_s|docs.replay.c10.req_s"),
                "peers.vllm.W5c.c10.bf16.ratio")),
        Claim("prefill's median 1,140 and 640 ms, a token's 5.88 and 5.80 ms",
            "until the first token and for each after it, in the same replay",
            'make bench NAME=replay ARGS="replay.zip $DOCUMENTS"', (
                "seeds.replay.c10.prefill_p50_ms|docs.replay.c10.prefill_p50_ms",
                "seeds.replay.c10.decode_p50_ms|docs.replay.c10.decode_p50_ms"))),
    "Beside them": (
        Claim("", "documents in two steps, 96 pages in flight, and where a page's joules go",
            'make bench NAME=replay ARGS="replay.zip $DOCUMENTS"', (*("seeds.replay.pages_s|docs.replay.pages_s",
                    "seeds.replay.joules|docs.replay.joules"),
                *(f"seeds.replay.{part}_joules" for part in ("layout", "crops", "decode")))),
        Claim("", "ours over other engines, in turns (until then by hand: [peers](peers.md))",
            'make bench NAME=peers ARGS="--engines vllm,sglang,lmdeploy ..."', ("peers.*.ratio",)),
        Claim("",
            "the default model on a CPU over the loop of transformers: distinct pictures, four questions about each, "
            "how many times as fast the first token of a lone picture is",
            "make bench NAME=cpu", ("cpu.ratio_distinct", "cpu.ratio_4_questions", "cpu.ratio_first_token"))),
}  # fmt: skip

Figure = Mapping[str, Any]


def rungs(file: Path) -> dict[str, Figure]:
    """The ladder's newest ratios, as figures."""
    lines = map(json.loads, file.read_text().splitlines())
    return {
        "ladder: {rung} over {below}, {job}, {flight} in flight".format(**line): {
            "value": line["ratio"],
            "unit": "ratio",
            **line,
        }
        for line in lines
        if "ratio" in line
    }


def tables(figures: Mapping[str, Figure], reports: Mapping[str, Sequence[Claim]] = REPORTS) -> str:
    """Markdown: a table for each report."""
    parts = []
    for report, claims in reports.items():
        head = ("statement", "ours") if claims[0].theirs else ("ours",)
        rows = [f"### {report}\n", f"| {' | '.join((*head, 'command', 'figures', 'taken'))} |"]
        rows.append("|---" * (len(head) + 3) + "|")
        for claim in claims:
            found = [line for name in claim.metrics for line in matching(name, figures)]
            taken = dict.fromkeys(f"{each['machine']} ({each['commit']}, {each['date']})" for _, each in found if each)
            cells = [*([claim.theirs] if claim.theirs else []), claim.ours, f"`{claim.command}`"]
            cells += ["<br>".join(words(name, each) for name, each in found), "<br>".join(taken)]
            rows.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def matching(name: str, figures: Mapping[str, Figure]) -> list[tuple[str, Figure | None]]:
    """The figures of a name or a pattern; the name alone where there is none."""
    for each in name.split("|"):
        if found := [metric for metric in sorted(figures) if fnmatchcase(metric, each)]:
            return [(metric, figures[metric]) for metric in found]
    return [(name.split("|")[0], None)]


def words(name: str, figure: Figure | None) -> str:
    if figure is None:
        return f"`{name}` {NOT_YET}"
    sure = figure.get("ci95")
    interval = f" ± {sure:.3g}" if isinstance(sure, (int, float)) else ""
    return f"`{name}` {rounded(figure['value'])}{interval} {figure['unit']}"
