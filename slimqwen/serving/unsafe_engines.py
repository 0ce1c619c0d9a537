"""Combinations of engine modes that were found to change tokens or to crash: eval/unsafe_engines.json.

`slimqwen.evaluation.engine_matrix` finds them, `slimqwen.serving.launch` refuses to serve with them. A finding holds
for one build only: what a CPU shows says nothing about a GPU.
"""

import json
import platform as system
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.serving import platform as machine

FILE = Path("eval") / "unsafe_engines.json"
"""Relative to the repository."""

GraphMode = Literal["eager", "compiled", "CUDA graphs"]


class UnsafeEngineError(SlimqwenError):
    """The modes that a variant is served with were found unsafe, or the file of findings is unreadable."""


class Build(BaseModel):
    """What a finding holds for.

    Attributes:
        platform: cpu or cuda.
        device: compute capability of the GPU, "8.6"; of a CPU the instruction set that chooses vLLM's kernels.
        vllm: its version.
        architecture: of the model, as config.json names it.
        quantization: method of the checkpoint, "none" for one that has none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    platform: machine.Platform
    device: str
    vllm: str
    architecture: str
    quantization: str

    def __str__(self) -> str:
        weights = "" if self.quantization == "none" else f" {self.quantization}"
        return f"vLLM {self.vllm} on {self.platform} {self.device}, {self.architecture}{weights}"


class Modes(BaseModel):
    """One combination of engine modes.

    Attributes:
        draft_tokens: K of MTP, 0 without.
        concurrency: requests that the engine computes at a time (--max-num-seqs).
        graphs: how the model's code runs; "CUDA graphs" are compiled too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft_tokens: int
    prefix_caching: bool
    kv_cache_dtype: str
    chunked_prefill: bool
    concurrency: int
    graphs: GraphMode

    def __str__(self) -> str:
        return ", ".join(
            (
                f"MTP K={self.draft_tokens}" if self.draft_tokens else "no MTP",
                f"{'prefix' if self.prefix_caching else 'no prefix'} caching",
                f"KV {self.kv_cache_dtype}",
                f"{'chunked' if self.chunked_prefill else 'whole'} prefill",
                f"{self.concurrency} at a time",
                self.graphs,
            )
        )


class Finding(BaseModel):
    """An unsafe combination.

    Attributes:
        reason: what went wrong, one line.
        record: the record that shows it, relative to the repository.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    build: Build
    modes: Modes
    reason: str
    record: str


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    findings: list[Finding]


def read(root: Path) -> list[Finding]:
    """The findings of a repository; none where no engine was ever found unsafe.

    Raises:
        UnsafeEngineError: the file does not follow the schema.
    """
    try:
        return _File.model_validate_json((root / FILE).read_bytes()).findings
    except FileNotFoundError:
        return []
    except ValidationError as error:
        first = error.errors()[0]
        raise UnsafeEngineError(
            f"{FILE}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}; "
            f"`git checkout {FILE}` restores it"
        ) from None


def update(root: Path, build: Build, *, unsafe: Sequence[Finding], fine: Sequence[Modes]) -> None:
    """Add findings, and take out what was found before for the same build and is fine now.

    Args:
        root: the repository.
        build: that was tried.
        unsafe: of that build; each replaces what the file says of the same modes.
        fine: modes that nothing was wrong with.

    Raises:
        UnsafeEngineError: the file is unreadable.
    """
    settled = {*fine, *(one.modes for one in unsafe)}
    kept = [one for one in read(root) if one.build != build or one.modes not in settled]
    everything = sorted([*kept, *unsafe], key=lambda one: (str(one.build), str(one.modes)))
    text = json.dumps(_File(findings=everything).model_dump(mode="json"), indent=1) + "\n"
    fresh = (root / FILE).with_suffix(".new")
    fresh.parent.mkdir(parents=True, exist_ok=True)
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(root / FILE)


def build(weights: Path, platform: machine.Platform) -> Build:
    """What a checkpoint would be served by on this machine."""
    config = checkpoint.read_config(weights)
    quantization = config.get("quantization_config") or checkpoint.text_config(config).get(
        "quantization_config"
    )
    return Build(
        platform=platform,
        device=_device(platform),
        vllm=version("vllm"),
        architecture=config["architectures"][0],
        quantization=quantization["quant_method"] if quantization else "none",
    )


def served_modes(flags: Mapping[str, Any], platform: machine.Platform) -> dict[str, Any]:
    """The fields of `Modes` that vLLM's flags give, by name; None where vLLM chooses by the model.

    Args:
        flags: values by flag name, after the platform's table.
        platform: that they are resolved for.
    """
    speculation = flags.get("speculative-config") or {}
    return {
        "draft_tokens": int(speculation.get("num_speculative_tokens", 0)),
        "prefix_caching": flags.get("enable-prefix-caching"),
        "kv_cache_dtype": flags.get("kv-cache-dtype", "auto"),
        "chunked_prefill": flags.get("enable-chunked-prefill"),
        "concurrency": flags.get("max-num-seqs"),
        "graphs": _graphs(flags, platform),
    }


def find(root: Path, weights: Path, flags: Mapping[str, Any], platform: machine.Platform) -> Finding | None:
    """The finding that speaks against serving a checkpoint with these flags here.

    A server of N sequences at a time also runs with fewer, so it meets what was found at fewer. Where vLLM would choose
    a mode by the model, either is taken to be met.

    Raises:
        UnsafeEngineError: the file is unreadable.
    """
    findings = read(root)
    if not findings:
        return None
    here, asked = build(weights, platform), served_modes(flags, platform)
    return next((one for one in findings if one.build == here and covers(asked, one.modes)), None)


def covers(asked: Mapping[str, Any], modes: Modes) -> bool:
    """Whether a server of `served_modes` comes to run in these modes."""
    found = modes.model_dump()
    return all(
        value is None or (found[name] <= value if name == "concurrency" else found[name] == value)
        for name, value in asked.items()
    )


def _graphs(flags: Mapping[str, Any], platform: machine.Platform) -> GraphMode:
    if flags.get("enforce-eager"):
        return "eager"
    compilation = flags.get("compilation-config") or {}
    if platform == "cpu" or str(compilation.get("cudagraph_mode", "")).upper() == "NONE":
        return "compiled"
    return "CUDA graphs"


def _device(platform: machine.Platform) -> str:
    if platform == "cpu":
        return f"{system.machine()} {'with' if machine.has_avx512() else 'without'} AVX-512"
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability()))
