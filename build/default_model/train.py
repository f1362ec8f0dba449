"""Train the default model on rendered home-inspection pictures.

    python train.py --state run --out checkpoint --minutes 13 --workers 15 --compile

Resumable: `--state` holds weights, their average, optimizers and progress, and a run started on it goes on from there;
the learning rate follows the share of `--minutes` (or `--steps`) that all runs on this state have used.  The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architecture import TILE, build_model, save_model
from augment import QuickCutter, patch_targets
from feed import Asking, Batch, Batches, Renderers, Store
from muon import MatricesAndRest
from network import DenseHead, image_rows, patch_states, text_states
from sequences import ChatTokens
from torch import nn
from transformers import InternVLForConditionalGeneration

SHARE = {"hazard": 1.5, "count": 0.4, "colour": 0.12, "position": 0.25, "description": 3.0}


def class_names(world: Any, scenes: int = 400) -> list[str]:
    """Every class that has boxes in the first training scenes, sorted."""
    return sorted({box[0] for seed in range(scenes) for box in world.boxes(world.sample(seed, "train"))})


def question_share(hazards: Iterable[str]) -> Any:
    """How often a group is asked.  Colours, places and counts have many groups; hazards' presence weighs most."""
    hazards = set(hazards)

    def share(group: tuple[str, ...]) -> float:
        if group[0] == "presence":
            return 4.0 if group[1] in hazards else 0.5
        return SHARE[group[0]]

    return share


class Trainer:
    """Model, dense head, optimizers and the running average of the weights."""

    def __init__(
        self,
        chat: ChatTokens,
        classes: int,
        tiles: int,
        device: torch.device,
        lr: float,
        compiled: bool = False,
    ):
        self.chat, self.classes, self.tiles, self.device = chat, classes, tiles, device
        self.model: InternVLForConditionalGeneration = build_model().train()
        self.model.to(device=device)
        self.dense = DenseHead(self.model.config.vision_config.hidden_size, classes).to(device)
        self.average = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.step, self.seconds = 0, 0.0
        inside = (
            self.model.model.vision_tower,
            self.model.model.language_model.layers,
            self.model.model.multi_modal_projector,
        )
        # Position and CLS tables are lists of vectors, not maps between them, so their update stays element by element.
        parameters = [*self.model.parameters(), *self.dense.parameters()]
        self.optimizer = MatricesAndRest(inside, parameters, lr, device)
        self._cutter = QuickCutter(device)
        self._prefixes: dict[int, torch.Tensor] = {}
        self._see = torch.compile(self._look) if compiled else self._look

    def _look(
        self,
        tiles: torch.Tensor,
        gain: torch.Tensor,
        covered: torch.Tensor,
        centred: torch.Tensor,
        valid: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = patch_states(self.model, tiles, gain)
        return image_rows(self.model, states), self.dense(states, covered, centred, valid)

    def _prefix(self, tiles: int) -> torch.Tensor:
        if tiles not in self._prefixes:
            self._prefixes[tiles] = torch.tensor(self.chat.prefix(tiles), device=self.device)
        return self._prefixes[tiles]

    def losses(self, batch: Batch, store: Store) -> tuple[torch.Tensor, torch.Tensor]:
        """(answer loss, dense loss) of a batch.  Waits for the device nowhere, so that launches run ahead of it."""
        count, per_picture = len(batch.pictures), batch.tiles
        used = count * per_picture
        held = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.tensors.items()}
        tiles = torch.empty((self.tiles, 3, TILE, TILE), dtype=torch.uint8, device=self.device)
        tiles[used:] = 128
        for i, (picture, plan) in enumerate(zip(batch.pictures, batch.layouts, strict=True)):
            self._cutter(store.pixels(picture), plan, tiles[i * per_picture : (i + 1) * per_picture])
        boxes = held["boxes"].repeat_interleave(per_picture, 0, output_size=used)
        covered, centred = patch_targets(boxes, held["windows"], self.classes)
        gain = held["gains"].repeat_interleave(per_picture, 0, output_size=used)
        spare = self.tiles - used
        valid = torch.arange(self.tiles, device=self.device) < used
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            rows, dense = self._see(
                tiles,
                F.pad(gain, (0, 0) * 2 + (0, spare)),
                F.pad(covered, (0, 0) * 3 + (0, spare)),
                F.pad(centred, (0, 0) * 3 + (0, spare)),
                valid,
            )
            states = text_states(
                self.model, self._prefix(per_picture), rows[:used].reshape(count, -1, rows.shape[-1]),
                held["ids"], held["number"], held["position"], len(self.chat.head),
            )  # fmt: skip
            logits = self.model.lm_head(states.flatten(0, 1)[held["asked"]])
        each = F.cross_entropy(logits.float(), held["labels"], reduction="none")
        return (each * held["weights"]).sum() / held["weights"].sum(), dense

    def train_step(self, batch: Batch, store: Store, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; `progress` 0..1 sets the learning rate."""
        factor = min(1.0, (self.step + 1) / 300) * min(1.0, max(0.01, (1 - progress) / 0.6))
        answer, dense = self.losses(batch, store)
        (answer + dense).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(factor)
        self.step += 1
        keep = min(0.998, self.step / (self.step + 10))
        with torch.no_grad():
            current = self.model.state_dict()
            torch._foreach_lerp_(list(self.average.values()), [current[name] for name in self.average], 1 - keep)
        return answer.detach(), dense.detach()

    def save_state(self, folder: Path) -> None:
        """Files of at most 16 MiB each, so that they survive a transfer between machines one by one."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": self.model.state_dict()}, folder / "weights.pt")
        torch.save({"average": self.average, "dense": self.dense.state_dict()}, folder / "average.pt")
        torch.save([self.optimizer.muon.state_dict(), self.optimizer.adamw.state_dict()], folder / "optimizers.pt")
        (folder / "progress.json").write_text(json.dumps({"step": self.step, "seconds": self.seconds}))

    def load_state(self, folder: Path) -> None:
        """Go on from `save_state`; missing optimizer state starts afresh."""
        self.model.load_state_dict(torch.load(folder / "weights.pt", map_location=self.device)["model"])
        held = torch.load(folder / "average.pt", map_location=self.device)
        self.average = held["average"]
        self.dense.load_state_dict(held["dense"])
        if (folder / "optimizers.pt").exists():
            muon, adamw = torch.load(folder / "optimizers.pt", map_location=self.device)
            self.optimizer.muon.load_state_dict(muon)
            self.optimizer.adamw.load_state_dict(adamw)
        progress = json.loads((folder / "progress.json").read_text())
        self.step, self.seconds = progress["step"], progress["seconds"]

    def save_checkpoint(self, folder: Path) -> None:
        """The averaged weights as the checkpoint in `folder` (whose tokenizer is already there)."""
        self.average["lm_head.weight"] = self.average["model.language_model.embed_tokens.weight"]
        final = build_model()
        final.load_state_dict(self.average)
        save_model(folder, final)


def run(arguments: argparse.Namespace, world: Any) -> dict[str, Any]:
    """Train until the budget is used; returns the summary."""
    sys.setswitchinterval(5e-4)  # the feeding threads must not hold up kernel launches
    if arguments.tiles < 13:
        raise ValueError(f"--tiles must be at least 13 (12 and a thumbnail), got {arguments.tiles}")
    out, state = Path(arguments.out), Path(arguments.state)
    chat = ChatTokens(out / "tokenizer.json")
    classes = class_names(world)
    progress_file = state / "progress.json"
    resumed = json.loads(progress_file.read_text())["step"] if progress_file.exists() else 0
    # A resumed run goes on with scenes that the earlier one cannot have reached.
    asking = Asking(chat, question_share(world.HAZARDS), arguments.questions, arguments.length)
    renderers = Renderers(world, asking, classes, arguments.workers, first_seed=1000 + resumed * 1000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(chat, len(classes), arguments.tiles, device, arguments.lr, arguments.compile)
    if resumed:
        trainer.load_state(state)
    store = Store(renderers, int(arguments.store_gb * 1e9), device)
    started = time.monotonic()
    while len(store.pictures) < arguments.warm_pictures:
        time.sleep(0.1)
    print(f"{store.received} pictures after {time.monotonic() - started:.0f} s", flush=True)
    batches = Batches(store, arguments.tiles, seed=trainer.step, pinned=device.type == "cuda")
    earlier, began, drawn, steps = trainer.seconds, started, 0, 0
    reported = saved = time.monotonic()
    sums = torch.zeros(2, device=device)
    waited = 0.0
    try:
        while True:
            trainer.seconds = earlier + time.monotonic() - began
            progress = trainer.step / arguments.steps if arguments.steps else trainer.seconds / 60 / arguments.minutes
            if progress >= 1 or (arguments.stop_minutes and trainer.seconds / 60 >= arguments.stop_minutes):
                break
            before = time.monotonic()
            batch = batches.next()
            waited += time.monotonic() - before
            sums += torch.stack(trainer.train_step(batch, store, progress))
            drawn, steps = drawn + len(batch.pictures), steps + 1
            if steps % 10 == 0 and time.monotonic() - reported > arguments.report_seconds:
                answer, dense = (sums / steps).tolist()
                elapsed = time.monotonic() - reported
                print(
                    f"{100 * progress:5.1f}% step {trainer.step} answer {answer:.4f} dense {dense:.4f} "
                    f"{steps / elapsed:.1f} steps/s {drawn / elapsed:.0f} pictures/s, {store.received} rendered, "
                    f"waited {waited:.1f} s",
                    flush=True,
                )
                reported, drawn, steps, waited = time.monotonic(), 0, 0, 0.0
                sums.zero_()
                if time.monotonic() - saved > 120:
                    trainer.save_state(state)
                    saved = time.monotonic()
    finally:
        batches.close()
        store.close()  # first, or it could wait for ever on a queue that a dying renderer holds
        renderers.close()
    trainer.save_state(state)
    trainer.save_checkpoint(out)
    return {
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "pictures_rendered": store.received,
        "classes": len(classes),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="checkpoint", help="checkpoint folder; its tokenizer must be there already")
    parser.add_argument("--state", default="training-state", help="folder of the resumable state")
    parser.add_argument(
        "--minutes", type=float, default=13.0, help="wall-clock budget of all runs on this state together"
    )
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--stop-minutes", type=float, default=0.0, help="stop here; a later run on this state goes on")
    parser.add_argument("--workers", type=int, default=15, help="renderer processes")
    parser.add_argument("--tiles", type=int, default=520, help="tiles per step")
    parser.add_argument("--length", type=int, default=254, help="places for questions and answers per picture")
    parser.add_argument("--questions", type=int, default=13, help="questions per picture and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--store-gb", type=float, default=70.0, help="replay store on the device")
    parser.add_argument("--warm-pictures", type=int, default=3000, help="pictures rendered before the first step")
    parser.add_argument("--report-seconds", type=float, default=15.0)
    parser.add_argument("--compile", action="store_true", help="compile the vision half")
    return parser.parse_args(argv)


def main() -> None:
    import scene

    print(json.dumps(run(parse(), scene)))


if __name__ == "__main__":
    main()
