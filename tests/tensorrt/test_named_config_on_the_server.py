"""The named config `tensorrt` on the real tritonserver, with a stand-in for the plan (no GPU here can run one)."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from export_graph import tensorrt_graph
from tritonclient.grpc import model_config_pb2

import scene
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera.launcher.settings import config_file, read_config
from tessera.models.registry import read_config as read_checkpoint
from tessera.models.tower import load_tower
from tessera_client import Client, InvalidRequest

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build" / "default_model" / "checkpoint"
QUESTIONS = ("Is there an exposed wire?", "Describe the room.", "Is there a door?")


def put_stand_in(repository: Path) -> None:
    """Replace the plan: its platform and its file, and the GPU it would run on. All else stays as it is."""
    file = config_file(repository, "vision_encoder", "tensorrt")
    config = read_config(file)
    assert (config.platform, config.default_model_filename) == ("tensorrt_plan", "model.plan")
    config.platform, config.backend, config.default_model_filename = "", "python", "stand_in.py"
    config.instance_group[0].kind = model_config_pb2.ModelInstanceGroup.KIND_CPU
    file.write_text(str(config))
    version = repository / "vision_encoder" / "1"
    for file in (Path(__file__).with_name("stand_in.py"), ROOT / "build" / "vision" / "check_graph.py"):
        shutil.copy(file, version)
    onnx.save(tensorrt_graph(load_tower(read_checkpoint(CHECKPOINT))), str(version / "typed.onnx"))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tensorrt")
    shutil.copytree(ROOT / "model_repository", folder / "repository", ignore=shutil.ignore_patterns("__pycache__"))
    put_stand_in(folder / "repository")
    options = ServerOptions(
        folder / "repository",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=folder / "log",
        checkpoint=CHECKPOINT,
        model_config_name="tensorrt",
        settings={"device": "cpu"},
        extra_flags=("--cache-config=local,size=67108864",),
    )
    with Server(options) as running:
        yield running


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [scene.encode_jpeg(scene.sample(seed, "heldout")) for seed in (7, 8, 9)]


def get(server: Server, path: str) -> dict:
    with urllib.request.urlopen(f"{server.http_url}/v2/models/{path}", timeout=10) as page:
        return json.load(page)


def test_the_named_config_is_the_one_that_runs(planned: Server) -> None:
    config = get(planned, "vision_encoder/config")
    assert config["backend"] == "python" and config["max_batch_size"] == 32
    assert [tensor["name"] for tensor in config["input"]] == ["TILES"]
    assert config["response_cache"]["enable"] and config["optimization"]["cuda"]["graphs"]


def test_answers_are_those_of_the_default_config_word_for_word(
    planned: Server, server: Server, pictures: list[bytes]
) -> None:
    with Client(planned.grpc_url) as ours, Client(server.grpc_url) as default:
        asked = [([picture], question) for picture in pictures for question in QUESTIONS]
        asked.append((pictures[:2], "Is there a door?"))
        for images, question in asked:
            mine = ours.ask(images, question, max_tokens=24, max_tiles=4)
            other = default.ask(images, question, max_tokens=24, max_tiles=4)
            assert (mine.text, mine.usage, mine.finish_reason) == (other.text, other.usage, other.finish_reason)
        assert mine.text and mine.timings.vision > 0
        # Text alone goes past a blank tile.
        mine, other = (client.ask(None, "Hello?", max_tokens=6, ignore_eos=True) for client in (ours, default))
        assert mine.usage.image_tokens == 0 and (mine.text, mine.usage) == (other.text, other.usage)


def test_many_at_once_are_batched_by_tiles(planned: Server, pictures: list[bytes]) -> None:
    with Client(planned.grpc_url) as client:
        jobs = [(picture, f"{QUESTIONS[0]}{' ' * index}") for index in range(4) for picture in pictures]
        alone = [client.ask(*job, max_tokens=4, max_tiles=3).text for job in jobs]
        assert [answer.text for answer in client.ask_many(jobs, concurrency=12, max_tokens=4, max_tiles=3)] == alone


def test_more_tiles_than_the_plan_takes_are_refused(planned: Server, pictures: list[bytes]) -> None:
    with Client(planned.grpc_url) as client:
        with pytest.raises(InvalidRequest, match="tiles; the limit is 32"):
            client.ask([pictures[0]] * 8, "Is there a door?", max_tokens=1, max_tiles=12)
        with pytest.raises(InvalidRequest, match="above this server's limit of 32"):
            client.ask(pictures[0], "Is there a door?", max_tokens=1, max_tiles=33)


def test_the_response_cache_answers_a_picture_seen_before(planned: Server, pictures: list[bytes]) -> None:
    def hits() -> int:
        return int(get(planned, "vision_encoder/stats")["model_stats"][0]["inference_stats"]["cache_hit"]["count"])

    with Client(planned.grpc_url) as client:
        first = client.ask(pictures[0], "Is there a window?", max_tokens=2, max_tiles=2)
        before = hits()
        again = client.ask(pictures[0], "Is there a window?", max_tokens=2, max_tiles=2)
    assert hits() == before + 1
    assert again.text == first.text
