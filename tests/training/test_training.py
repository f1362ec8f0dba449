"""Training of either model, of a small shape: its losses fall, a run that stopped goes on, its checkpoint loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import document_samples
import pytest
import torch
from checkpoints import DOCUMENTS, ROOMS
from small_world import Rooms
from train import MODELS, parse, run
from trainer import Trainer
from transformers import AutoModelForImageTextToText

MAX_PARAMETERS, MAX_FOLDER_BYTES = 3_900_000, 8_000_000
TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
VISION = {
    "rooms": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1},
    "documents": {"hidden_size": 64, "embed_dim": 64, "depth": 1, "num_heads": 1},
}
OPTIONS = {
    "rooms": "--workers 1 --tiles 13 --length 32 --warm-pictures 4 --store-gb 0.002",
    "documents": "--workers 2 --held-out 0 --patches 300 --chunk 600 --layouts 0",
}
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def like(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / name
    shutil.copytree(MODELS[name].CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= TEXT
    config["vision_config"] |= VISION[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def train(name: str, like: Path) -> Train:
    def run_into(folder: Path, *more: str) -> dict[str, Any]:
        given = f"{name} --like {like} --state {folder}/state --out {folder}/out --steps 2 {OPTIONS[name]}"
        return run(parse([*given.split(), *more]))

    return run_into


@pytest.fixture(scope="module", autouse=True)
def small_rooms():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODELS["rooms"], "WORLD", Rooms)
        yield


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder)["steps"] == 2
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "state" / "weights.pt")["part"]


def test_training_lowers_every_loss(name: str, like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_samples, "LAYOUT_SIDE", 140)
    more = ["--layouts", "2", "--patches", "600", "--workers", "1"] if name == "documents" else []
    arguments = parse([name, "--like", str(like), *OPTIONS[name].split(), *more])
    trainer, feed = MODELS[name].open(arguments, 0, torch.device("cpu"))
    batch = feed.next()
    feed.close()
    trainer.step = 300  # past the slow beginning
    losses = torch.stack([trainer.train_step(batch, 0.0) for _ in range(5)])
    assert (losses[-1] < losses[0]).all() and losses[-1, 0] < 0.97 * losses[0, 0], losses


def test_a_run_that_stopped_goes_on(
    name: str, train: Train, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where batches are made from their number alone it ends, to the last bit, as a run that did not stop."""
    original = Trainer.train_step

    def killed(self, *arguments):
        if self.step == 1:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", killed)
        train(tmp_path, "--save-minutes", "0")
    assert json.loads((tmp_path / "state" / "progress.json").read_text())["step"] == 1
    before = weights(tmp_path)
    assert train(tmp_path)["steps"] == 2
    after, whole = weights(tmp_path), weights(trained)
    assert 0 < max((after[part] - before[part]).abs().max() for part in before) < 0.05  # one step, no fresh start
    assert name == "rooms" or all(torch.equal(whole[part], after[part]) for part in whole)


def test_a_state_of_several_steps_is_refused(train: Train, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "state", tmp_path / "state")
    (tmp_path / "state" / "progress.json").write_text(json.dumps({"step": 1, "seconds": 1.0}))
    with pytest.raises(ValueError, match="several steps"):
        train(tmp_path)


def test_what_a_run_writes_is_a_whole_checkpoint(like: Path, trained: Path) -> None:
    for file in like.iterdir():
        assert (trained / "out" / file.name).read_bytes() == file.read_bytes()
    _, told = AutoModelForImageTextToText.from_pretrained(trained / "out", output_loading_info=True)
    assert not any(told[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("folder", [ROOMS, DOCUMENTS], ids=["rooms", "documents"])
def test_the_tracked_checkpoints_are_within_their_limits(folder: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_FOLDER_BYTES
