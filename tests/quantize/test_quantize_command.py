"""`tessera quantize` as a user runs it: what it prints, what it leaves, how it fails."""

import json

import pytest
import quantize_fakes
from tiny_qwen2_vl import write_model

from tessera_command.cli import main
from tessera_evaluation.datasets import folder_items
from tessera_quantize import cli


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera_quantize.samples.MAX_TOKENS", 4)
    source = quantize_fakes.checkpoint(tmp_path, "native qwen2")
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    numbers = ["--group-size", "32", "--calibration", "3", "--held-out", "2", "--device", "cpu"]
    return ["quantize", str(source), str(tmp_path / "out"), "--pictures", str(pictures), *numbers]


def test_a_checkpoint_and_its_report(arguments, tmp_path, capsys):
    policies = ["--policy", "reference", "--policy", "reference,max_tiles=1"]
    assert main([*arguments, "--method", "gptq", *policies]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = tmp_path / "out" / "quantization"
    assert printed == json.loads((written / "report.json").read_text())
    assert printed["questions"] == {"calibration": 3, "held_out": 2}
    assert [row["name"] for row in printed["rows"]] == ["original", "gptq", "rtn", "gptq, words alone"]
    original, gptq, rtn, words = printed["rows"]
    assert original["kl"] == 0 and gptq["kl"] > 0 and original["bytes"] > gptq["bytes"]
    assert all(share < rtn["errors"][0][name] for name, share in gptq["errors"][0].items())
    assert gptq["errors"] != words["errors"]
    assert (written / "errors.svg").read_text().count("<polyline") == 3
    page = (written / "report.md").read_text()
    for row in printed["rows"]:
        assert f"| {row['name']} |" in page
        assert len(row["recall"]) == 2 and all(figures["questions"] == 2 for figures in row["recall"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "out", "pictures"]


def test_a_model_of_native_resolution(arguments, tmp_path, capsys):
    arguments[1] = str(tmp_path / "qwen2_vl")
    write_model(tmp_path / "qwen2_vl", max_pixels=20 * 28 * 28)
    assert main([*arguments, "--method", "rtn", "--policy", "native"]) == 1
    assert "tile policy: unknown key 'name'; this model's are min_pixels, max_pixels" in capsys.readouterr().err
    assert not (tmp_path / "out.work").exists()
    assert main([*arguments, "--method", "gptq", "--no-comparison", "--policy", "max_pixels=7840"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [list(row["recall"]) for row in rows] == [["max_pixels=7840"]] * 2


def test_questions_are_either_calibrated_on_or_judged_by(arguments):
    job = cli._job(cli._parser().parse_args([*arguments[1:], "--method", "rtn"]))
    assert len(job.calibration) == 3 and len(job.held_out) == 2
    assert not set(job.calibration) & set(job.held_out)
    judged = cli._job(cli._parser().parse_args([*arguments[1:], "--method", "rtn", "--judge", arguments[4]]))
    assert len(judged.calibration) == 3 and list(judged.held_out) == folder_items(job.source.parent / "pictures", 2)


def test_faults_are_one_line(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["quantize", "Org/Other", *arguments[2:], "--method", "rtn"]) == 1
    assert "has no model of this name: fetch it by `hf download Org/Other`" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert main([*arguments, "--method", "awq"]) == 1
    assert capsys.readouterr().err.startswith(f"tessera quantize: {tmp_path / 'out'} exists")
    arguments[4] = str(tmp_path / "nothing")
    assert main([*arguments, "--method", "awq"]) == 2
    assert f"there is no file or folder {tmp_path}/nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--method", "int3"])
