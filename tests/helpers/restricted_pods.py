"""The restricted profile of Kubernetes' Pod Security Standards (1.34), which includes the baseline one.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator
from typing import Any

CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = {"RuntimeDefault", "Localhost"}
APPARMOR = {None, "RuntimeDefault", "Localhost"}
SELINUX = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
}
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"


def pods_in(resource: Any) -> Iterator[dict[str, Any]]:
    """Yield each pod or template of one in a resource, whatever its kind."""
    if isinstance(resource, dict):
        if "containers" in resource.get("spec", {}):
            yield resource
        for value in resource.values():
            yield from pods_in(value)
    elif isinstance(resource, list):
        for value in resource:
            yield from pods_in(value)


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every container of a pod, of whichever kind."""
    return [one for kind in CONTAINERS for one in pod["spec"].get(kind, [])]


def violations(pod: dict[str, Any]) -> list[str]:
    """Return what the restricted profile forbids of a pod; an empty list where it admits the pod."""
    spec, own = pod["spec"], pod["spec"].get("securityContext", {})
    faults = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    faults += [f"volume {one['name']}" for one in spec.get("volumes", []) if set(one) - {"name"} - VOLUMES]
    faults += [f"sysctl {one['name']}" for one in own.get("sysctls", []) if one["name"] not in SYSCTLS]
    annotations = pod.get("metadata", {}).get("annotations", {})
    faults += [
        f"AppArmor of {name}"
        for name, value in annotations.items()
        if name.startswith(APPARMOR_ANNOTATION)
        and value != "runtime/default"
        and not value.startswith("localhost/")
    ]
    faults += _of_any(own, "the pod")
    for one in containers_of(pod):
        faults += [f"{one['name']}: {fault}" for fault in _of_container(one, own)]
    return faults


def _of_any(context: dict[str, Any], where: str) -> list[str]:
    """Return the faults of what a pod and a container may both say."""
    linux = context.get("seLinuxOptions", {})
    found = {
        "runAsNonRoot": context.get("runAsNonRoot") is False,
        "runAsUser": context.get("runAsUser") == 0,
        "seccompProfile": context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in SECCOMP,
        "appArmorProfile": context.get("appArmorProfile", {}).get("type") not in APPARMOR,
        "seLinuxOptions": linux.get("type") not in SELINUX or linux.get("user") or linux.get("role"),
        "hostProcess": context.get("windowsOptions", {}).get("hostProcess"),
    }
    return [f"{name} of {where}" for name, is_wrong in found.items() if is_wrong]


def _of_container(container: dict[str, Any], pods: dict[str, Any]) -> list[str]:
    context = container.get("securityContext", {})
    capabilities = context.get("capabilities", {})
    probes = [container.get(f"{name}Probe") for name in ("liveness", "readiness", "startup")]
    hooks = [*probes, *container.get("lifecycle", {}).values()]
    actions = [action for hook in filter(None, hooks) for action in hook.values() if isinstance(action, dict)]
    found = {
        "privileged": context.get("privileged"),
        "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is not False,
        "runAsNonRoot is not set": not (pods | context).get("runAsNonRoot"),
        "seccompProfile is not set": "seccompProfile" not in pods | context,
        "capabilities that stay": "ALL" not in capabilities.get("drop", []),
        "capabilities": set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
        "procMount": context.get("procMount", "Default") != "Default",
        "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
        "host of a probe": any(action.get("host") for action in actions),
    }
    return [name for name, is_wrong in found.items() if is_wrong] + _of_any(context, "the container")
