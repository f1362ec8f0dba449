"""The longest context: one rule for preprocess and engine."""

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
from fakes.backend import stage_args

from tessera.engine.engine import Engine
from tessera.errors import ConfigError, InvalidRequest
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.settings.stages import EngineConfig

TRAINED = 128
DYNAMIC = (("rope_type", "dynamic"), ("factor", 4.0), ("rope_theta", 10000.0))
LINEAR = (("rope_type", "linear"), ("factor", 4.0), ("rope_theta", 10000.0))


def folder(path: Path, **shape: Any) -> Path:
    return tiny_checkpoints.hf_native(path, tiny_checkpoints.Shape(max_position=TRAINED, **shape))


@pytest.mark.parametrize("asked", [None, 100, 400])
@pytest.mark.parametrize("rope", [DYNAMIC, LINEAR, None])
def test_a_dynamic_rope_alone_reaches_beyond_the_trained_length(tmp_path: Path, rope: Any, asked: int | None) -> None:
    """In both stages alike; another is refused in the same words."""
    path = folder(tmp_path, **({"rope": rope} if rope else {}))

    def preprocessor() -> Preprocessor:
        return Preprocessor.from_checkpoint(path, PreprocessSettings(context_length=asked))

    def engine() -> Engine:
        return Engine.from_checkpoint(path, EngineConfig(max_model_len=asked, max_sequences=2))

    if asked == 400 and rope is not DYNAMIC:
        words = "^max_model_len 400 exceeds the checkpoint's context of 128$"
        for load in (preprocessor, engine):
            with pytest.raises(ConfigError, match=words):
                load()
        return
    ours, long = preprocessor(), PreprocessRequest(text="word " * 60)
    assert (ours.prompts.context_length, engine().max_model_len) == (asked or TRAINED,) * 2
    if asked == 400:
        assert TRAINED < len(ours(long).input_ids) < 400
    else:
        with pytest.raises(InvalidRequest, match="leaves no room"):
            ours(long)


def test_the_stage_takes_max_model_len(backend: Any, tmp_path: Path) -> None:
    from tessera.tritonserver.preprocess import TritonPythonModel

    stage = TritonPythonModel()
    path = str(folder(tmp_path, rope=DYNAMIC))
    stage.initialize(stage_args("preprocess", checkpoint=path, max_model_len="400"))
    assert stage._preprocessor.prompts.context_length == 400
