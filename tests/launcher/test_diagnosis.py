"""One clear line from a repository that cannot work, or from the log of a server that did not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera.launcher.starting import check_repository, explain_log, failed_models

# Lines as tritonserver 2.51 writes them.
PYTHON_ERROR = (
    r"E1121 02:18:24.080653 6017 model_lifecycle.cc:642] \"failed to load 'broken' version 1: Internal: ValueError: "
    r"weights of layer 3 are missing\n\nAt:\n  /models/broken/1/model.py(5): initialize\n\"" + "\n"
).replace('\\"', '"')
NO_FILE = (
    "I1121 02:18:23.742021 6040 pb_stub.cc:2105]  Failed to preinitialize Python stub: "
    "Python model file not found in '/models/nofile/1/model.py'\n"
)
GRPC_PORT = (
    'E1121 02:28:30.568298 8207 main.cc:245] "failed to start GRPC service: Unavailable - '
    "Socket '127.0.0.1:18601' already in use \"\n"
)
LAST = "error: creating server: Internal - failed to load all models\n"


@pytest.mark.parametrize(
    "log, line",
    [
        (
            PYTHON_ERROR + LAST,
            "model 'broken' failed to load: ValueError: weights of layer 3 are missing [/models/broken/1/model.py(5): "
            "initialize]",
        ),
        (NO_FILE, "model 'nofile' failed to load: Python model file not found in '/models/nofile/1/model.py'"),
        (GRPC_PORT, "127.0.0.1:18601 is already in use (GRPC service)"),
        (
            "E1121 02:35:14.141234 31916 model_repository_manager.cc:1415] \"failed to poll model 'nope': model not "
            'found in any model repository."\n' + LAST,
            "failed to poll model 'nope': model not found in any model repository.",
        ),
        (
            "error: creating server: Internal - failed to stat file /nope\n",
            "creating server: Internal - failed to stat file /nope",
        ),
        (
            "bin/tritonserver: unrecognized option '--nonsense'\nUsage: ...",
            "bin/tritonserver: unrecognized option '--nonsense'",
        ),
        ('I1121 02:28:33 1 main.cc:1] "all is well"\n', None),
    ],
)
def test_the_reason_is_taken_from_the_log(log: str, line: str | None) -> None:
    assert explain_log(log) == line


def test_every_failed_model_is_named() -> None:
    assert sorted(failed_models(PYTHON_ERROR + NO_FILE)) == ["broken", "nofile"]


def test_a_frame_of_a_module_is_a_place_too() -> None:
    log = PYTHON_ERROR.replace("initialize", "<module>")
    assert "[/models/broken/1/model.py(5): <module>]" in str(explain_log(log))


def test_a_repository_is_checked_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        check_repository(tmp_path / "none")
    with pytest.raises(ConfigError, match="no models in"):
        check_repository(tmp_path)
    model = tmp_path / "m"
    (model / "configs").mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "m"\nbackend: "python"\n')
    with pytest.raises(ConfigError, match="model 'm' has no version"):
        check_repository(tmp_path)
    (model / "1").mkdir()
    with pytest.raises(ConfigError, match=r"model 'm' has no model file: .*m/1/model\.py is missing"):
        check_repository(tmp_path)
    # a named configuration may make it a model of another backend
    (model / "configs" / "plan.pbtxt").write_text('name: "m"\nbackend: "tensorrt"\n')
    check_repository(tmp_path, "plan")
    (model / "1" / "model.py").touch()
    check_repository(tmp_path)
