"""What is reported of a run, by name, and which pictures it shows."""

import counting
import measuring
from closed_loop import Answered
from gpu_power import Draw
from workloads import WORKLOADS


def run(streamed: bool) -> counting.Run:
    """Ten in flight, one answer each second, that took from 1 to 2 s; the last hundredth 4 s."""
    requests = counting.requests(10)
    answers = [
        Answered(
            100.0 + k, 4.0 if k % 50 == 20 else 1.0 + (k % 50) / 50, 0.25 if streamed else None, 256, 64, (3.0,) * 6
        )
        for k in range(1, requests + 1)
    ]
    return counting.count(100.0, answers, 10)


def test_a_workload_of_short_answers_on_a_gpu(printed, monkeypatch):
    monkeypatch.setattr("sys.argv", ["load.py", "--workloads", "W1", "W2"])
    measuring.report(WORKLOADS["W1"], run(False), Draw(700.0, 1500.4, 0.98), "serve.W1.bf16", gpus=1)
    found = printed()
    assert {name: (line["value"], line["unit"]) for name, line in found.items()} == {
        "serve.W1.bf16.req_s": (1.0, "req/s"),
        "serve.W1.bf16.whole": (1.0, "req/s"),
        "serve.W1.bf16.p99_over_p50": (2.632, "ratio"),
        "serve.W1.bf16.watts": (700.0, "W"),
        "serve.W1.bf16.mhz": (1500, "MHz"),
        "serve.W1.bf16.joules": (700.0, "J/request"),
    }
    steady = found["serve.W1.bf16.req_s"]
    assert (steady["p50_ms"], steady["p99_ms"]) == (1520.0, 4000.0)
    assert steady["stages_p50"]["vision_queue_ms"] == 3.0 and len(steady["stages_p50"]) == 6
    assert (steady["requests"], steady["gpus"]) == (50, 1)
    assert steady["command"] == 'make bench NAME=load ARGS="--workloads W1 W2"'


def test_a_streamed_workload_without_a_gpu(printed):
    measuring.report(WORKLOADS["W4b"], run(True), None, "serve.W4b.bf16")
    assert {name: (line["value"], line["unit"]) for name, line in printed().items()} == {
        "serve.W4b.bf16.tok_s": (256.0, "tok/s"),
        "serve.W4b.bf16.whole": (256.0, "tok/s"),
        "serve.W4b.bf16.ttft_p50_ms": (250.0, "ms"),
        "serve.W4b.bf16.p99_over_p50": (2.632, "ratio"),
    }
