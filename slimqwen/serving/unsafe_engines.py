"""Unsafe engine modes: combinations that change tokens or crash, in eval/unsafe_engines.json.

`slimqwen.evals.engine.modes` finds them, `slimqwen.serving.checks` refuses to serve with them. A finding holds for one
build only: one of a CPU says nothing about a GPU.
"""

import json
import platform as system
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import checkpoint
from slimqwen.serving import gpu
from slimqwen.serving import platform as machine
from slimqwen.serving.errors import ServingError

FILE = Path("eval") / "unsafe_engines.json"
"""Relative to the repository."""

GraphMode = Literal["eager", "compiled", "CUDA graphs"]


class Build(BaseModel):
    """Platform, software and model that a finding holds for.

    Attributes:
        platform: cpu or cuda.
        device: compute capability of the GPU, "8.6"; for a CPU the instruction set that chooses vLLM's kernels.
        vllm: version.
        architecture: the model's, as in config.json.
        quantization: method of the checkpoint, "none" for an unquantized one.
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
        draft_tokens: num_speculative_tokens of MTP, 0 without.
        concurrency: requests in a batch (--max-num-seqs).
        graphs: execution mode; "CUDA graphs" includes compilation.
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
        reason: the fault, one line.
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
        ServingError: the file does not follow the schema.
    """
    try:
        return _File.model_validate_json((root / FILE).read_bytes()).findings
    except FileNotFoundError:
        return []
    except ValidationError as error:
        first = error.errors()[0]
        raise ServingError(
            f"{FILE}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}; "
            f"`git checkout {FILE}` restores it"
        ) from None


def update(
    root: Path, build: Build, record: str, *, unsafe: Sequence[Finding], fine: Sequence[Modes]
) -> None:
    """Add the findings of a record; remove those of earlier records of its variant in the modes that it tested.

    A variant whose modes are fine says nothing about another one of the same build: margins between likely tokens are
    those of its weights.

    Args:
        record: the record, relative to the repository; records of one variant lie in one folder.
        unsafe: findings of that build; each replaces the variant's finding for the same modes.
        fine: modes without a fault.

    Raises:
        ServingError: the file is unreadable.
    """
    tested = {*fine, *(finding.modes for finding in unsafe)}
    folder = Path(record).parent
    others = [
        finding
        for finding in read(root)
        if finding.build != build or finding.modes not in tested or Path(finding.record).parent != folder
    ]
    findings = sorted(
        [*others, *unsafe], key=lambda finding: (str(finding.build), str(finding.modes), finding.record)
    )
    text = json.dumps(_File(findings=findings).model_dump(mode="json"), indent=1) + "\n"
    new = (root / FILE).with_suffix(".new")
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(text, encoding="utf-8")
    new.replace(root / FILE)


def build(weights: Path, platform: machine.Platform, environment: Mapping[str, str] | None = None) -> Build:
    """The build that would serve a checkpoint on this machine.

    Args:
        environment: variables of the config.env, which may choose the GPU.
    """
    config = checkpoint.read_config(weights)
    quantization = checkpoint.quantisation(config)
    if platform == "cpu":
        device = f"{system.machine()} {'with' if machine.has_avx512() else 'without'} AVX-512"
    else:
        first = gpu.first_gpu()
        device = first.capability if first else "none"
    return Build(
        platform=platform,
        device=device,
        vllm=version("vllm"),
        architecture=config["architectures"][0],
        quantization=quantization["quant_method"] if quantization else "none",
    )


def served_modes(flags: Mapping[str, Any], platform: machine.Platform) -> dict[str, Any]:
    """The fields of `Modes` that vLLM's flags decide, by name; None where vLLM chooses by the model.

    Args:
        flags: values by flag name, after the platform's changes.
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


def find(
    root: Path,
    weights: Path,
    flags: Mapping[str, Any],
    platform: machine.Platform,
    environment: Mapping[str, str] | None = None,
) -> Finding | None:
    """The first finding against serving a checkpoint with these flags on this machine.

    A server of N sequences also runs with fewer, so findings at fewer sequences count. Where vLLM would choose a mode
    by the model, a finding for either choice counts.

    Args:
        flags: values by flag name, after the platform's changes.
        environment: variables of the config.env, which may choose the GPU.

    Raises:
        ServingError: the file is unreadable.
    """
    findings = read(root)
    if not findings:
        return None
    this_build, served = build(weights, platform, environment), served_modes(flags, platform)
    return next(
        (finding for finding in findings if finding.build == this_build and covers(served, finding.modes)),
        None,
    )


def covers(served: Mapping[str, Any], modes: Modes) -> bool:
    """Whether a server of `served_modes` may run in these modes."""
    unsafe = modes.model_dump()
    return all(
        value is None or (unsafe[name] <= value if name == "concurrency" else unsafe[name] == value)
        for name, value in served.items()
    )


def _graphs(flags: Mapping[str, Any], platform: machine.Platform) -> GraphMode:
    if flags.get("enforce-eager"):
        return "eager"
    compilation = flags.get("compilation-config") or {}
    if platform == "cpu" or str(compilation.get("cudagraph_mode", "")).upper() == "NONE":
        return "compiled"
    return "CUDA graphs"
