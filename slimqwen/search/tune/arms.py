"""Arms: the ways to speculate that vLLM may have for a checkpoint, each as lines of config.env.

This module does not state which arms the installed vLLM supports on this platform: vLLM's parser and configuration
refuse the others, or the server of an arm dies and its log says why.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.host import Platform
from slimqwen.plan import resolution
from slimqwen.progress import Progress
from slimqwen.serving.command import ServerCommand
from slimqwen.text.prompts import parse_own_prompts
from slimqwen.variant import DRAFTS_REFUSE

KEY = "VLLM_SPECULATIVE_CONFIG"
_SEQUENCES, _GRAPH_SIZES = "VLLM_MAX_NUM_SEQS", "VLLM_CUDAGRAPH_CAPTURE_SIZES"
_DEPTH = "num_speculative_tokens"
_DEPTHS = range(1, 7)

_LOOKUPS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {_DEPTH: 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "ngram_gpu": {_DEPTH: 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {
        _DEPTH: 8
    },  # an upper bound: the method drafts only as many tokens as it finds in the text so far
}
"""Settings of the methods that draft from the text so far, without a drafting model."""

_PROBABILISTIC = {"draft_sample_method": "probabilistic"}
_BLOCK = {"rejection_sample_method": "block"}
_SAMPLING: tuple[Mapping[str, str], ...] = (_PROBABILISTIC, _BLOCK, {**_PROBABILISTIC, **_BLOCK})
"""Settings of draft sampling and rejection sampling to try at temperatures above 0, without vLLM's defaults."""

_OF_AN_ARM = (_DEPTH, f"{_DEPTH}_per_batch_size", *_PROBABILISTIC, *_BLOCK, "enable_adaptive_verification")
_UNNAMED = ("method", "model", _DEPTH, "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True)
class Arm:
    """A way to speculate.

    Attributes:
        speculation: vLLM's speculative config; None for no drafts.
    """

    speculation: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """Method, depth and other settings, such as "MTP K=4, probabilistic"."""
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
        """Tokens drafted at a time (K); 0 without drafts or if vLLM chooses."""
        return int((self.speculation or {}).get(_DEPTH, 0))

    @property
    def is_sampled(self) -> bool:
        """Whether a model drafts, so that draft tokens can be sampled from its distribution."""
        return self.speculation is not None and self.speculation.get("method") not in _LOOKUPS

    def list_lines(self, served: ServerCommand, sequences: int | None) -> dict[str, str]:
        """Lines of config.env in which the arm differs from the variant; an empty value unsets.

        Args:
            served: the variant's own command.
            sequences: most requests that the server is to run at a time; None for the variant's own number.
        """
        lines = {}
        own = served.flags.get("speculative-config") or {}
        if dict(self.speculation or {}) != own:
            lines[KEY] = json.dumps(self.speculation) if self.speculation else ""
        if sequences is not None:
            lines[_SEQUENCES] = str(sequences)
        sizes = served.flags.get("cudagraph-capture-sizes")
        if sizes and sequences is not None:
            lines[_GRAPH_SIZES] = ""  # the served sizes are too few for more requests: vLLM chooses
        elif sizes and self.depth != own.get(_DEPTH, 0):
            # A verify step computes K + 1 tokens for each request.
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
    """List every arm that is tried: first the one without drafts, then the variant's own.

    MTP arms keep the other settings of the variant's speculative config, such as its attention backend. For a
    checkpoint without an MTP head a single MTP arm is listed, whose refusal states that.
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


def find_refused_fields(workload: Workload, root: Path, platform: Platform) -> str:
    """Why requests of an evaluation would be refused by a server with drafts, in one line; empty if none would.

    A line of prompts.jsonl may be a whole request, as a client sends it: its fields are what the client needs, even
    though the workload sends those of `sampling` alone.

    Raises:
        CorpusError: as `parse_own_prompts`.
    """
    own = parse_own_prompts(root / workload.prompts) if workload.prompts else []
    reasons = []
    for name in DRAFTS_REFUSE[platform]:
        number = sum(bool((each.model_extra or {}).get(name)) for each in own)
        if workload.sampling.get(name) or number:
            counted = "all requests" if workload.sampling.get(name) else f"{number} of {len(own)} prompts"
            reasons.append(f"{counted} of {workload.name} have {name}")
    return f"{'; '.join(reasons)}, which drafts refuse here (status 400)" if reasons else ""


def vary_sampling(arm: Arm) -> list[Arm]:
    """Arms that differ from `arm` only in how draft tokens are sampled and verified."""
    plain = {key: value for key, value in (arm.speculation or {}).items() if key not in _SAMPLING[-1]}
    return [Arm({**plain, **change}) for change in _SAMPLING]


def probe_configurations(weights: Path, argvs: Sequence[Sequence[str]], progress: Progress) -> list[str]:
    """For each server, why vLLM's configuration refuses its arguments, in one line; empty if it accepts them.

    Args:
        argvs: for each server, the arguments of vLLM's API server, without program and module.
    """
    reasons = []
    for done, argv in enumerate(argvs):
        progress("configuring", done, len(argvs))
        try:
            reasons.append(_find_ignored_method(resolution.make_engine_config(argv)))
        except ValidationError as error:
            reasons.append(" ".join(error.errors()[0]["msg"].removeprefix("Value error, ").split()))
        except Exception as error:  # vLLM refuses with exceptions of many types
            reasons.append(" ".join(f"{type(error).__name__}: {error}".split()))
    return reasons


def _find_ignored_method(config: Any) -> str:
    """Why a configured rejection_sample_method would have no effect; empty if it has one.

    vLLM's configuration accepts every method, but model runner V1 ignores those whose names its sampler does not read,
    and verifies token by token.
    """
    from vllm.v1.sample import rejection_sampler

    method = getattr(config.speculative_config, "rejection_sample_method", "standard")
    source = Path(rejection_sampler.__file__).read_text(encoding="utf-8")
    if method == "standard" or config.use_v2_model_runner or f'"{method}"' in source:
        return ""
    return f"vLLM's model runner V1, which serves here, ignores rejection_sample_method={method}"
