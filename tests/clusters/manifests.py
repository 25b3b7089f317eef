# SPDX-License-Identifier: Apache-2.0
"""Manifests of KubeRay, and what is wrong with them.

Kubernetes' own objects (pod templates, claims) are checked by its published JSON schemas, `kubernetes-validate`. No
test knows what an operator, an admission webhook or a scheduler says.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import yaml

KUBERNETES = "1.37"
DEVICE = "nvidia.com/gpu"


def schema_problems(where: str, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Problems of an object of Kubernetes' own, by its JSON schema; unknown fields are problems."""
    try:
        kubernetes_validate.validate(dict(manifest), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{where}.{'.'.join(map(str, error.path))}: {error.message[:200]}"


def group_problems(group: Mapping[str, Any], claims: set[str]) -> Iterator[str]:
    """Problems of a group of Ray's pods: their schema, mounts without a volume, volumes of no claim, Ray's options."""
    where, template = group.get("groupName", "head"), group["template"]
    for option, value in group["rayStartParams"].items():
        if not isinstance(value, str):
            yield f"{where}.rayStartParams.{option} must be a string, got {value!r}"
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
    if wrong := [*schema_problems(where, pod)]:
        yield from wrong
        return
    spec = template["spec"]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: no volume {mount['name']}"
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in claims:
            yield f"{where}: volume {volume['name']} is of no claim of the file"


def manifest_problems(text: str) -> list[str]:
    """Problems of a file with claims and one RayJob."""
    objects = [*yaml.safe_load_all(text)]
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    cluster = ray_job(text)["rayClusterSpec"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    found = [problem for group in groups for problem in group_problems(group, claims)]
    return found + [problem for one in objects if one["kind"] != "RayJob" for problem in schema_problems("claim", one)]


def ray_job(text: str) -> Mapping[str, Any]:
    """`spec` of the file's RayJob."""
    [job] = (one for one in yaml.safe_load_all(text) if one["kind"] == "RayJob")
    return job["spec"]


def devices_of(group: Mapping[str, Any]) -> dict[str, int]:
    """Devices of a worker group, and its custom resources as Ray reads them, over its nodes."""
    [container] = group["template"]["spec"]["containers"]
    custom = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
    nodes = group["replicas"]
    return {DEVICE: nodes * int(container["resources"]["limits"][DEVICE]), **{k: nodes * v for k, v in custom.items()}}
