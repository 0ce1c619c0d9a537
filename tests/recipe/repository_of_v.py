"""A repository whose only variant, v, is made from tiny and served by the real vLLM.

Apart from the workshop, because `make gpu-check` has no time for what that imports.
"""

import json
from pathlib import Path

TINY = Path(__file__).parents[2] / "weights" / "tiny"

CONFIG = """
VLLM_MODEL=weights/v
VLLM_SERVED_MODEL_NAME=default
VLLM_HOST=127.0.0.1
VLLM_MAX_MODEL_LEN=256
VLLM_MAX_NUM_SEQS=2
VLLM_ENABLE_PREFIX_CACHING=0
VLLM_ENFORCE_EAGER=0
VLLM_CPU_KVCACHE_SPACE=1
VLLM_SPECULATIVE_CONFIG='{"method": "mtp", "num_speculative_tokens": 2}'
"""


def make_repository_of_v(root: Path, stages: str, config: str = CONFIG) -> Path:
    """A repository whose only variant, v, is made from tiny by these lines of YAML and served with this config.env."""
    folder = root / "experiments" / "v"
    folder.mkdir(parents=True)
    (folder / "config.env").write_text(config)
    (folder / "recipe.yaml").write_text(f"description: a test\nbase: tiny\nstages:\n{stages}")
    (folder / "measurements.json").write_text(json.dumps({"hypothesis": "it works", "baseline": None}))
    (root / "weights").mkdir()
    (root / "weights" / "tiny").symlink_to(TINY)
    return root
