"""Real models prefilled in one process and decoded in another; needs transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from scripts import disagg_generate


def disagg(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.disagg_generate", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options", [[], ["--prefill-tp", "1", "--decode-tp", "6"], ["--prefill-tp", "6", "--cached-tokens", "0"]]
)
def test_every_family_goes_on_bit_for_bit(options: list[str]) -> None:
    assert importlib.util.find_spec("transformers"), "install the test dependencies: transformers is among them"
    done = disagg(*options)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["family"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == disagg_generate.FAMILIES.keys()
    for row in rows.values():
        assert disagg_generate.is_good(row)
        assert row["tensors_equal"] and row["logits_equal"] and row["tokens_equal"]  # noqa: PT018
    # Every kind of part is seen to matter: with it zeroed, the logits differ.
    awake = {name for row in rows.values() for name, seen in row["controls_see"].items() if seen}
    asleep = {(f, name) for f, row in rows.items() for name, seen in row["controls_see"].items() if not seen}
    assert awake == {"k", "v", "latent", "conv_x", "conv_b", "conv_c", "conv_q", "conv_k", "conv_v", "state"}
    assert not asleep


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["lama"], "family 'lama' is unknown; choose from llama"),
        (["--prefill-tp", "4"], "--prefill-tp 4 does not divide"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0 must be 1 or more"),
        (["--cached-tokens", "45"], "--cached-tokens 45 must be less than the 45"),
        (["--prompt-tokens", "5000"], "need more than 24 blocks"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str) -> None:
    done = disagg(*argv)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_transformers_it_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['disagg_generate', 'llama']\n"
        "from scripts import disagg_generate; sys.exit(disagg_generate.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "transformers is not installed; run: pip install 'transformers==5.23.0'" in done.stderr
