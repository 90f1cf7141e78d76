"""The configuration in docs/vllm.md is taken, and every option is on that page."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path

from asynckv.integrations.vllm.offload import options as offload_options
from asynckv.integrations.vllm.options import OF_NIXL_CONNECTOR, Options

VLLM = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text()


def test_the_first_steps_behind_vllm_are_taken() -> None:
    given = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", VLLM, re.DOTALL)
    before, after, dual, offloading = (json.loads(each) for each in given)
    assert after.keys() > before.keys()
    assert dual["kv_connector"] in importlib.import_module(dual["kv_connector_module_path"]).__all__
    assert Options.parse(dual["kv_connector_extra_config"]["asynckv"]).advertise == "tcp://10.0.0.2:0"
    assert Options.parse(after["kv_connector_extra_config"]).advertise == "tcp://10.0.0.1:0"
    extra = offloading["kv_connector_extra_config"]
    assert offload_options.parse(extra, "MODEL", 16).file_bytes == 10**12
    assert extra["spec_name"] in importlib.import_module(extra["spec_module_path"]).__all__


def test_every_option_behind_vllm_is_in_the_docs() -> None:
    (table,) = re.findall(r"^## Options\n(.*?)^## ", VLLM, re.DOTALL | re.MULTILINE)
    options = {each.name for each in dataclasses.fields(Options)} - {"engine_id"}
    for name in (*OF_NIXL_CONNECTOR, *options):
        assert re.search(rf"`{name}\b", table), name
    (table,) = re.findall(r"^## Offloading.*?\n(\| option.*?)\n\n", VLLM, re.DOTALL | re.MULTILINE)
    for name in {*offload_options.OURS, *offload_options.THEIRS} - {"spec_name", "spec_module_path"}:
        assert re.search(rf"`{name}\b", table), name
