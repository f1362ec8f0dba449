"""How well the model of rooms answers about the held-out pictures, in plain torch.

Prints one JSON object; see `figures` for its keys.  Greedy answers; a whole answer is right or wrong, only descriptions
are scored by the words they have in common with the expected one (F1).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from architecture import IM_END
from augment import DEFAULT, TWO_TILES, Policy, cut, layout
from room_network import image_rows, patch_states, text_states
from sequences import ChatTokens
from transformers import AutoModelForImageTextToText, InternVLForConditionalGeneration

import scene

POLICIES = {
    "reference": DEFAULT,
    "max1": Policy(1, 1),
    "max2": Policy(1, 2),
    "max6": Policy(1, 6),
    "max12-no-thumbnail": Policy(1, 12, "never"),
    "two-tile": TWO_TILES,
}
LARGE_SIDE = 1280


def picture(seed: int) -> np.ndarray:
    """The held-out picture of a scene seed as a server would decode it, uint8 RGB."""
    cv2.setNumThreads(1)
    encoded = np.frombuffer(scene.encode_jpeg(scene.sample(seed, "heldout")), np.uint8)
    return cv2.cvtColor(cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def render_all(items: Sequence[Any], workers: int) -> list[np.ndarray]:
    """Every item's picture.  Forks: call it before CUDA is touched."""
    seeds = [item.scene_seed for item in items]
    if workers <= 1:
        return [picture(seed) for seed in seeds]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(picture, seeds, chunksize=8)


@torch.inference_mode()
def answer_batch(
    model: InternVLForConditionalGeneration,
    chat: ChatTokens,
    tiles: torch.Tensor,
    questions: Sequence[str],
    limit: int,
) -> list[str]:
    """Greedy answers of at most `limit` tokens; `tiles` uint8 [n, 3, 448, 448], equally many a question, in order."""
    device, count = tiles.device, len(questions)
    per_picture = tiles.shape[0] // count
    rows = torch.cat([image_rows(model, patch_states(model, chunk)) for chunk in tiles.split(256)])
    rows = rows.view(count, -1, rows.shape[-1])
    asked = [chat.question(question) for question in questions]
    prefix = torch.tensor(chat.prefix(per_picture), device=device)
    answers: list[list[int]] = [[] for _ in asked]
    open_ = set(range(count))
    for _ in range(limit):
        lines = [a + b for a, b in zip(asked, answers, strict=True)]
        width = max(map(len, lines))
        ids = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=device)
        number = torch.tensor([[0] * len(line) + [-1] * (width - len(line)) for line in lines], device=device)
        position = torch.arange(width, device=device).expand(count, -1)
        states = text_states(model, prefix, rows, ids, number, position, len(chat.head))
        last = torch.tensor([len(line) - 1 for line in lines], device=device)
        chosen = model.lm_head(states[torch.arange(count, device=device), last]).argmax(-1).tolist()
        for i in sorted(open_):
            if chosen[i] == IM_END:
                open_.discard(i)
            else:
                answers[i].append(chosen[i])
        if not open_:
            break
    return [chat.decode(ids) for ids in answers]


def answers(
    model: InternVLForConditionalGeneration,
    chat: ChatTokens,
    items: Sequence[Any],
    pictures: Sequence[np.ndarray],
    policy: Policy,
    device: torch.device,
    batch: int = 64,
) -> list[str]:
    """The model's answer to each item's question under a tile policy."""
    groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        height, width = pictures[i].shape[:2]
        groups[layout(width, height, policy).tiles, item.kind == "description"].append(i)
    found: dict[int, str] = {}
    for (_, long), members in groups.items():
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            tiles = []
            for i in part:
                height, width = pictures[i].shape[:2]
                tiles.append(cut(torch.from_numpy(pictures[i]).to(device), layout(width, height, policy)))
            texts = answer_batch(model, chat, torch.cat(tiles), [items[i].question for i in part], 100 if long else 8)
            found.update(zip(part, texts, strict=True))
    return [found[i] for i in range(len(items))]


def word_f1(expected: str, got: str) -> float:
    a, b = Counter(expected.lower().split()), Counter(got.lower().split())
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else 0.0


def figures(items: Sequence[Any], texts: Sequence[str], hazards: Sequence[str]) -> dict[str, Any]:
    """recall (balanced accuracy of each hazard's presence questions), recall_macro, recall_least, precision_yes,
    accuracy by kind, share of exact answers in all and on large pictures (longer side >= 1280)."""
    right = [t.strip() == item.answer for item, t in zip(items, texts, strict=True)]
    by_class: dict[str, dict[str, list[bool]]] = {name: {"yes": [], "no": []} for name in hazards}
    by_kind: dict[str, list[float]] = defaultdict(list)
    large: list[bool] = []
    for item, text, ok in zip(items, texts, right, strict=True):
        by_kind[item.kind].append(word_f1(item.answer, text) if item.kind == "description" else float(ok))
        if item.kind == "presence" and item.cls in by_class:
            by_class[item.cls][item.answer].append(ok)
        if item.kind != "description" and max(item.width, item.height) >= LARGE_SIDE:
            large.append(ok)
    recall = {
        name: float(np.mean([np.mean(answers) for answers in found.values() if answers]))
        for name, found in by_class.items()
        if any(found.values())
    }
    hits = sum(sum(found["yes"]) for found in by_class.values())
    false = sum(len(found["no"]) - sum(found["no"]) for found in by_class.values())
    short = [ok for item, ok in zip(items, right, strict=True) if item.kind != "description"]
    result = {
        "recall": {name: round(value, 4) for name, value in recall.items()},
        "recall_macro": float(np.mean(list(recall.values()))) if recall else None,
        "recall_least": min(recall.values(), default=None),
        "precision_yes": hits / (hits + false) if hits + false else None,
        "by_kind": {kind: round(float(np.mean(values)), 4) for kind, values in sorted(by_kind.items())},
        "exact": float(np.mean(short)) if short else None,
        "exact_large": float(np.mean(large)) if large else None,
        "pictures": len(items),
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def load(folder: str | Path, device: torch.device) -> tuple[InternVLForConditionalGeneration, ChatTokens]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.to(device=device)
    return model, ChatTokens(Path(folder) / "tokenizer.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pictures", type=int, default=4524)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--policies", default="reference", help=f"comma-separated, of {', '.join(POLICIES)}")
    parser.add_argument("--mistakes", help="write each wrong answer to this file, a JSON line each (first policy)")


def report(arguments: argparse.Namespace) -> None:
    items = scene.heldout(arguments.pictures)
    pictures = render_all(items, arguments.workers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, chat = load(arguments.checkpoint, device)
    results = {}
    for name in arguments.policies.split(","):
        texts = answers(model, chat, items, pictures, POLICIES[name], device, arguments.batch)
        results[name] = figures(items, texts, scene.HAZARDS)
        if arguments.mistakes and len(results) == 1:
            with open(arguments.mistakes, "w") as file:
                for item, text in zip(items, texts, strict=True):
                    if text.strip() != item.answer:
                        file.write(json.dumps({**vars(item), "got": text}) + "\n")
    print(json.dumps(results, indent=1))
