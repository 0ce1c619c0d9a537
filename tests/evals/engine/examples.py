"""Engine modes, settings and answers that the tests of the engine modules share."""

from slimqwen import variant
from slimqwen.evals.engine.combinations import REFERENCE_MODES, Combination, ServedEngine
from slimqwen.evals.engine.scenarios import Answer, EngineSettings

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
CONTEXT_LEN = 512
SERVED = REFERENCE_MODES
FLAGS = {"max-num-batched-tokens": 256, "max-num-seqs": 1, "enforce-eager": True}
SETTINGS = {
    "text": "tinyworld",
    "seed": 5,
    "noise_factor": 3,
    "draft_tokens": 3,
    "concurrency": 4,
    "kv_cache_dtypes": ["auto", "fp8"],
    "crossed": [["draft_tokens", "prefix_caching"]],
    "prompt_tokens": [12, 40, 24, 30],
    "output_tokens": 8,
    "prefix": {"requests": 2, "tokens": 300},
    "mixed": {"requests": 6, "prompt_tokens": [4, 20], "output_tokens": [2, 6]},
    "timeout_s": 300,
}


def settings(**changes):
    return EngineSettings.model_validate({**SETTINGS, **changes})


def served_engine(flags=FLAGS, platform="cpu"):
    return ServedEngine(flags, platform, CONTEXT_LEN, ROOT)


def combination(modes=SERVED, served=True, refusal=None):
    return Combination(modes, FLAGS, served, served, refusal)


def answer(tokens, gap=None):
    """The reference engine's; `gap` is how much less likely token 99 is at every position, in nats."""
    likeliest = [{token: -1.0} | ({} if gap is None else {99: -1.0 - gap}) for token in tokens]
    return Answer(tuple(tokens), tuple(likeliest), 0)
