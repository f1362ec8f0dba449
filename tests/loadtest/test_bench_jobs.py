"""The benchmark of questions beside a job, against a server that answers at once."""

from __future__ import annotations

import json
from contextlib import contextmanager

from bench import jobs as bench_jobs
from serving import Running
from standin_server import standin


def test_what_questions_wait_and_what_the_job_loses(monkeypatch, capsys):
    @contextmanager
    def serve(_):
        with standin() as address:
            yield Running([address], [], [], "", 0.0)

    monkeypatch.setattr(bench_jobs, "serve", serve)
    # What the job loses here, and how long a starved machine takes, is chance.
    monkeypatch.setattr(bench_jobs, "BARS", dict.fromkeys(bench_jobs.BARS, float("inf")))
    arguments = ["--gpus", "", "--concurrency", "4", "--least", "200", "--processes", "1", "--rate", "50"]
    monkeypatch.setattr("sys.argv", ["jobs", *arguments, "--seed", "3"])
    assert bench_jobs.main() == 0
    figures = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(figures) == {"jobs.ttft_p50_ms", "jobs.ttft_p99_ms", "jobs.loss_pct", "jobs.equal.ttft_p50_ms"}
    p50, p99 = figures["jobs.ttft_p50_ms"], figures["jobs.ttft_p99_ms"]
    assert 0 < p50["value"] <= p99["value"] and p50["questions"] > 0
    loss = figures["jobs.loss_pct"]
    alone = sum(loss["alone_req_s"]) / 2
    assert abs(loss["value"] - 100 * (1 - loss["beside_req_s"] / alone)) < 0.1
