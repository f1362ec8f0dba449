"""`--set`, config.pbtxt, the environment and the defaults: what is in force, and who said so. What a server asks of
/dev/shm, and what it says where that is less."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.errors import ConfigError
from tessera.launcher import settings
from tessera.launcher.cli import serve_main
from tessera.launcher.settings import INSTANCES, MB, ServerSetup, lay_out, read_config, regions, set_up
from tessera.settings.gpu import GIB

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
MOST = 26


def rows(setup: ServerSetup) -> dict[str, tuple[object, str]]:
    return {each.name: (each.value, each.origin) for each in setup.effective}


def test_a_user_can_set_no_more_than_he_can_read() -> None:
    assert len(rows(set_up(REPOSITORY, None, {}, {}))) <= MOST


def test_each_setting_says_who_set_it(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    shutil.copytree(REPOSITORY, repository)
    with open(repository / "preprocess" / "config.pbtxt", "a") as config:
        config.write('parameters [ { key: "max_images" value { string_value: "3" } } ]\n')
    environment = {"TESSERA_LANGUAGE_MODEL_MAX_SEQUENCES": "7", "TESSERA_DTYPE": "float16"}
    setup = set_up(repository, None, environment, {"device": "cpu", "dtype": "float32", "gpu_memory": "0.5"})
    found = rows(setup)
    assert found["preprocess.max_images"] == (3, "config.pbtxt")
    assert found["language_model.max_sequences"] == (7, "environment")
    assert found["dtype"] == ("float32", "command line")  # which wins
    assert found["language_model.max_batched_tokens"] == (2048, "device")
    assert found["preprocess.max_cost"] == (0, "default")
    assert setup.environment == {"TESSERA_DEVICE": "cpu", "TESSERA_DTYPE": "float32", "TESSERA_GPU_MEMORY": "0.5"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"language_model.max_sequence": "3"}, "no such setting; did you mean language_model.max_sequences"),
        ({"vision_encoder.dtype": "float16"}, "it is one for all stages: dtype"),
        ({"xyz": "3"}, "no such setting; known are checkpoint, deterministic, device"),
        ({"language_model.max_sequences": "many"}, "max_sequences is 'many'; it must be a whole number"),
        ({"preprocess.instances": "0"}, "preprocess: instances is 0; it must be at least 1"),
        ({"gpu_memory": "1.5"}, "gpu_memory is 1.5; it must be at most 1"),
        ({"gpu_memory": "all"}, "gpu_memory is 'all'; it must be a number"),
        ({"gpu_memory": "nan"}, "gpu_memory is nan; it must be at least 0.05"),
        ({"weights": "none"}, "weights is 'none'; it must be one of checkpoint, random"),
        ({"device": "cuda"}, "device is cuda, but (CUDA_VISIBLE_DEVICES|this machine)"),
        ({"deterministic": "1"}, "deterministic is '1'; it must be one of off, on"),
        ({"deterministic": "on", "threads": "2"}, "deterministic is on, and it does not hold with several threads"),
        ({"deterministic": "on", "vision_encoder.vision_url": "there:1"}, "deterministic .* leave vision_url out"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_before_the_start(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        set_up(REPOSITORY, None, {"CUDA_VISIBLE_DEVICES": ""}, given)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_device", lambda environment: "cuda")
    monkeypatch.setattr(settings, "card_bytes", lambda environment: 80 * GIB)


def test_on_a_gpu_the_defaults_and_the_division_are_its_own(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = set_up(REPOSITORY, None, {}, {})
    found = rows(setup)
    assert found["device"] == ("cuda", "device") and found["quantization"] == ("checkpoint", "default")
    assert found["dtype"] == ("bfloat16", "device")
    assert found["language_model.max_sequences"] == (256, "default")
    assert setup.division is not None
    half = set_up(REPOSITORY, None, {}, {"gpu_memory": "0.45"}).division
    assert half is not None and half.language < setup.division.language / 2
    quantized = set_up(REPOSITORY, None, {}, {"quantization": "fp8-vision"})
    assert rows(quantized)["quantization"] == ("fp8-vision", "command line")
    monkeypatch.setattr(settings, "card_bytes", lambda environment: None)
    assert set_up(REPOSITORY, None, {}, {}).division is None  # the stages find the size


def test_what_a_deterministic_server_does_not_hold_is_refused(gpu: None) -> None:
    asked = {"deterministic": "on"}
    set_up(REPOSITORY, None, {}, asked)
    with pytest.raises(ConfigError, match="deterministic is on.* does not keep bits"):
        set_up(REPOSITORY, "tensorrt", {}, asked)
    with pytest.raises(ConfigError, match="deterministic is on.* leave gpu_pixels out"):
        set_up(REPOSITORY, None, {}, asked | {"gpu_pixels": "1"})


def test_instances_and_a_choice_of_models_are_links_to_the_repository(tmp_path: Path) -> None:
    setup = set_up(REPOSITORY, None, {}, {"preprocess.instances": "8"})
    assert rows(setup)["preprocess.instances"] == (8, "command line") and setup.instances == 8
    laid_out = lay_out(REPOSITORY, None, setup, tmp_path / "eight")
    assert read_config(laid_out / "preprocess" / "config.pbtxt").instance_group[0].count == 8
    assert (laid_out / "preprocess" / "1").resolve() == REPOSITORY / "preprocess" / "1"
    models = sorted(path.parent.name for path in REPOSITORY.glob("*/config.pbtxt"))
    assert sorted(path.name for path in laid_out.iterdir()) == models
    named = set_up(REPOSITORY, "tensorrt", {INSTANCES: "5"}, {})
    file = lay_out(REPOSITORY, "tensorrt", named, tmp_path / "named") / "preprocess" / "configs" / "tensorrt.pbtxt"
    assert read_config(file).instance_group[0].count == 5
    eyes = set_up(REPOSITORY, None, {}, {}, ("vision_encoder",))
    assert not any(name.startswith(("preprocess", "language_model")) for name in rows(eyes))
    assert [path.name for path in lay_out(REPOSITORY, None, eyes, tmp_path / "eyes").iterdir()] == ["vision_encoder"]
    with pytest.raises(ConfigError, match="--only vision: there is no such model; did you mean vision_encoder"):
        set_up(REPOSITORY, None, {}, {}, ("vision",))
    as_it_is = set_up(REPOSITORY, None, {}, {"device": "cpu"})
    assert lay_out(REPOSITORY, None, as_it_is, tmp_path / "none") == REPOSITORY and not (tmp_path / "none").exists()


def test_the_table_is_shown_and_nothing_started(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-repository", str(REPOSITORY), "--device", "cpu", "--set", "language_model.max_sequences=9"]
    assert serve_main([*flags, "--show-settings"]) == 0
    shown = capsys.readouterr().out
    assert "language_model.max_sequences" in shown and "command line" in shown and "9" in shown
    assert serve_main([*flags, "--set", "resize=fast", "--show-settings"]) == 1
    assert "no such setting; did you mean preprocess.resize" in capsys.readouterr().err


def test_one_setting_for_all_stages_cannot_differ_between_their_files_and_has_one_variable(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY, tmp_path / "models")
    file = tmp_path / "models" / "vision_encoder" / "config.pbtxt"
    file.write_text(file.read_text() + '\nparameters [ { key: "checkpoint" value { string_value: "/other" } } ]\n')
    with pytest.raises(ConfigError, match="checkpoint is .* for one stage and /other for another"):
        set_up(tmp_path / "models", None, {}, {})
    with pytest.raises(ConfigError, match="unknown environment variable TESSERA_DTYP; did you mean TESSERA_DTYPE"):
        set_up(REPOSITORY, None, {"TESSERA_DTYP": "float16"}, {})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many MB are free."""
    usage = SimpleNamespace()
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda path: usage)
    return lambda megabytes: setattr(usage, "free", megabytes * MB)


def test_every_instance_of_a_python_model_is_a_process() -> None:
    assert set_up(REPOSITORY, None, {}, {"device": "cpu"}).processes == 6
    assert set_up(REPOSITORY, "tensorrt", {INSTANCES: "2"}, {}).processes == 5  # the plan is none
    assert set_up(REPOSITORY, None, {}, {"preprocess.instances": "8"}).processes == 12
    assert set_up(REPOSITORY, None, {}, {}, ("vision_encoder",)).processes == 1


def test_too_little_is_said_with_what_is_wanted_and_what_can_never_do_is_refused(free):
    free(64)
    assert regions(6)[1] == (
        "/dev/shm has 64 MB free, and 6 Python processes should have 2048 MB there: they begin with 1 MB each, and "
        "what finds no more is refused as UNAVAILABLE; enlarge it (docker run --shm-size=2g)"
    )
    assert "and 24 Python processes should have 8192 MB" in (regions(6, servers=4)[1] or "")
    free(11)
    with pytest.raises(ConfigError, match="11 MB free, and the 6 Python processes need at least 12 MB there; enlarge"):
        regions(6)
    free(12)
    assert regions(6)[0] == (MB, MB)
    free(2048)
    assert regions(6) == ((64 * MB, 32 * MB), None)
    free(3000)
    assert regions(30)[1] is None
    assert regions(6, servers=2)[0] == (MB, MB)
