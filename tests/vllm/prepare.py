"""Unpack vLLM's source distribution, describe its tests' models: `python -m tests.vllm.prepare FOLDER VERSION`.

The source is only imported, never built: what is compiled in vLLM is its kernels, and no test here computes anything.
Its tests lie in the same archive. Models consist of a `config.json`, because their weights are never loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPT = {
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
"""What vLLM's tests call their model; they ask it for its lengths and heads."""


def main(folder: Path, version: str) -> None:
    """Bring the folder up to date; what is there already stays."""
    if not (folder / f"vllm-{version}" / "vllm" / "__init__.py").exists():
        unpack(folder, version)
    write_model(folder / "models", "facebook/opt-125m", OPT)


def unpack(folder: Path, version: str) -> None:
    """Download the archive with pip, whose metadata step has to be told that there is nothing to build."""
    nothing = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    nothing |= {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", "-q", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"vllm=={version}"]
    subprocess.run(command, check=True, env={**os.environ, **nothing})
    with tarfile.open(folder / f"vllm-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")


def write_model(home: Path, name: str, config: Mapping[str, Any]) -> None:
    """Lay a description out as Hugging Face's cache does."""
    cache = home / "hub" / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    snapshot = cache / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (cache / "refs").mkdir(exist_ok=True)
    (cache / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
