"""Another family, registered by a test, passes the unedited house and answers as transformers would."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_folders as folders
import numpy as np
import pytest
import torch
import toy_family
from preprocess import encoded_pictures as pictures
from safetensors.torch import save_file
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

from tessera.checkpoint.config import read_config
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.sampling import SamplingParameters
from tessera.vision.encoding.encoder import VisionEncoder
from tessera.vision.encoding.pictures import VisionItem
from tessera.vision.settings import VisionSettings
from tessera.vision.towers.tower import load_tower

TOKENS = 6
SIZES = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
)
SECTIONS = [1, 2, 3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toy_family.register(monkeypatch)
    toy_family.as_toy(folders.write_hf_folder(tmp_path, folders.byte_level()))
    config = json.loads((tmp_path / "config.json").read_text())
    vocabulary = Preprocessor.from_checkpoint(tmp_path).prompts.tokenizer.vocab_size
    config["text_config"] |= {**SIZES, "vocab_size": vocabulary, "tie_word_embeddings": True}
    config["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": SECTIONS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def body(folder: Path) -> Qwen2VLTextModel:
    """transformers' text model with random weights, which it writes into the folder with the tower's."""
    text = read_config(folder).text
    rope = {"rope_type": "default", "rope_theta": text.rope_theta, "mrope_section": SECTIONS}
    model = Qwen2VLTextModel(Qwen2VLTextConfig(**SIZES, vocab_size=text.vocab_size, rope_parameters=rope)).eval()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    weights = {f"language_model.model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    weights["visual.weight"] = torch.randn(48, 768, generator=generator) / 16
    weights["visual.bias"] = torch.randn(48, generator=generator)
    save_file(weights, folder / "model.safetensors")
    return model


@torch.no_grad()
def theirs(model: Qwen2VLTextModel, folder: Path, prepared: Prepared) -> list[int]:
    """Greedy tokens: the tower picture by picture, then one full forward a token."""
    tower = load_tower(read_config(folder))
    cut = torch.from_numpy(prepared.pixels).view(-1, *tower.unit_shape)
    wires = [tuple(wire) for wire in prepared.plan.reshape(-1, 4)[:, 1:].tolist()]
    parts = cut.split([rows * columns for _, rows, columns in wires])
    rows = [tower(part, [wire]) for part, wire in zip(parts, wires, strict=True)]
    ids, positions = prepared.input_ids.tolist(), prepared.positions
    for _ in range(TOKENS):
        embedded = model.embed_tokens(torch.tensor(ids))
        for (start, length), picture in zip(prepared.spans.tolist(), rows, strict=True):
            embedded[start : start + length] = picture
        hidden = model(
            inputs_embeds=embedded[None], position_ids=torch.from_numpy(positions).long()[:, None], use_cache=False
        ).last_hidden_state[0, -1]
        ids.append(int((hidden @ model.embed_tokens.weight.T).argmax()))
        positions = np.concatenate([positions, np.full((3, 1), positions.max() + 1, positions.dtype)], axis=1)
    return ids[len(prepared.input_ids) :]


def ours(folder: Path, prepared: Prepared) -> list[int]:
    vision = VisionEncoder.from_checkpoint(folder, VisionSettings(runner="torch", infer_batch_size=8))
    (rows,) = vision.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
    engine = Engine.from_checkpoint(folder, EngineConfig(block_size=4, max_sequences=4, max_batched_tokens=16))
    sampling = SamplingParameters(max_tokens=TOKENS, ignore_eos=True)
    sequence = engine.submit(
        Request(
            "toy",
            prepared.input_ids,
            prepared.spans,
            rows,
            prepared.digest,
            sampling,
            positions=prepared.positions,
        )
    )
    while engine.has_work():
        engine.step()
    return sequence.outputs


def test_pictures_of_any_size_are_answered_as_transformers_answers(folder: Path) -> None:
    model = body(folder)
    images = [pictures.jpeg(80, 32), pictures.jpeg(50, 97), pictures.jpeg(17, 20)]
    prepared = Preprocessor.from_checkpoint(folder)(
        PreprocessRequest(text="<image> before <image>, then <image>: alike?", images=images)
    )
    assert prepared.spans[:, 1].tolist() == [10, 18, 1]
    found = ours(folder, prepared)
    assert found == theirs(model, folder, prepared) and len(set(found)) > 1
