"""Files of deploy/ are what their readers take, confine what they start and let it end; compose's services run."""

from __future__ import annotations

import asyncio
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
from importlib.metadata import packages_distributions, requires
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asynckv.config import LeaseConfig
from asynckv.edges.control.zmq import make_pair
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.options import Options
from asynckv.keys import write_pair
from asynckv.tools.bench.processes import Child, Processes
from asynckv.tools.proxy.limits import Limits
from asynckv.version import VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
LEASE = LeaseConfig()
REFRESH_S = Limits().refresh_s
"""After this a router has heard of a change of DNS or of its file."""
METRICS_PORT = 9400
DNS_S = 30.0
"""For so long CoreDNS and other caches keep an answer."""
BODY_COST = 3
"""The router's memory for a body, as a multiple of its size."""
NEEDED = {re.split("[^a-z-]", each.lower())[0] for each in requires("asynckv") or ()}
TINY_DRAIN_S = 5.0
"""Seconds that `TinyEngine` gives to requests under way."""
START_S = 300.0
"""Processes import much, and a busy machine takes long for it."""

# They have no types, but for Grafana's.
yaml, jsonschema = importlib.import_module("yaml"), importlib.import_module("jsonschema")
kubernetes_validate = importlib.import_module("kubernetes_validate")
dockerfile_parse = importlib.import_module("dockerfile_parse")
grafana = importlib.import_module("grafana_foundation_sdk.models.dashboard")
grafana_json = importlib.import_module("grafana_foundation_sdk.cog.encoder")
importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def end_s(words: Sequence[str]) -> float:
    given = [float(words[i + 1]) for i, word in enumerate(words) if word in ("--shutdown-timeout", "--drain-s")]
    (drain_s,) = given or [TINY_DRAIN_S]
    return drain_s + (0 if "proxy" in words else LEASE.grant_s) + 1


def check_connector(words: Sequence[str], port: int) -> None:
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_module_path"] == "asynckv.integrations.vllm"
    options = Options.parse(transfer["kv_connector_extra_config"])
    assert options.keys is not None
    assert options.engine_config("engine").advertise == "tcp://10.0.0.1:0"
    assert options.metrics is not None
    assert (options.metrics.port, options.metrics.allow_remote) == (port, True)


# -- what each file has to be ----------------------------------------------------------------------------------


def check_kubernetes(path: Path) -> None:
    for each in documents(path):
        if each["kind"] == "Kustomization":
            assert {image["newTag"] for image in each["images"]} == {VERSION}
            assert {*each["resources"], path.name} == {other.name for other in path.parent.glob("*.yaml")}
            continue
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        if each["kind"] in ("StatefulSet", "Deployment"):
            assert each["spec"]["replicas"] >= 2  # the last address of a name is kept, though its pod ends
            (spread,) = each["spec"]["template"]["spec"]["topologySpreadConstraints"]
            assert (
                spread["labelSelector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
            )
            check_pod(each["metadata"]["name"], each["spec"]["template"]["spec"])
        if each["kind"] == "NetworkPolicy":
            (watch,) = (rule for rule in each["spec"]["ingress"] if "namespaceSelector" in rule["from"][0])
            assert any(port["port"] == METRICS_PORT and port["endPort"] > METRICS_PORT for port in watch["ports"])


def check_pod(name: str, spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    words = [*container["command"], *container["args"]]
    before_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before_s + end_s(words) <= spec["terminationGracePeriodSeconds"]
    assert before_s >= {"prefill": REFRESH_S + DNS_S + LEASE.lease_s, "decode": REFRESH_S + DNS_S, "router": 1}[name]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for each in (container, *spec.get("initContainers", ())):
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes.keys()
        assert each["securityContext"] == confined
    if name == "router":
        bodies_mib = float(words[words.index("--max-bodies-mib") + 1])
        assert BODY_COST * bodies_mib / 1024 + 1 <= float(container["resources"]["limits"]["memory"].removesuffix("Gi"))
        assert "httpGet" not in container["livenessProbe"]  # which a busy router answers late
    else:
        check_connector([word.replace("$(POD_IP)", "10.0.0.1") for word in words], METRICS_PORT)
        assert volumes["secret"]["secret"]["defaultMode"] == 0o400


def check_discovery(path: Path) -> None:
    """Relabelling leaves the right ports of the manifests' pods to each job."""
    pods = [
        each["spec"]["template"]
        for name in path.parents[1].glob("kubernetes/*.yaml")
        for each in documents(name)
        if "template" in each.get("spec", {})
    ]
    found = set[tuple[str, str, int]]()
    for job in documents(path)[0]["scrape_configs"]:
        ((key, value),) = (each["label"].split("=") for each in job["kubernetes_sd_configs"][0]["selectors"])
        (keep,) = (each for each in job["relabel_configs"] if each.get("action") == "keep")
        assert keep["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
        for pod in pods:
            labels = pod["metadata"]["labels"]
            for port in pod["spec"]["containers"][0]["ports"] if labels.get(key) == value else ():
                if re.fullmatch(keep["regex"], port["name"]):
                    found.add((job["job_name"], labels["app"], port["containerPort"]))
    engines = ("prefill", "decode")
    wanted = {("pd_proxy", "router", 8080), *(("asynckv", each, METRICS_PORT) for each in engines)}
    assert found == wanted | {("vllm", each, 8000) for each in engines}


def check_compose(path: Path) -> None:
    (found,) = documents(path)
    schema = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    jsonschema.validate(found, json.loads(schema))
    for name, service in found["services"].items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        if name != "keys":
            assert service["healthcheck"]["test"], name
            assert end_s(service["command"]) <= float(service["stop_grace_period"].removesuffix("s")), name


def check_systemd(path: Path) -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", path.read_text().replace("\\\n", " "), re.MULTILINE))
    env_file = path.with_name("engine.env")
    env = dict(re.findall(r"^(\w+)=(.*)$", env_file.read_text(), re.MULTILINE))
    words = shlex.split(re.sub(r"\$\{(\w+)\}", lambda found: env[found[1]], unit["ExecStart"]))
    assert end_s(words) <= float(unit["TimeoutStopSec"])
    assert (unit["KillMode"], unit["NoNewPrivileges"]) == ("mixed", "yes")  # workers are ended by their server
    if "vllm" in unit["ExecStart"]:
        check_connector(words, METRICS_PORT)
        prefill_s, decode_s = map(float, re.findall(r"LINGER_S=(\d+)", env_file.read_text()))
        assert REFRESH_S + LEASE.lease_s < prefill_s <= float(unit["TimeoutStopSec"])
        assert decode_s > REFRESH_S
        assert unit["LimitMEMLOCK"] == "infinity"
        assert "AF_NETLINK" in unit["RestrictAddressFamilies"]
        assert not {"PrivateDevices", "DevicePolicy", "ProtectClock", "PrivateUsers"} & unit.keys()
    else:
        assert unit["RestartPreventExitStatus"] == "2"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian and Ubuntu: apt-get install systemd)")
    copy = path.with_name(path.name.replace("@.", "@one."))
    copy.write_text(re.sub(r"/opt/asynckv/bin/\w+", "/bin/true", path.read_text()))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def check_dockerfile(path: Path) -> None:
    kept = [line[1:] for line in path.with_name("Dockerfile.dockerignore").read_text().split() if line[0] == "!"]
    users, stage = dict[str, str](), ""
    for step in dockerfile_parse.DockerfileParser(fileobj=io.BytesIO(path.read_bytes())).structure:
        value, words = step["value"], step["value"].split()
        match step["instruction"]:
            case "FROM":
                stage = words[-1] if "AS" in words else "final"
            case "USER":
                users[stage] = value
            case "RUN" if re.search("pip (install|wheel)", value):
                assert re.search("--constraint|PIP_CONSTRAINT", value)
            case "COPY" if "--from" not in value:
                for source in words[:-1]:
                    assert (ROOT / source).exists(), source
                    assert any(fnmatch.fnmatch(f"/{source}/", f"{each}/*") for each in kept), source
    assert users == dict.fromkeys(("router", "tiny", "final"), "65532:65532")


def check_grafana(path: Path) -> None:
    """Grafana's own types read it, and lose nothing of it on the way."""
    said = json.loads(path.read_text())
    for variable in said["templating"]["list"]:
        variable.pop("definition", None)  # only newer types know it
    check_holds(json.loads(grafana_json.JSONEncoder().encode(grafana.Dashboard.from_json(said))), said)


def check_holds(whole: Any, part: Any) -> None:
    if isinstance(part, dict | list):
        assert len(part) == len(whole) or isinstance(part, dict)
        for key in part if isinstance(part, dict) else range(len(part)):
            check_holds(whole[key], part[key])
    else:
        assert whole == part


CHECKS = {
    "Dockerfile": check_dockerfile,
    "compose.yaml": check_compose,
    "grafana/*.json": check_grafana,
    "kubernetes/*.yaml": check_kubernetes,
    "prometheus/kubernetes.yml": check_discovery,
    "systemd/*.service": check_systemd,
}


def check(folder: Path, name: str) -> None:
    (found,) = (check for pattern, check in CHECKS.items() if fnmatch.fnmatch(name, pattern))
    found(folder / name)


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEPLOY, tmp_path / "deploy"))


@pytest.mark.parametrize("name", sorted(str(x.relative_to(DEPLOY)) for pattern in CHECKS for x in DEPLOY.glob(pattern)))
def test_a_file_is_what_its_reader_takes_and_lets_its_processes_end(deploy: Path, name: str) -> None:
    check(deploy, name)


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
        ("kubernetes/prefill.yaml", "terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 105"),
        ("kubernetes/prefill.yaml", '[sleep, "65"]', '[sleep, "64"]'),
        ("kubernetes/prefill.yaml", "runAsNonRoot: true", "runAsNonRoot: false"),
        ("kubernetes/decode.yaml", "replicas: 2", "replicas: 1"),
        ("kubernetes/decode.yaml", '[sleep, "40"]', '[sleep, "30"]'),
        ("kubernetes/decode.yaml", '"advertise"', '"advertised"'),
        ("kubernetes/decode.yaml", '"metrics": {"port": 9400, "host": "0.0.0.0", "allow_remote": true},', ""),
        ("kubernetes/network.yaml", "{port: 9400, endPort: 9407}", "{port: https}"),
        ("kubernetes/router.yaml", "drop: [ALL]", "drop: []"),
        ("kubernetes/router.yaml", '"256"', '"1024"'),
        ("kubernetes/router.yaml", "livenessProbe: {tcpSocket: {", "livenessProbe: {httpGet: {path: /health, "),
        (
            "kubernetes/router.yaml",
            "labelSelector: {matchLabels: {app: router}}",
            "labelSelector: {matchLabels: {app: r}}",
        ),
        ("prometheus/kubernetes.yml", "metrics.*", "metric"),
        ("systemd/asynckv-engine@.service", "TimeoutStopSec=110", "TimeoutStopSec=100"),
        ("systemd/asynckv-engine@.service", "LimitMEMLOCK=infinity", "LimitMEMLOCK=64K"),
        ("systemd/asynckv-engine@.service", "${PORT}", "${PORTS}"),
        ("systemd/engine.env", "LINGER_S=10", "LINGER_S=0"),
        ("systemd/asynckv-router.service", "RestartSec=1", "RestartSecs=1"),
        ("systemd/asynckv-router.service", "ExitStatus=2", "ExitStatus=1"),
    ],
)
def test_a_mistake_in_a_file_is_noticed(deploy: Path, name: str, right: str, wrong: str) -> None:
    text = (deploy / name).read_text()
    assert right in text
    (deploy / name).write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, KeyError, ConfigError, jsonschema.ValidationError)):
        check(deploy, name.replace("engine.env", "asynckv-engine@.service"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_makes_manifests_that_fit_together(deploy: Path) -> None:
    for name in ("prefill", "decode"):
        write_pair(deploy / "kubernetes" / "keys", name, make_pair())
    build = ["kubectl", "kustomize", str(deploy / "kubernetes")]
    built = subprocess.run(build, capture_output=True, text=True, timeout=60, check=True).stdout
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(built)}
    pods = [each["spec"]["template"] for each in objects.values() if "template" in each.get("spec", {})]
    for (kind, _), each in objects.items():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        if kind not in ("Secret", "ConfigMap"):
            chosen = each["spec"].get("selector") or each["spec"]["podSelector"]
            assert any(chosen.get("matchLabels", chosen).items() <= pod["metadata"]["labels"].items() for pod in pods)
    for pod in pods:
        for volume in pod["spec"]["volumes"]:
            assert "secret" not in volume or ("Secret", volume["secret"]["secretName"]) in objects
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in objects
        assert all(each["image"].endswith(f":{VERSION}") for each in pod["spec"]["containers"])


@pytest.mark.timeout(2 * START_S)
def test_the_router_takes_what_it_is_given_and_imports_no_more_than_its_image_has(tmp_path: Path) -> None:
    stage = (DEPLOY / "Dockerfile").read_text().partition(" AS router\n")[2].partition("\nFROM ")[0]
    for module, (distribution, *_) in packages_distributions().items():
        name = distribution.lower().replace("_", "-")
        if name in NEEDED and name not in re.split(r"[\s=]+", stage):
            (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError({module!r})")
    assert {"torch.py", "zmq.py", "nixl.py"} <= set(os.listdir(tmp_path))
    (pod,) = (x["spec"]["template"]["spec"] for x in documents(DEPLOY / "kubernetes/router.yaml") if "Dep" in x["kind"])
    unit = (DEPLOY / "systemd/asynckv-router.service").read_text()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    lines = [shlex.join([*pod["containers"][0]["command"], *pod["containers"][0]["args"]])]
    for line in lines + re.findall("^ExecStart=/opt/asynckv/bin/(.*)$", unit, re.MULTILINE):
        told = shlex.split(line.replace("/etc/asynckv-router", str(DEPLOY / "systemd")))
        run = [sys.executable, "-m", *told, "--max-body-mib", "0"]  # what is looked at last, and is wrong
        done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=START_S, check=False, env=env)
        assert (done.returncode, "'--max-body-mib'" in done.stderr) == (2, True), done.stderr


# -- compose's services, as processes --------------------------------------------------------------------------


class Composed:
    """Services of compose.yaml as processes of this host: their names and addresses become ports of loopback."""

    def __init__(self, keys: Path) -> None:
        self.services: dict[str, dict[str, Any]] = documents(DEPLOY / "compose.yaml")[0]["services"]
        self.running: dict[str, Child] = {}
        self._keys, self._groups = str(keys), list[Processes]()
        self._ports = {name: socket.socket() for name in self.services}
        for each in self._ports.values():  # kept: until its service listens, the system gives a port to nobody else
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        self.ports = {name: each.getsockname()[1] for name, each in self._ports.items()}

    def said(self, name: str, words: Sequence[str]) -> list[str]:
        here = {"/keys": self._keys, "$$": "$", "0.0.0.0": "127.0.0.1", "eth0": "lo"}
        here |= {f"//{each}:8000": f"//127.0.0.1:{port}" for each, port in self.ports.items()}
        here |= {f"tcp://{each}:": "tcp://127.0.0.1:" for each in self.ports} | {"8000": str(self.ports[name])}
        anything = "|".join(map(re.escape, here))
        return [re.sub(anything, lambda found: here[found[0]], word) for word in words]

    async def start(self, name: str) -> Child:
        env = self.services[name].get("environment", {})
        env = dict(zip(env, self.said(name, env.values()), strict=True))
        env["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
        self._groups.append(Processes(env))
        command = self.said(name, self.services[name]["command"])
        self.running[name] = await self._groups[-1].start_command(name, command)
        return self.running[name]

    async def become_healthy(self, name: str) -> None:
        test = self.said(name, self.services[name]["healthcheck"]["test"][1:])
        while self.running[name].status is None:
            asked = await asyncio.create_subprocess_exec(*test, stderr=asyncio.subprocess.DEVNULL)
            if await asked.wait() == 0:
                return
        raise AssertionError(await self.running[name].ended())

    async def stop(self, name: str) -> None:
        """As `docker compose stop` does."""
        os.kill(self.running[name].pid, signal.SIGTERM)
        async with asyncio.timeout(float(self.services[name]["stop_grace_period"].removesuffix("s"))):
            assert (await self.running[name].ended()).endswith("status 0")

    async def aclose(self) -> None:
        assert [pid for group in reversed(self._groups) for pid in await group.stop()] == []
        for each in self._ports.values():
            each.close()


@pytest.mark.timeout(2 * START_S)
async def test_the_services_of_compose_answer_and_stop_in_time(tmp_path: Path) -> None:
    compose = Composed(tmp_path)
    url = f"http://127.0.0.1:{compose.ports['router']}"
    try:
        assert (await (await compose.start("keys")).ended()).endswith("status 0")
        engines = [await compose.start(name) for name in ("prefill", "decode")]
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as client:
            for engine in engines:
                assert await engine.reader.readline()  # it says where it listens
                await compose.become_healthy(engine.name)
            await compose.start("router")
            await compose.become_healthy("router")
            body = {"prompt": "Once upon a time", "max_tokens": 9}
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                assert len((await answer.json())["choices"][0]["text"]) == 9
            async with client.get(f"http://127.0.0.1:{compose.ports['decode']}/metrics") as answer:
                assert re.search(
                    r'^asynckv_pulls_ended_total\{.*"complete".*\} 1\.0$', await answer.text(), re.MULTILINE
                )
            async with client.get(f"{url}/metrics") as answer:
                shown = await answer.text()
        for name in ("prometheus/alerts.yml", "grafana/asynckv.json"):
            asked = set(re.findall(r"\bpd_proxy_\w+", (DEPLOY / name).read_text())) - {"pd_proxy_engine_faults_total"}
            assert len(asked) > 2
            assert [name for name in asked if not re.search(f"\n{name}[{{ ]", shown)] == []
        for name in ("router", "decode", "prefill"):
            await compose.stop(name)
    finally:
        await compose.aclose()
