"""The scripts' command lines: bad input is one line on stderr and status 2, before anything starts; help teaches."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

VERSUS = "vs_vllm --contenders asynckv"
CASE = "is not a case such as"
BAD = [
    ("chaos kil", "unknown scenario 'kil'; choose from kill, away, restart,"),
    ("chaos kill --seconds 0", "--seconds 0 is outside"),
    ("chaos survive --cycles 0", "--cycles 0 is outside"),
    ("chaos --seconds nan", "--seconds nan is outside"),
    ("chaos --json /nowhere/file", "--json /nowhere/file: No such file"),
    ("pressure lode", "unknown scenario 'lode'; choose from load, isolate,"),
    ("pressure load --pulls 100", "--pulls 100 is not at least 1300"),
    ("pressure isolate --round-s nan", "--round-s nan is not a positive, finite number"),
    ("pressure sleep --cycles 0", "--cycles 0 is not a positive"),
    ("pressure --json /nowhere/file", "--json /nowhere/file: No such file"),
    ("draw docs", "unknown page or picture 'docs'; choose from configuration, events,"),
    ("figures nowhere", "unknown section 'nowhere'; choose from report, small,"),
    ("figures alone --quick", "--quick measures too little for the pages"),
    ("figures --file /nowhere", "--file /nowhere is not there"),
    ("figures inside --vllm-python /nowhere", "--vllm-python /nowhere is not there"),
    ("soak --transfers 0", "--transfers"),
    ("soak --faults 80%", "--faults"),
    ("soak --faults x", "--faults"),
    ("soak --seed -1", "--seed -1"),
    ("soak_offload --seeds 0", "--seeds 0"),
    ("soak --json /no/such/file", "--json /no/such/file"),
    ("attack --frames 1", "--frames 1 is outside"),
    ("attack --json /nowhere/x", "No such file"),
    ("ucx_abort --trials 0", "--trials 0 is outside"),
    ("ucx_abort --moment-s -1", "--moment-s -1 is outside"),
    ("ucx_abort --ucx UCX_TLS", "'UCX_TLS' is not KEY=VALUE"),
    ("ucx_abort --fault flood", "'flood' is not one of"),
    ("recalls --recalls 1", "--recalls"),
    ("recalls --json /nowhere/file", "--json /nowhere/file: No such file"),
    ("recall --calls 0", "--calls"),
    ("look --flips 0", "--flips"),
    ("follow --rounds 0", "--rounds"),
    ("legs nowhere", "unknown case 'nowhere'; choose from 1000:1,"),
    ("legs --step 1", "'1' is not a step such as 3:7"),
    ("look --json /nowhere/x", "No such file"),
    ("recall --json /nowhere/x", "No such file"),
    ("plan --ranks 0", "--ranks"),
    ("offload --order zigzag", "--order 'zigzag' is none of nhd, hnd,"),
    ("offload --blocks 100000 --layers 1000", "use fewer"),
    ("offload --folder /nowhere", "--folder /nowhere: files cannot be created there"),
    ("offload --json /nowhere/file", "--json /nowhere/file: cannot be written: No such file"),
    ("tests_of nowhere", "nowhere: there is no such file"),
    ("tests_of tests/test_lease.py", "is not in"),
    ("tests_of asynckv/py.typed", "no test runs any code of asynckv/py.typed"),
    ("engine --cases idle,none", "unknown case 'none'; choose from handshake, idle,"),
    (f"{VERSUS} --cases 32x16384:16", CASE),
    (f"{VERSUS} --cases 0x4096:1:1", CASE),
    (f"{VERSUS} --cases 1x4097:1:1", CASE),
    (f"{VERSUS} --cases 1x4096:2000:1", "at most 1024 blocks"),
    (f"{VERSUS} --cases 1x4096:1:1:sorted", CASE),
    (f"{VERSUS} --cases x", CASE),
    (f"{VERSUS} --json /nonexistent/r.json", "--json /nonexistent/r.json: cannot be written: No such file"),
    ("disagg_generate lama", "unknown family 'lama'; choose from llama"),
    ("disagg_generate --prefill-tp 4", "--prefill-tp 4 is none of 1, 2, 3, 6"),
    ("disagg_generate --prompt-tokens 0", "--prompt-tokens"),
    ("disagg_generate --cached-tokens 45", "--cached-tokens 45 is outside 0 ... 44"),
    ("disagg_generate --prompt-tokens 5000", "need more than 24 blocks"),
    ("pd_service --decode 0", "--decode 0 is outside 1 ... 16"),
    ("tiny_engine --role both", "'both' is not one of"),
    ("tiny_engine --role decode --blocks 0", "--blocks 0 is outside"),
    ("tiny_engine --role decode --port 70000", "--port 70000 is outside"),
    ("tiny_engine --role decode --lease-s 0", "--lease-s 0 is outside"),
]
TEACHES = {
    "chaos": ["survive: Kill, stop", "--transport", "Exit status"],
    "pressure": ["isolate: Compare", "--round-s", "Exit status"],
    "soak": ["--transfers", "hostile", "Exit status", "UCX_TLS"],
    "attack": ["malicious peer", "--frames", "Exit status"],
    "ucx_abort": ["owner: the victim reads", "away-kill: stop the survivor", "Exit status"],
    "look": ["second look", "--flips", "Exit status"],
    "recalls": ["trusts its clock", "--mib", "Exit status"],
    "follow": ["--seconds", "round_trip_us", "Exit status"],
    "legs": ["clients: many clients", "tox run -e vllm", "Exit status"],
    "recall": ["--rounds", "goal", "Exit status"],
    "plan": ["--layouts", "per request", "Exit status"],
    "offload": ["write: records from", "--page-cache", "Exit status"],
    "tests_of": ["asynckv/core/lease.py", "Exit status"],
    "draw": ["Run this after", "Graphviz"],
    "engine": ["handshake: Meet three peers", "--cases"],
    "vs_vllm": ["vllm: NixlConnector as shipped", "tox run -e vllm", "--steps-ms"],
    "disagg_generate": ["gemma3_text", "--cached-tokens", "Controls"],
    "pd_service": ["--decode", "Exit status"],
    "tiny_engine": ["--step-ms", "python -m docs.examples.service.pd_service", "Exit status"],
}


def run(script: str, *arguments: str) -> int:
    status: int = module(script).main(list(arguments))
    return status


def module(script: str) -> ModuleType:
    """A script, a command of the laboratory, or an example."""
    folders = ("tests/lab", "docs/examples/service", "scripts/bench", "scripts")
    where = next(x for x in folders if (ROOT / x / f"{script}.py").exists() or x == "scripts").replace("/", ".")
    return importlib.import_module(f"{where}.{script}" + ".__main__" * (script == "draw"))


@pytest.mark.parametrize(("line", "says"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_status_2(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{line.split()[0]}: ")
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("script", TEACHES)
def test_help_teaches(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, "--help") == 0
    text = capsys.readouterr().out
    assert all(part in text for part in TEACHES[script])
    works = getattr(module(script), "SCENARIOS", {})
    assert all(f"{name}: " in text for name in works)
