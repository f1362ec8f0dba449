"""Prometheus' and Grafana's files fit each other; the server's own metric names are checked in tests/server."""

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/tessera.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
DATASOURCE = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]


def test_prometheus_scrapes_the_metrics_port_of_the_server():
    jobs = {job["job_name"]: job for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]}
    (target,) = jobs["tessera"]["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in SERVICES
    for name in ("server-gpu", "server-tensorrt"):
        assert "server" in SERVICES[name]["networks"]["tessera"]["aliases"]
    assert f"127.0.0.1:{port}:{port}" in SERVICES["server"]["ports"]


def test_grafana_finds_its_datasource_and_dashboards():
    assert DATASOURCE["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/tessera.yml").read_text())["providers"][0]
    targets = {mount.split(":")[1]: mount.split(":")[0] for mount in SERVICES["grafana"]["volumes"]}
    assert (ROOT / targets[provider["options"]["path"]] / "tessera.json").is_file()
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / targets[str(home.parent)] / home.name).is_file()


def test_every_panel_asks_something_of_the_provisioned_datasource():
    assert len(PANELS) >= 10
    for panel in PANELS:
        assert panel["datasource"]["uid"] == DATASOURCE["uid"], panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["expr"] for target in panel["targets"])


def test_ids_are_unique_and_panels_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & taken, panel["title"]
        assert box["x"] + box["w"] <= 24
        taken |= cells
