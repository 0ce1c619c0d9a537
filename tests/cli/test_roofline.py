"""Where `slimqwen roofline` takes the acceptance length from."""

from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.cli.roofline import _newest_acceptance_length
from tests import record_files

ROOT = variant.repository_root()
DRAFTS = """VLLM_SPECULATIVE_CONFIG='{"method": "mtp", "num_speculative_tokens": 4}'"""


@pytest.mark.parametrize(
    ("changes", "length", "source"),
    [
        ({}, 4.5, "4.500 at K = 4, drafting/acceptance_"),
        ({"digest": "ab" * 32}, None, "no acceptance record of drafting has this checkpoint and K = 4"),
        ({"depth": 3}, None, "no acceptance record of drafting"),
        ({"split": {"side": "search", "proof_share": 0.5}}, None, "no acceptance record of drafting"),
    ],
)
def test_only_a_record_of_this_checkpoint_depth_and_all_prompts_is_used(
    tmp_path: Path, add_variant, changes, length, source
):
    add_variant("tiny", (ROOT / "experiments" / "tiny" / "config.env").read_text())
    add_variant("drafting", f"BASE=tiny\n{DRAFTS}\n", baseline="tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    example = record_files.example("acceptance") | {"variant": "drafting", "split": changes.get("split")}
    estimate = {"value": 4.5, "standard_error": 0.1, "count": 2}
    row = {"depth": changes.get("depth", 4), "length": estimate, "settings": []}
    example["depths"] = [row]
    digest = checkpoint.digest(tmp_path / "weights" / "tiny")
    example["provenance"]["checkpoint"]["digest"] = changes.get("digest", digest)
    record_files.write(tmp_path / "experiments" / "drafting", example, [{"group": 0}])
    found, said = _newest_acceptance_length(variant.load("drafting", tmp_path))
    assert found == length
    assert said.startswith(source)
