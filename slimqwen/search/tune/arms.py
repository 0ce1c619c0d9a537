"""Arms: the ways to speculate, with or without changed settings, that `slimqwen tune` times against each other.

This module does not state which arms the installed vLLM supports on this platform: vLLM's parser and the arm's plan
refuse the others, or the server of an arm dies and its log says why.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.host import Platform
from slimqwen.search.tune.changes import SettingsChange
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

_OF_AN_ARM = (
    _DEPTH,
    f"{_DEPTH}_per_batch_size",
    "draft_sample_method",
    "rejection_sample_method",
    "enable_adaptive_verification",
)
_UNNAMED = ("method", "model", _DEPTH, "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True)
class Arm:
    """A way to speculate, with or without changed settings.

    Attributes:
        drafts: vLLM's speculative config without the changes; None for no drafts.
        parts: changed settings, no two of which set the same config.env line.
    """

    drafts: Mapping[str, Any] | None
    parts: tuple[SettingsChange, ...] = ()

    @property
    def name(self) -> str:
        """Method, depth and other settings, then the changes, such as "MTP K=4, prefix cache"."""
        settings = self.drafts
        if settings is None:
            return ", ".join(["none", *(part.name for part in self.parts)])
        method = "MTP" if settings.get("method") == "mtp" else settings.get("method", "drafter")
        parts = [method, Path(settings["model"]).name] if settings.get("model") else [method]
        parts += [f"K={settings[_DEPTH]}"] if _DEPTH in settings else []
        others = sorted((key, value) for key, value in settings.items() if key not in _UNNAMED)
        named = [*(f"{key}={value}" for key, value in others), *(part.name for part in self.parts)]
        return ", ".join([" ".join(parts), *named])

    @property
    def speculation(self) -> dict[str, Any] | None:
        """The speculative config of vLLM, with the changes; None for no drafts."""
        if self.drafts is None:
            return None
        return dict(self.drafts) | {
            key: value for part in self.parts for key, value in part.speculation.items()
        }

    @property
    def changes(self) -> dict[str, str]:
        """Lines of config.env that the changes set."""
        return {key: value for part in self.parts for key, value in part.lines.items()}

    @property
    def depth(self) -> int:
        """Tokens drafted at a time (K); 0 without drafts or if vLLM chooses."""
        return int((self.drafts or {}).get(_DEPTH, 0))

    @property
    def rounds(self) -> bool:
        """Whether a changed setting makes vLLM round differently, as FP8 KV does; only the gate can judge it."""
        return any(part.rounds for part in self.parts)

    def unite(self, others: Sequence["Arm"]) -> "Arm":
        """This arm with the changes of other arms added; of two changes that set the same line, the first is kept."""
        united = self
        for part in (part for other in others for part in other.parts):
            taken = united.changes.keys() | {key for each in united.parts for key in each.speculation}
            if not taken & {*part.lines, *part.speculation}:
                united = replace(united, parts=(*united.parts, part))
        return united

    def list_lines(self, served: ServerCommand, sequences: int | None) -> dict[str, str]:
        """Lines of config.env in which the arm differs from the variant; an empty value unsets.

        Args:
            served: the variant's own command.
            sequences: max_num_seqs of the arm's server; None for the variant's own.
        """
        lines = {}
        own = served.flags.get("speculative-config") or {}
        if (self.speculation or {}) != own:
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
        return lines | self.changes


UNDRAFTED = Arm(None)


def own_arm(served: ServerCommand) -> Arm:
    """The arm that speculates as the variant's own config.env says."""
    return Arm(served.flags["speculative-config"]) if served.flags.get("speculative-config") else UNDRAFTED


def list_arms(served: ServerCommand) -> list[Arm]:
    """List the ways to speculate to try: first no drafts, then the variant's own, then the others.

    MTP arms keep the other settings of the variant's speculative config, such as its attention backend. For a
    checkpoint without an MTP head a single MTP arm is listed, whose refusal states that.
    """
    own = served.flags.get("speculative-config") or {}
    kept = {key: value for key, value in own.items() if key not in _OF_AN_ARM}
    base = kept if own.get("method") == "mtp" else {"method": "mtp"}
    depths = _DEPTHS if has_mtp_head(served.variant.weights) else (1,)
    by_depth = [{**base, _DEPTH: depth} for depth in depths]
    lookups = [{"method": method, **settings} for method, settings in _LOOKUPS.items()]
    arms: dict[str, Arm] = {}
    for arm in (UNDRAFTED, own_arm(served), *map(Arm, (*by_depth, *lookups))):
        arms.setdefault(arm.name, arm)
    return list(arms.values())


def find_refused_fields(workload: Workload, root: Path, platform: Platform) -> str:
    """Explain in one line why a server with drafts would refuse requests of an evaluation; empty if it would not.

    A line of prompts.jsonl may be a whole request with fields such as `logit_bias`. The timed requests leave them out,
    but the clients whose requests these are send them.

    Args:
        workload: the requests: its sampling parameters, and the user's own prompts if it has some.
        root: the repository.
        platform: platform of the server; beside drafts it decides which fields are refused.

    Raises:
        CorpusError: the file of the prompts cannot be read, or a prompt in it is malformed.
    """
    own = parse_own_prompts(root / workload.prompts) if workload.prompts else []
    reasons = []
    for name in DRAFTS_REFUSE[platform]:
        number = sum(bool((each.model_extra or {}).get(name)) for each in own)
        if workload.sampling.get(name) or number:
            counted = "all requests" if workload.sampling.get(name) else f"{number} of {len(own)} prompts"
            reasons.append(f"{counted} of {workload.name} have {name}")
    return f"{'; '.join(reasons)}, which drafts refuse here (status 400)" if reasons else ""
