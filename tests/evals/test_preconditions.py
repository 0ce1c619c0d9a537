"""What a measurement needs is found out before vLLM is imported."""

import subprocess
import sys

import pytest

from slimqwen import variant
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.evals import EvalError
from slimqwen.evals.preconditions import check_preconditions, find_baseline


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gate tiny", "tiny has no baseline"),
        ("gate cyankiwi-best", "no checkpoint in "),
        ("eval quality cyankiwi-best", "no checkpoint in "),
    ],
)
def test_a_missing_baseline_and_missing_weights_are_named_without_vllm(words: str, said: str):
    """Before any of the gigabytes of data that the suite would ask for."""
    program = "import sys; from slimqwen.cli.app import main; sys.modules['vllm'] = None; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, *words.split()], capture_output=True, text=True, check=False
    )
    assert ended.returncode in (2, 3)
    assert ended.stderr.startswith(f"error: {said}")


def test_a_folder_for_records_that_cannot_be_written_is_named_before_the_measurement(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    tiny = variant.load("tiny")
    with pytest.raises(
        EvalError, match=f"^{tiny.folder} cannot be written, and the record belongs there; make it"
    ):
        check_preconditions(tiny)


def test_the_baseline_of_a_variant_is_loaded_and_weights_are_required(add_variant, tmp_path):
    add_variant("bare", "VLLM_MODEL=weights/bare\n")
    with pytest.raises(MissingCheckpointError, match="put a checkpoint into weights/bare"):
        check_preconditions(variant.load("bare", tmp_path))
    assert find_baseline(variant.load("tiny-best")).name == "tiny"
