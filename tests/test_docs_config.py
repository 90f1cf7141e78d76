"""The manifests in docs/deploy.md can be read and fit together, and what they and docs/vllm.md configure is taken."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from asynckv.integrations.vllm.offload import options as offload_options
from asynckv.integrations.vllm.options import OF_NIXL_CONNECTOR, Options

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "deploy.md"
VLLM = (DOCS / "vllm.md").read_text()


def manifests() -> list[dict[str, Any]]:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    yaml: Any = importlib.import_module("yaml")  # no types of its own
    return list(yaml.safe_load_all(text))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in manifests() if each["kind"] == kind}


def pods() -> dict[str, dict[str, Any]]:
    return {
        name: each["spec"]["template"] for kind in ("StatefulSet", "Deployment") for name, each in named(kind).items()
    }


def test_every_object_says_what_it_is() -> None:
    for each in manifests():
        assert {"apiVersion", "kind", "metadata"} <= each.keys()
        assert each["metadata"]["name"]


def test_what_is_mounted_is_there() -> None:
    secrets, maps = named("Secret"), named("ConfigMap")
    for template in pods().values():
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys()
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
                assert volume["secret"]["defaultMode"] == 0o400
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps


def test_selectors_find_their_pods() -> None:
    labels = {name: template["metadata"]["labels"] for name, template in pods().items()}
    for kind in ("StatefulSet", "Deployment"):
        for name, each in named(kind).items():
            assert each["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
    for each in named("Service").values():
        assert any(each["spec"]["selector"].items() <= found.items() for found in labels.values())


def test_the_grace_period_covers_what_a_pod_does_at_its_end() -> None:
    for name, template in pods().items():
        spec = template["spec"]
        (container,) = spec["containers"]
        words = [*container["command"], *container.get("args", ())]
        wait = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        ends = [float(words[i + 1]) for i, word in enumerate(words) if word in ("--shutdown-timeout", "--drain-s")]
        assert float(wait[1]) + sum(ends) + 10 <= spec["terminationGracePeriodSeconds"], name


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_connector_is_configured(name: str) -> None:
    (container,) = pods()[name]["spec"]["containers"]
    option, given = container["args"]
    transfer = json.loads(given.replace("$(POD_IP)", "10.0.0.1"))
    assert option == "--kv-transfer-config"
    assert transfer["kv_connector_module_path"] == "asynckv.integrations.vllm"
    options = Options.parse(transfer["kv_connector_extra_config"])
    assert options.keys is not None
    assert options.engine_config(name).advertise == "tcp://10.0.0.1:0"


def test_the_first_steps_behind_vllm_are_taken() -> None:
    given = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", VLLM, re.DOTALL)
    before, after, offloading = (json.loads(each) for each in given)
    assert after.keys() > before.keys()
    assert Options.parse(after["kv_connector_extra_config"]).advertise == "tcp://10.0.0.1:0"
    extra = offloading["kv_connector_extra_config"]
    assert offload_options.parse(extra, "MODEL", 16).file_bytes == 10**12
    assert extra["spec_name"] in importlib.import_module(extra["spec_module_path"]).__all__


def test_every_option_behind_vllm_is_in_the_docs() -> None:
    (table,) = re.findall(r"^## Options\n(.*?)^## ", VLLM, re.DOTALL | re.MULTILINE)
    for name in (*OF_NIXL_CONNECTOR, *(each.name for each in dataclasses.fields(Options))):
        assert re.search(rf"`{name}\b", table), name
    (table,) = re.findall(r"^## Offloading.*?\n(\| option.*?)\n\n", VLLM, re.DOTALL | re.MULTILINE)
    for name in {*offload_options.OURS, *offload_options.THEIRS} - {"spec_name", "spec_module_path"}:
        assert re.search(rf"`{name}\b", table), name
