"""The benchmarks: `make bench` lists them, `make bench NAME=... ARGS="..."` runs one (as does `python loadtest/bench`).

Each is a module with a ``main()`` that reads ``sys.argv``. Imports nothing but the one that is asked for.
"""

import sys
from importlib import import_module

PROGRAMS = {
    "load": ("load", "a load on our server or any of OpenAI's API: workloads, sweeps, an open loop"),
    "peers": ("bench.peers", "other engines beside ours, in turns: who is ahead, and by what watts"),
    "batch": ("bench.batch", "`tessera batch` through kills, and alone with a million rows"),
    "bits": ("bench.bits", "whether answers keep their bits among 256 others, with `deterministic` and without"),
    "poison": ("bench.poison", "odd pictures among good ones: no good answer may change"),
    "remote": ("bench.remote", "the vision stage on a server of its own, with and without TCP_NODELAY"),
    "pixels": ("bench.pixels", "4K and 8K pictures served, decoded by the CPU and by the GPU"),
    "replay": ("bench.replay", "pages of real documents, asked as `tessera parse` asks"),
    "pruning": ("bench.pruning", "equal groups of patches left out: how many, and what is read without them"),
    "replay_pages": ("bench.replay_set", "makes the set of pages for `replay`"),
    "drafts": ("bench.drafts", "what drafts gain and cost, and that they change no answer"),
    "drafts_pages": ("bench.drafts_pages", "makes the fixed set of pages for `drafts`"),
    "ladder": ("bench.ladder", "one job from the plain loop of transformers up, an optimisation a rung"),
    "tiles": ("bench.tiles", "a picture in 13 tiles down to one: requests a second, and recall beside them"),
    "cascade": ("bench.cascade", "whether a cascade's bound holds, and how soon its alarm comes"),
    "cascade_speed": ("bench.cascade_speed", "a cascade by the share that escalates, in turns with the full cut"),
    "cascade_rows": ("bench.cascade_rows", "asks the default model both ways, for `cascade`"),
    "recall": ("bench.quality:recall_main", "the held-out set through the server"),
    "quantization": ("bench.quality:quantization_main", "what quantized weights cost in recall"),
    "cpu": ("bench.cpu", "the server on a CPU against a loop of transformers, in turns"),
    "parity": ("bench.parity", "our greedy tokens against transformers' on held-out pictures"),
    "document_parity": ("bench.document_parity", "the same on held-out pages, through the server"),
    "scheduler": ("bench.scheduler", "the scheduler simulated, without a GPU"),
    "graphs": ("bench.graphs", "decode steps and a tile's forward with CUDA graphs and without, drawn"),
    "vision": ("bench.vision", "a vision tower alone on a GPU, in bf16 and FP8"),
    "account": ("bench.account", "what a workload's requests cost without a server: tower, prompts, answers"),
    "attention": ("bench.attention", "the vision tower's attention on a GPU, beside what others offer"),
    "kernels": ("bench.kernels", "the engine's kernels on a GPU: elementwise, products, attention"),
}
"""Name -> (module, or module:function where that is not ``main``; what it measures)."""


def main() -> int:
    """Runs the program that the first argument names; without one, lists them (exit code 2)."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name not in PROGRAMS:
        print("make bench NAME=... [ARGS=...], where NAME is one of:", file=sys.stderr)
        for known, (_, words) in PROGRAMS.items():
            print(f"  {known:18} {words}", file=sys.stderr)
        return 2
    sys.argv = [name, *rest]
    module, _, function = PROGRAMS[name][0].partition(":")
    return getattr(import_module(module), function or "main")() or 0
