"""Train one of the models that come with Tessera on what is drawn meanwhile.

    python build/training/train.py rooms --state run --out checkpoint --minutes 13 --workers 15 --compile
    python build/training/train.py documents --state run --out checkpoint --minutes 25 --workers 15

A new checkpoint has the tracked one's shape, tokenizer and processor, or those of `--like`.
Resumable: `--state` holds weights, their average, optimizers and progress, saved every `--save-minutes`; a run started
on it goes on from there. The learning rate follows the share of `--minutes` (or `--steps`) that all runs on this state
have used. Prints a line every `--report-seconds` and JSON at the end.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("", "default_model", "document_model"))

from document_trainer import DocumentTrainer
from rooms import RoomTrainer
from trainer import Trainer

MODELS: dict[str, type[Trainer]] = {"rooms": RoomTrainer, "documents": DocumentTrainer}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains until the budget is used; returns the summary."""
    state, device = Path(arguments.state), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    progress_file = state / "progress.json"
    first = json.loads(progress_file.read_text())["step"] if progress_file.exists() else 0
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer, feed = MODELS[arguments.model].open(arguments, first, device)
    began = reported = saved = checked = time.monotonic()
    steps, waited, units = 0, 0.0, Counter[str]()
    sums = torch.zeros(len(trainer.LOSSES), device=device)
    try:
        if first:
            trainer.load_state(state)
        earlier = trainer.seconds
        while True:
            now = time.monotonic()
            trainer.seconds = earlier + now - began
            progress = trainer.step / arguments.steps if arguments.steps else trainer.seconds / 60 / arguments.minutes
            if progress >= 1 or (arguments.call_minutes and (now - began) / 60 >= arguments.call_minutes):
                break
            batch = feed.next()
            waited += time.monotonic() - now
            sums += trainer.train_step(batch, progress)
            steps += 1
            units.update(trainer.units(batch))
            now = time.monotonic()
            if now - reported > arguments.report_seconds:
                told = [f"{name} {value:.4f}" for name, value in zip(trainer.LOSSES, (sums / steps).tolist())]
                spent = time.monotonic() - reported  # after the device caught up
                told += [f"{count / spent:.0f} {name}/s" for name, count in units.items()]
                print(
                    f"{100 * progress:5.1f}% step {trainer.step} {' '.join(told)} {steps / spent:.2f} steps/s, "
                    f"waited {waited:.1f} s",
                    flush=True,
                )
                reported, steps, waited = time.monotonic(), 0, 0.0
                units.clear()
                sums.zero_()
            if now - saved > 60 * arguments.save_minutes:
                trainer.save_state(state)
                saved = time.monotonic()
            if now - checked > 60 * arguments.check_minutes:
                print(json.dumps({"step": trainer.step, **trainer.figures()}), flush=True)
                checked = time.monotonic()
    finally:
        feed.close()
    trainer.save_state(state)
    trainer.save_checkpoint(Path(arguments.out))
    return {
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0,
        **trainer.figures(),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_subparsers(dest="model", required=True)
    for name, kind in MODELS.items():
        add = (model := models.add_parser(name)).add_argument
        add("--out", default="checkpoint", help="checkpoint folder")
        add("--like", type=Path, default=kind.CHECKPOINT, help="checkpoint whose shape and tokenizer the new one has")
        add("--state", default="training-state", help="folder of the resumable state")
        add("--minutes", type=float, default=25.0, help="wall-clock budget of all runs on this state together")
        add("--call-minutes", type=float, default=0.0, help="this run stops here; a later one goes on")
        add("--steps", type=int, default=0, help="budget in steps instead of minutes")
        add("--workers", type=int, default=15, help="processes that render")
        add("--lr", type=float, default=3e-3)
        add("--report-seconds", type=float, default=15.0)
        add("--save-minutes", type=float, default=2.0)
        add("--check-minutes", type=float, default=4.0, help="minutes between held-out figures")
        add("--compile", action="store_true", help="fuse the forwards' small kernels")
        kind.add_arguments(model)
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(run(parse())))
