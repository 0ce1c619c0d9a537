"""Arms: the ways to speculate that vLLM may have for a checkpoint, each as lines of config.env.

Which of them an installed vLLM has on this platform is not written down here: its parser and its configuration say what
they refuse, and a server that dies says why.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.plan import resolution
from slimqwen.progress import Progress
from slimqwen.serving.command import ServerCommand

KEY = "VLLM_SPECULATIVE_CONFIG"
_SEQUENCES, _GRAPH_SIZES = "VLLM_MAX_NUM_SEQS", "VLLM_CUDAGRAPH_CAPTURE_SIZES"
_DEPTH = "num_speculative_tokens"
_DEPTHS = range(1, 7)

_LOOKUPS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {_DEPTH: 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "ngram_gpu": {_DEPTH: 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {_DEPTH: 8},  # at most: it drafts as many as it has seen before
}
"""Settings of the methods that draft from the text so far, without a model."""

_PROBABILISTIC = {"draft_sample_method": "probabilistic"}
_BLOCK = {"rejection_sample_method": "block"}
_SAMPLING: tuple[Mapping[str, str], ...] = (_PROBABILISTIC, _BLOCK, {**_PROBABILISTIC, **_BLOCK})
"""Settings of draft sampling and rejection sampling for requests above temperature 0; vLLM's defaults are left out."""

_OF_AN_ARM = (_DEPTH, f"{_DEPTH}_per_batch_size", *_PROBABILISTIC, *_BLOCK, "enable_adaptive_verification")
_UNNAMED = ("method", "model", _DEPTH, "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True)
class Arm:
    """A way to speculate: vLLM's speculative config, None without drafts."""

    speculation: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """Its method, depth and other settings, such as MTP K=4, probabilistic."""
        settings = self.speculation
        if settings is None:
            return "none"
        method = "MTP" if settings.get("method") == "mtp" else settings.get("method", "drafter")
        parts = [method, Path(settings["model"]).name] if settings.get("model") else [method]
        parts += [f"K={settings[_DEPTH]}"] if _DEPTH in settings else []
        others = sorted((key, value) for key, value in settings.items() if key not in _UNNAMED)
        return ", ".join([" ".join(parts), *(_describe_setting(key, value) for key, value in others)])

    @property
    def depth(self) -> int:
        """Tokens drafted at a time; 0 without drafts, or where vLLM chooses."""
        return int((self.speculation or {}).get(_DEPTH, 0))

    @property
    def is_sampled(self) -> bool:
        """Whether a model drafts, from whose distribution tokens can be drawn."""
        return self.speculation is not None and self.speculation.get("method") not in _LOOKUPS

    def list_lines(self, served: ServerCommand, sequences: int | None) -> dict[str, str]:
        """Lines of config.env that differ from the variant's own; an empty value unsets.

        Args:
            served: the variant's own command.
            sequences: requests that the server shall run at a time; None for those of the variant.
        """
        lines = {}
        own = served.flags.get("speculative-config") or {}
        if dict(self.speculation or {}) != own:
            lines[KEY] = json.dumps(self.speculation) if self.speculation else ""
        if sequences is not None:
            lines[_SEQUENCES] = str(sequences)
        sizes = served.flags.get("cudagraph-capture-sizes")
        if sizes and sequences is not None:
            lines[_GRAPH_SIZES] = ""  # vLLM chooses those of more requests
        elif sizes and self.depth != own.get(_DEPTH, 0):
            # A verify step has K + 1 tokens a request.
            requests = sorted({max(1, size // (own.get(_DEPTH, 0) + 1)) for size in sizes})
            lines[_GRAPH_SIZES] = ",".join(str(count * (self.depth + 1)) for count in requests)
        return lines


UNDRAFTED = Arm(None)


def _describe_setting(key: str, value: Any) -> str:
    if key in _PROBABILISTIC:
        return str(value)
    if key in _BLOCK:
        return f"{value} verification"
    return "adaptive" if (key, value) == ("enable_adaptive_verification", True) else f"{key}={value}"


def list_arms(served: ServerCommand) -> list[Arm]:
    """Every way to speculate that is tried, the undrafted first, then the variant's own.

    MTP keeps what else the variant's speculative config says, such as its attention backend. Without an MTP head there
    is one arm with it, whose refusal says so.
    """
    own = served.flags.get("speculative-config") or {}
    kept = {key: value for key, value in own.items() if key not in _OF_AN_ARM}
    base = kept if own.get("method") == "mtp" else {"method": "mtp"}
    depths = _DEPTHS if has_mtp_head(served.variant.weights) else (1,)
    by_depth = [{**base, _DEPTH: depth} for depth in depths]
    adaptive = {**by_depth[-1], "enable_adaptive_verification": True}
    lookups = [{"method": method, **settings} for method, settings in _LOOKUPS.items()]
    arms: dict[str, Arm] = {}
    for settings in (*([own] if own else []), *by_depth, *lookups, adaptive):
        arms.setdefault(Arm(settings).name, Arm(settings))
    return [UNDRAFTED, *arms.values()]


def vary_sampling(arm: Arm) -> list[Arm]:
    """The other ways to draw and verify the drafts of an arm."""
    plain = {key: value for key, value in (arm.speculation or {}).items() if key not in _SAMPLING[-1]}
    return [Arm({**plain, **change}) for change in _SAMPLING]


def probe_configurations(
    weights: Path, _: Path, argvs: Sequence[Sequence[str]], progress: Progress
) -> list[str]:
    """What vLLM's configuration refuses of each server's arguments, in one line; empty for what it takes.

    Args:
        argvs: arguments of vLLM's API server, without program and module.
    """
    reasons = []
    for done, argv in enumerate(argvs):
        progress("configuring", done, len(argvs))
        try:
            reasons.append(_find_ignored_method(resolution.make_engine_config(argv)))
        except ValidationError as error:
            reasons.append(" ".join(error.errors()[0]["msg"].removeprefix("Value error, ").split()))
        except Exception as error:  # whatever vLLM refuses it with
            reasons.append(" ".join(f"{type(error).__name__}: {error}".split()))
    return reasons


def _find_ignored_method(config: Any) -> str:
    """Why a rejection_sample_method has no effect; empty where it has one.

    vLLM's configuration takes every method. Its model runner V1 ignores those whose names its sampler does not read,
    and verifies token by token.
    """
    from vllm.v1.sample import rejection_sampler

    method = getattr(config.speculative_config, "rejection_sample_method", "standard")
    source = Path(rejection_sampler.__file__).read_text(encoding="utf-8")
    if method == "standard" or config.use_v2_model_runner or f'"{method}"' in source:
        return ""
    return f"vLLM's model runner V1, which serves here, ignores rejection_sample_method={method}"
