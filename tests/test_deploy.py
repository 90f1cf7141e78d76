"""Files of deploy/ are what their readers take, confine what they start and let it end; compose's services run."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asynckv.config import LeaseConfig
from asynckv.edges.zmq import make_pair
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.options import Options
from asynckv.keys import write_pair
from asynckv.tools.bench.processes import Child, Processes
from asynckv.version import VERSION

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
LEASE = LeaseConfig()
TINY_DRAIN_S = 5.0
"""What `TinyEngine` gives to requests under way."""
START_S = 300.0
"""Processes import much, and a busy machine takes long for it."""

yaml, jsonschema, kubernetes_validate, dockerfile_parse, plugins, dashboard, encoder = map(
    importlib.import_module,
    (
        *("yaml", "jsonschema", "kubernetes_validate", "dockerfile_parse", "grafana_foundation_sdk.cog.plugins"),
        *("grafana_foundation_sdk.models.dashboard", "grafana_foundation_sdk.cog.encoder"),
    ),
)  # mypy knows no types of most
plugins.register_default_plugins()


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def end_s(words: Sequence[str]) -> float:
    """How long a command may take after SIGTERM: what it gives to requests, and then to readers."""
    given = [float(words[i + 1]) for i, word in enumerate(words) if word in ("--shutdown-timeout", "--drain-s")]
    (drain_s,) = given or [TINY_DRAIN_S]
    return drain_s + (0 if "proxy" in words else LEASE.grant_s) + 1


def check_connector(words: Sequence[str]) -> None:
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_module_path"] == "asynckv.integrations.vllm"
    options = Options.parse(transfer["kv_connector_extra_config"])
    assert options.keys is not None
    assert options.engine_config("engine").advertise == "tcp://10.0.0.1:0"


# -- what each file has to be ----------------------------------------------------------------------------------


def check_kubernetes(path: Path) -> None:
    for each in documents(path):
        if each["kind"] == "Kustomization":
            assert {image["newTag"] for image in each["images"]} == {VERSION}
            assert {*each["resources"], path.name} == {other.name for other in path.parent.glob("*.yaml")}
            continue
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        if each["kind"] in ("StatefulSet", "Deployment"):
            template = each["spec"]["template"]
            assert each["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            check_pod(template["spec"])


def check_pod(spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    words = [*container["command"], *container["args"]]
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert float(before[-1]) + end_s(words) <= spec["terminationGracePeriodSeconds"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for each in (container, *spec.get("initContainers", ())):
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes.keys()
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    if "vllm" in words:
        check_connector([word.replace("$(POD_IP)", "10.0.0.1") for word in words])
        assert volumes["secret"]["secret"]["defaultMode"] == 0o400


def check_compose(path: Path) -> None:
    (found,) = documents(path)
    schema = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    jsonschema.validate(found, json.loads(schema))
    for name, service in found["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        if name != "keys":
            assert service["healthcheck"]["test"], name
            assert end_s(service["command"]) <= float(service["stop_grace_period"].removesuffix("s")), name


def check_systemd(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    values = dict(re.findall(r"^(\w+)=(.*)$", path.with_name("engine.env").read_text(), re.MULTILINE))
    words = shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], unit["ExecStart"]))
    assert end_s(words) <= float(unit["TimeoutStopSec"])
    assert unit["KillMode"] == "mixed"  # workers are ended by their server
    assert unit["NoNewPrivileges"] == "yes"
    if "vllm" in unit["ExecStart"]:
        check_connector(words)
        assert LEASE.lease_s < float(values["LINGER_S"]) <= float(unit["TimeoutStopSec"])
        assert unit["LimitMEMLOCK"] == "infinity"
        assert not {"PrivateDevices", "DevicePolicy", "ProtectClock", "PrivateUsers"} & unit.keys()
        assert "AF_NETLINK" in unit["RestrictAddressFamilies"]
    if shutil.which("systemd-analyze"):  # a test says where it is not
        copy = path.with_name(path.name.replace("@.", "@one."))
        copy.write_text(re.sub(r"/opt/asynckv/bin/\w+", "/bin/true", path.read_text()))
        verify = ["systemd-analyze", "verify", str(copy)]
        done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def check_dockerfile(path: Path) -> None:
    kept = [line[1:] for line in path.with_name("Dockerfile.dockerignore").read_text().split() if line[0] == "!"]
    users: dict[str, str] = {}
    stage = ""
    for step in dockerfile_parse.DockerfileParser(fileobj=io.BytesIO(path.read_bytes())).structure:
        words, value = step["value"].split(), step["value"]
        if step["instruction"] == "FROM":
            stage = words[-1] if "AS" in words else "the last one"
            users[stage] = users.get(words[0], "root")
        elif step["instruction"] == "USER":
            users[stage] = words[0]
        elif step["instruction"] == "COPY" and "--from" not in value:
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch.fnmatch(f"/{source}/", f"{each}/*") for each in kept), source
        elif step["instruction"] == "RUN":
            for installed in re.findall(r"pip (?:install|wheel)", value):
                assert re.search("--constraint|PIP_CONSTRAINT", value), installed
    assert {name: users[name] for name in ("tiny", "the last one")} == dict.fromkeys(
        ("tiny", "the last one"), "65532:65532"
    )


def check_grafana(path: Path) -> None:
    """Grafana's own types read it, and lose nothing of it on the way."""
    said = json.loads(path.read_text())
    read = json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(said)))
    for variable in said["templating"]["list"]:
        variable.pop("definition", None)  # shown in the list of variables; only newer types know it
    assert_holds(read, said, "dashboard")


def assert_holds(whole: Any, part: Any, where: str) -> None:
    if isinstance(part, dict):
        assert part.keys() <= whole.keys(), where
        for key in part:
            assert_holds(whole[key], part[key], f"{where}.{key}")
    elif isinstance(part, list):
        assert len(part) == len(whole), where
        for i, each in enumerate(part):
            assert_holds(whole[i], each, f"{where}[{i}]")
    else:
        assert whole == part, where


CHECKS = {
    "Dockerfile": check_dockerfile,
    "compose.yaml": check_compose,
    "grafana/*.json": check_grafana,
    "kubernetes/*.yaml": check_kubernetes,
    "systemd/*.service": check_systemd,
}


def check(folder: Path, name: str) -> None:
    (found,) = (check for pattern, check in CHECKS.items() if fnmatch.fnmatch(name, pattern))
    found(folder / name)


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEPLOY, tmp_path / "deploy"))


NAMES = sorted(str(path.relative_to(DEPLOY)) for pattern in CHECKS for path in DEPLOY.glob(pattern))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_what_its_reader_takes_and_lets_its_processes_end(deploy: Path, name: str) -> None:
    check(deploy, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("Dockerfile", "COPY asynckv asynckv", "COPY asynckw asynckv"),
        ("Dockerfile", "COPY scripts scripts", "COPY .ci scripts"),  # not in the context
        ("Dockerfile", "USER 65532:65532", "USER root"),
        ("Dockerfile", "--constraint /opt/asynckv/pins.txt", ""),
        ("compose.yaml", "stop_grace_period: 20s", "stop_grace_period: 10s"),
        ("compose.yaml", "cap_drop", "cap_dropped"),
        ("compose.yaml", "interval: 5s", "interval: [5]"),
        ("grafana/asynckv.json", '"gridPos"', '"gridPosition"'),
        ("grafana/asynckv.json", '"schemaVersion"', '"version_of_schema"'),
        ("kubernetes/kustomization.yaml", "network.yaml", "networks.yaml"),
        ("kubernetes/network.yaml", "podSelector", "pods"),
        ("kubernetes/prefill.yaml", "replicas: 2", "replicas: two"),
        ("kubernetes/prefill.yaml", "readinessProbe", "readynessProbe"),
        ("kubernetes/prefill.yaml", "terminationGracePeriodSeconds: 90", "terminationGracePeriodSeconds: 75"),
        ("kubernetes/prefill.yaml", "runAsNonRoot: true", "runAsNonRoot: false"),
        ("kubernetes/decode.yaml", '"advertise"', '"advertised"'),
        ("kubernetes/router.yaml", "drop: [ALL]", "drop: []"),
        ("systemd/asynckv-engine@.service", "TimeoutStopSec=110", "TimeoutStopSec=100"),
        ("systemd/asynckv-engine@.service", "LimitMEMLOCK=infinity", "LimitMEMLOCK=64K"),
        ("systemd/asynckv-engine@.service", "${PORT}", "${PORTS}"),
        pytest.param(
            "systemd/asynckv-router.service", "RestartSec=1", "RestartSecs=1", marks=needs("systemd-analyze")
        ),
    ],
)
def test_a_mistake_in_a_file_is_noticed(deploy: Path, name: str, right: str, wrong: str) -> None:
    text = (deploy / name).read_text()
    assert right in text
    (deploy / name).write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KeyError, ConfigError, jsonschema.ValidationError)):
        check(deploy, name)


def test_a_prefill_engine_stays_until_what_it_has_lent_is_fetched_or_over() -> None:
    (found,) = (each for each in documents(DEPLOY / "kubernetes/prefill.yaml") if each["kind"] == "StatefulSet")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert float(container["lifecycle"]["preStop"]["exec"]["command"][-1]) > LEASE.lease_s


@needs("kubectl")
@pytest.mark.slow
def test_kustomize_makes_manifests_that_fit_together(deploy: Path) -> None:
    folder = deploy / "kubernetes"
    for name in ("prefill", "decode"):
        write_pair(folder / "keys", name, make_pair())
    built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=True)
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(built.stdout)}
    templates = [each["spec"]["template"] for each in objects.values() if "template" in each.get("spec", {})]
    for each in objects.values():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            spec = each["spec"]
            chosen = (spec.get("selector") or spec["podSelector"]).copy()
            chosen = chosen.get("matchLabels", chosen)
            assert any(chosen.items() <= template["metadata"]["labels"].items() for template in templates)
    for template in templates:
        for volume in template["spec"]["volumes"]:
            assert "secret" not in volume or ("Secret", volume["secret"]["secretName"]) in objects
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in objects
        assert all(each["image"].endswith(f":{VERSION}") for each in template["spec"]["containers"])


@needs("systemd-analyze")
def test_units_are_looked_at_by_systemd_and_may_read_by_cma() -> None:
    """The first is part of the checks above; this says so where it is not."""
    said = subprocess.run(["systemd-analyze", "syscall-filter", "@ipc"], capture_output=True, text=True, check=True)
    assert "process_vm_readv" in said.stdout


# -- compose's services, as processes --------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Composed:
    """Services of compose.yaml as processes of this host: their names and addresses become ports of loopback."""

    def __init__(self, keys: Path) -> None:
        (found,) = documents(DEPLOY / "compose.yaml")
        self.services: dict[str, dict[str, Any]] = found["services"]
        self.ports = {name: free_port() for name in self.services}
        self.running: dict[str, Child] = {}
        self._keys, self._all = keys, list[Processes]()

    def said(self, name: str, words: Sequence[str]) -> list[str]:
        """What compose.yaml says, on this host."""
        text = json.dumps(list(words)).replace("/keys", str(self._keys)).replace("$$", "$").replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"//(prefill|decode):8000", lambda each: f"//127.0.0.1:{self.ports[each[1]]}", text)
        text = re.sub(r"tcp://(prefill|decode):0", "tcp://127.0.0.1:0", text)
        own = str(self.ports[name])
        return [own if word == "8000" else word.replace(":8000/", f":{own}/") for word in json.loads(text)]

    async def start(self, name: str) -> Child:
        service = self.services[name]
        given = {key: value.replace("eth0", "lo") for key, value in service.get("environment", {}).items()}
        path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
        self._all.append(processes := Processes({"PATH": path, **given}))
        self.running[name] = await processes.start_command(name, self.said(name, service["command"]))
        return self.running[name]

    async def healthy(self, name: str) -> None:
        test = self.said(name, self.services[name]["healthcheck"]["test"][1:])
        while True:
            assert self.running[name].status is None, await self.running[name].ended()
            asked = await asyncio.create_subprocess_exec(*test, stderr=asyncio.subprocess.DEVNULL)
            if await asked.wait() == 0:
                return

    async def stop(self, name: str) -> None:
        """As `docker compose stop` does."""
        os.kill(self.running[name].pid, signal.SIGTERM)
        async with asyncio.timeout(float(self.services[name]["stop_grace_period"].removesuffix("s"))):
            assert (await self.running[name].ended()).endswith("status 0")

    async def aclose(self) -> None:
        assert [pid for each in reversed(self._all) for pid in await each.stop()] == []


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(400)
async def test_the_services_of_compose_answer_and_stop_in_time(tmp_path: Path) -> None:
    async with contextlib.aclosing(Composed(tmp_path / "keys")) as compose, aiohttp.ClientSession() as client:
        (tmp_path / "keys").mkdir()
        assert (await (await compose.start("keys")).ended()).endswith("status 0")
        await asyncio.gather(*map(compose.start, ("prefill", "decode")))
        async with asyncio.timeout(START_S):
            for name in ("prefill", "decode"):
                assert await compose.running[name].reader.readline(), name  # it says where it listens
                await compose.healthy(name)
            await compose.start("router")
            await compose.healthy("router")
        urls = {name: f"http://127.0.0.1:{port}" for name, port in compose.ports.items()}
        async with client.get(f"{urls['router']}/health/ready") as answer:
            assert answer.status == 200
        body = {"prompt": "Once upon a time", "max_tokens": 9}
        async with client.post(f"{urls['router']}/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert len((await answer.json())["choices"][0]["text"]) == 9
        shown = {name: await (await client.get(f"{urls[name]}/metrics")).text() for name in ("router", "decode")}
        assert re.search(r'^asynckv_pulls_ended_total\{.*reason="complete".*\} 1\.0$', shown["decode"], re.MULTILINE)
        asked = re.findall(r"\bpd_proxy_\w+(?=[ {])", (DEPLOY / "prometheus/alerts.yml").read_text())
        assert [name for name in asked if f"\n{name}" not in shown["router"]] == []
        for name in ("router", "decode", "prefill"):
            await compose.stop(name)


@pytest.mark.slow
def test_the_router_takes_what_it_is_given(tmp_path: Path) -> None:
    (found,) = (each for each in documents(DEPLOY / "kubernetes/router.yaml") if each["kind"] == "Deployment")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    (unit,) = re.findall("^ExecStart=/opt/asynckv/bin/(.*)$", (DEPLOY / "systemd/asynckv-router.service").read_text(), re.M)
    for words in ([*container["command"], *container["args"]], unit.split()):
        told = [str(DEPLOY / "systemd/engines") if word.startswith("/etc/") else word for word in words]
        run = [sys.executable, "-m", *told, "--attempts", "0"]  # the one thing that is wrong with it
        done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
        assert done.returncode == 2
        assert "--attempts" in done.stderr
