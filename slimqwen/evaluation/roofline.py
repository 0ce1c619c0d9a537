"""The fastest that a variant could be on a GPU: the bytes and operations of a step against the GPU's data sheet.

A pass through the model lasts at least max(bytes / memory bandwidth, operations / peak), the roofline of Williams,
Waterman and Patterson (CACM 52, 2009). A decode step is one pass over K + 1 tokens a sequence (the last token and its
K drafts) and K passes of the MTP head, one after another. Counted are: every weight once a pass, as it lies on disk
(an embedding is gathered, but a tied one is the output head and read whole); the KV cache of full-attention layers;
the states of Gated DeltaNet layers (Yang, Kautz and Hatamizadeh, arXiv:2412.06464), read and written once a step;
a multiply-add as two operations. Activations, norms, sampling, launches and the host are not: a real server is slower.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import TensorInfo
from slimqwen.errors import SlimqwenError
from slimqwen.records import store
from slimqwen.serving import launch
from slimqwen.variant import Variant

CONTEXTS = (128, 2048, 8192)
"""Tokens in the cache at which bounds are given."""

ASSUMPTIONS = (
    "a pass lasts at least max(bytes / memory bandwidth, operations / dense peak)",
    "weights of 4 bits are computed in 16 bits: they save bytes, not operations",
    "a step reads and writes each Gated DeltaNet state once, however many tokens it verifies",
    "a prompt is prefilled alone and in one pass",
    "activations, norms, sampling, kernel launches and the host cost nothing",
)
"""What makes a figure a bound; written into every record."""

Precision = Literal["bf16", "fp8", "int8"]

_SIXTEEN_BIT = 2
"""Bytes of a number in the dtype that vLLM serves in, float16 or bfloat16."""

_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KV_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_PRECISIONS: Mapping[str, Precision] = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8"}

_STATE_OPERATIONS = 6
"""Of a token on a number of the recurrent state: read by the key, updated, read by the query, a multiply-add each."""

_TELLING_L2_SHARE = 0.1
"""Of the weights: with more of them in the L2 cache, a note says that memory is not what limits."""

_MEMORY_SHARE = 0.92  # vLLM's default of --gpu-memory-utilization


class DevicesError(SlimqwenError):
    """eval/devices.yaml cannot be used."""


class UnknownGpuError(SlimqwenError):
    """eval/devices.yaml has no such GPU."""


class RooflineError(SlimqwenError):
    """A checkpoint, flags or figures for which no bound can be given."""


class Peaks(BaseModel):
    """Dense peak of the matrix units, TFLOP/s; None where a kind has no unit of its own.

    Attributes:
        bf16: for float16 too.
        fp8: both operands in 8-bit floating point.
        int8: both operands in 8-bit integers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bf16: PositiveFloat
    fp8: PositiveFloat | None = None
    int8: PositiveFloat | None = None


class Gpu(BaseModel):
    """A GPU of eval/devices.yaml, which explains each field.

    Attributes:
        name: the key there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    nvidia_smi: tuple[str, ...] = Field(min_length=1)
    memory_bandwidth_gb_per_s: PositiveFloat
    memory_gib: PositiveFloat
    l2_cache_mb: PositiveFloat
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    dense_peak_tflops: Peaks
    source: str = Field(min_length=1)
    note: str | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.memory_bandwidth_gb_per_s * 1e9

    def peak(self, precision: Precision) -> float:
        """Operations a second, at 16 bits' speed where the precision has no unit of its own."""
        peaks = self.dense_peak_tflops
        return (getattr(peaks, precision) or peaks.bf16) * 1e12

    @property
    def default_sequences(self) -> int:
        """What vLLM takes for --max-num-seqs where it is not given (`EngineArgs.get_batch_defaults`)."""
        large = self.memory_gib >= 70 and not any("a100" in name.lower() for name in self.nvidia_smi)
        return 1024 if large else 256


@dataclass(frozen=True)
class Work:
    """What a pass moves and computes.

    Attributes:
        bytes: read from and written to memory.
        operations: by the precision they are done in.
    """

    bytes: float
    operations: Mapping[Precision, float]

    def memory_seconds(self, gpu: Gpu) -> float:
        """How long its bytes take."""
        return self.bytes / gpu.bandwidth

    def compute_seconds(self, gpu: Gpu) -> float:
        """How long its operations take: the precisions share the matrix units, so their times add up."""
        return sum(count / gpu.peak(precision) for precision, count in self.operations.items())

    def seconds(self, gpu: Gpu) -> float:
        """How long it takes at least."""
        return max(self.memory_seconds(gpu), self.compute_seconds(gpu))

    def limit(self, gpu: Gpu) -> str:
        """Memory or operations, whichever takes longer."""
        return "memory" if self.memory_seconds(gpu) >= self.compute_seconds(gpu) else "operations"


@dataclass(frozen=True)
class Weights:
    """Weights that a pass reads whole.

    Attributes:
        dtypes: bytes by the dtype they are stored in.
        operations: of a token, by precision.
    """

    dtypes: Mapping[str, int]
    operations: Mapping[Precision, int]

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.dtypes.values())


@dataclass(frozen=True)
class Model:
    """What decides the cost of a pass.

    Attributes:
        body: every layer of the language model, without embedding and head.
        head: the output head, `lm_head` or the tied embedding.
        drafter: the MTP head without what it shares; empty where there is none.
        tied: whether the head is the embedding.
        table_bytes: the embedding.
        row_bytes: a row of it.
        attention_layers: layers with full attention and so with a KV cache.
        drafter_layers: those of the MTP head.
        kv_bytes: the keys and values of a token in a layer.
        attention_operations: of a token with one cached token in a layer: QK and AV of every head.
        attention_precision: what the cached keys and values allow.
        state_bytes: the recurrent and convolution states of a sequence, all Gated DeltaNet layers.
        state_operations: of a token with its recurrent states, all Gated DeltaNet layers.
        positions: the longest context of the config.
    """

    body: Weights
    head: Weights
    drafter: Weights
    tied: bool
    table_bytes: int
    row_bytes: int
    attention_layers: int
    drafter_layers: int
    kv_bytes: int
    attention_operations: int
    attention_precision: Precision
    state_bytes: int
    state_operations: int
    positions: int

    def verify(self, sequences: int, context: int, depth: int = 0) -> Work:
        """A pass over the last token and `depth` drafts of each sequence.

        Args:
            sequences: in the batch.
            context: tokens in the cache of each.
            depth: tokens drafted at a time (K); 0 is a step without speculation.
        """
        tokens = sequences * (depth + 1)
        moved, attention = self._attention(self.attention_layers, sequences, tokens, context)
        return Work(
            self.body.bytes
            + self.head.bytes
            + tokens * self.row_bytes
            + moved
            + 2 * sequences * self.state_bytes,
            _added(
                _times(tokens, self.body.operations),
                _times(tokens, self.head.operations),
                {"bf16": tokens * self.state_operations},
                attention,
            ),
        )

    def draft(self, sequences: int, context: int) -> Work:
        """One of the K passes of the MTP head, a token a sequence."""
        moved, attention = self._attention(self.drafter_layers, sequences, sequences, context)
        return Work(
            self.drafter.bytes + self.head.bytes + sequences * self.row_bytes + moved,
            _added(
                _times(sequences, self.drafter.operations),
                _times(sequences, self.head.operations),
                attention,
            ),
        )

    def prefill(self, tokens: int, depth: int = 0) -> Work:
        """A prompt up to its first output token; with speculation the MTP head's cache is filled as well."""
        layers = self.attention_layers + (self.drafter_layers if depth else 0)
        pairs = tokens * (tokens + 1) // 2
        return Work(
            self.body.bytes
            + self.head.bytes
            + (self.drafter.bytes if depth else 0)
            + tokens * (self.row_bytes + layers * self.kv_bytes)
            + self.state_bytes,
            _added(
                _times(tokens, self.body.operations),
                self.head.operations,
                _times(tokens if depth else 0, self.drafter.operations),
                {"bf16": tokens * self.state_operations},
                {self.attention_precision: layers * pairs * self.attention_operations},
            ),
        )

    def step_weights(self, depth: int) -> int:
        """Bytes of weights that a decode step reads."""
        return self.body.bytes + self.head.bytes + depth * (self.drafter.bytes + self.head.bytes)

    def resident_bytes(self, depth: int) -> int:
        """Bytes of weights in the GPU's memory."""
        table = 0 if self.tied else self.table_bytes
        return self.body.bytes + self.head.bytes + table + (self.drafter.bytes if depth else 0)

    def sequence_bytes(self, context: int, depth: int) -> int:
        """Bytes of cache and states that a sequence holds in the GPU's memory."""
        layers = self.attention_layers + (self.drafter_layers if depth else 0)
        return layers * self.kv_bytes * context + self.state_bytes

    def _attention(
        self, layers: int, sequences: int, tokens: int, context: int
    ) -> tuple[int, dict[Precision, float]]:
        """Bytes read of the cache and written to it, and operations on it."""
        moved = layers * self.kv_bytes * (sequences * context + tokens)
        return moved, {self.attention_precision: layers * tokens * context * self.attention_operations}


@dataclass(frozen=True)
class Bound:
    """The fastest decode step.

    Attributes:
        sequences: in the batch.
        bytes: moved by the step, all passes.
        operations: done by it, all passes and precisions.
        seconds: it lasts at least.
        limited_by: what holds up its verification: memory or operations.
        tokens_per_second: that all sequences together get at most.
    """

    sequences: int
    bytes: float
    operations: float
    seconds: float
    limited_by: str
    tokens_per_second: float


@dataclass(frozen=True)
class AcceptanceLength:
    """Tokens that a step yields for a sequence, drafts and all: None where nothing says it; and what says it."""

    value: float | None
    source: str


class _Quantised(BaseModel):
    """The part of a compressed-tensors group that says how wide its packed weights are."""

    num_bits: PositiveInt


class _Group(BaseModel):
    weights: _Quantised | None = None


class _Quantisation(BaseModel):
    config_groups: dict[str, _Group] = {}
    kv_cache_scheme: _Quantised | None = None


class _Shape(BaseModel):
    """The part of a Qwen3.5 text config that decides cache and states."""

    layer_types: tuple[Literal["full_attention", "linear_attention"], ...]
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    linear_num_key_heads: PositiveInt
    linear_num_value_heads: PositiveInt
    linear_key_head_dim: PositiveInt
    linear_value_head_dim: PositiveInt
    linear_conv_kernel_dim: PositiveInt
    max_position_embeddings: PositiveInt
    mamba_ssm_dtype: str | None = None


def gpus(root: Path) -> dict[str, Gpu]:
    """The GPUs of eval/devices.yaml by name.

    Raises:
        DevicesError: the file is missing, no YAML, or does not follow the schema.
    """
    place = "eval/devices.yaml"
    try:
        content = yaml.safe_load((root / place).read_text(encoding="utf-8"))
        return {str(name): Gpu(name=str(name), **facts) for name, facts in content.items()}
    except FileNotFoundError:
        raise DevicesError(f"{place} is missing; `git checkout {place}` restores it") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DevicesError(f"{place}: {field}: {first['msg']}; its first lines say what it takes") from None
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        line = " ".join(str(error).split())
        raise DevicesError(f"{place}: unusable ({line}); its first lines say what it takes") from None


def gpu(name: str, root: Path) -> Gpu:
    """One GPU of eval/devices.yaml.

    Raises:
        UnknownGpuError: it is not there; names those that begin so, or the nearest.
        DevicesError: as `gpus`.
    """
    known = gpus(root)
    if name in known:
        return known[name]
    near = [one for one in known if name and one.startswith(name)] or difflib.get_close_matches(
        name, known, n=1
    )
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
    raise UnknownGpuError(f"there is no GPU {name!r} in eval/devices.yaml; {hint}")


def model(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    kv_cache_dtype: str = "auto",
    state_dtype: str = "auto",
) -> Model:
    """What a checkpoint's passes cost, from its tensors' shapes alone.

    Float weights wider than 16 bits count 16, in which they are served. What a vision tower has is not counted.

    Args:
        tensors: by name, as `checkpoint.tensors` gives them.
        config: config.json.
        kv_cache_dtype: vLLM's flag; auto is what the config quantises the cache to, else 16 bits.
        state_dtype: vLLM's flag --mamba-ssm-cache-dtype; auto is the config's mamba_ssm_dtype, else 16 bits, as vLLM
            resolves it.

    Raises:
        RooflineError: no Qwen3.5 text model without experts, no output head, or a packing or dtype that is not known.
    """
    text = checkpoint.text_config(config)
    if "num_experts" in text:
        raise RooflineError(
            "config.json has num_experts and experts' weights are not counted; take a dense model"
        )
    try:
        shape = _Shape.model_validate(text)
        quantisation = _Quantisation.model_validate(config.get("quantization_config") or {})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RooflineError(f"config.json: {field}: {first['msg']}; a bound needs a Qwen3.5 model") from None
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    table, head = _table_and_head(tensors, bool(tied))
    rest = [name for name in tensors if name not in {table, *head} and not _is_unread(name)]
    drafter = [name for name in rest if name.startswith("mtp.")]
    body = [name for name in rest if not name.startswith("mtp.")]
    cached = _kv_bytes(kv_cache_dtype, quantisation)
    states = _state_bytes(state_dtype, shape)
    linear = shape.layer_types.count("linear_attention")
    recurrent = shape.linear_num_value_heads * shape.linear_value_head_dim * shape.linear_key_head_dim
    channels = (
        2 * shape.linear_num_key_heads * shape.linear_key_head_dim
        + shape.linear_num_value_heads * shape.linear_value_head_dim
    )
    return Model(
        body=_weights({name: tensors[name] for name in body}, quantisation),
        head=_weights({name: tensors[name] for name in head}, quantisation),
        drafter=_weights({name: tensors[name] for name in drafter}, quantisation),
        tied=head == [table],
        table_bytes=_served_bytes(tensors[table]),
        row_bytes=_served_bytes(tensors[table]) // tensors[table].shape[0],
        attention_layers=shape.layer_types.count("full_attention"),
        drafter_layers=len({name.split(".")[2] for name in drafter if name.startswith("mtp.layers.")}),
        kv_bytes=2 * shape.num_key_value_heads * shape.head_dim * cached,
        attention_operations=4 * shape.num_attention_heads * shape.head_dim,
        attention_precision="fp8" if cached == 1 else "bf16",
        state_bytes=linear
        * (recurrent * states + channels * (shape.linear_conv_kernel_dim - 1) * _SIXTEEN_BIT),
        state_operations=linear * _STATE_OPERATIONS * recurrent,
        positions=shape.max_position_embeddings,
    )


def decode(
    of: Model, on: Gpu, sequences: int, context: int, depth: int = 0, acceptance_length: float = 1.0
) -> Bound:
    """The fastest decode step.

    Args:
        of: the model.
        on: the GPU.
        sequences: in the batch.
        context: tokens in the cache of each.
        depth: tokens drafted at a time (K).
        acceptance_length: tokens that a step yields for a sequence, from 1 to depth + 1.

    Raises:
        RooflineError: no step yields so many tokens.
    """
    _check_acceptance(acceptance_length, depth)
    verify, draft = of.verify(sequences, context, depth), of.draft(sequences, context)
    seconds = verify.seconds(on) + depth * draft.seconds(on)
    return Bound(
        sequences,
        verify.bytes + depth * draft.bytes,
        sum(verify.operations.values()) + depth * sum(draft.operations.values()),
        seconds,
        verify.limit(on),
        sequences * acceptance_length / seconds,
    )


def by_depth(one: Variant, on: Gpu, lengths: Mapping[int, float], context: int) -> dict[int, float]:
    """Output tokens per second of one sequence at most, at several depths.

    Args:
        one: the variant; its checkpoint and flags, whatever depth they say.
        on: the GPU.
        lengths: acceptance length by depth (K), 1 at depth 0.
        context: tokens in the cache.

    Raises:
        RooflineError: as `analyse`.
    """
    of = _Served.of(one, on).model
    return {
        depth: decode(of, on, 1, context, depth, length).tokens_per_second
        for depth, length in lengths.items()
    }


def chain(one: Variant, others: Iterable[str]) -> list[Variant]:
    """A variant's baseline where it has one, the variant, and others by name; each once.

    Raises:
        UnknownVariantError: there is no such variant; names the nearest.
    """
    names = [*([one.baseline] if one.baseline else []), one.name, *others]
    return [variants.load(name, one.root) for name in dict.fromkeys(names)]


def analyse(
    compared: Sequence[Variant],
    on: Gpu,
    contexts: Sequence[int] = CONTEXTS,
    acceptance_length: float | None = None,
) -> dict[str, Any]:
    """Bounds of variants on a GPU, each against the first.

    Args:
        compared: the baseline first.
        on: the GPU.
        contexts: tokens in the cache; cut to the shortest context that one of the variants is served with.
        acceptance_length: assumed for variants with drafts that have no record of their own,
            an acceptance record of this checkpoint and depth.

    Returns:
        {"gpu", "assumptions", "notes": sentences, "baseline", "contexts", "variants": [{"variant", "checkpoint":
        digest, "weights": {"body", "head", "drafter": bytes by stored dtype, "tied"}, "l2_share": of the weights
        that the L2 cache could hold, "kv_bytes_per_token", "state_bytes_per_sequence", "max_num_seqs", "depth",
        "acceptance_length": {"value", "source"}, "decode": [{"depth", "acceptance_length", "context",
        "weights_bytes_per_step", "one", "all": `Bound`s of one sequence and of as many as are served at a time and
        fit, "one_over_baseline", "all_over_baseline"}], "prefill": [{"tokens", "bytes_per_token",
        "operations_per_token", "seconds", "tokens_per_second", "limited_by"}], "measured": a row a class of the
        newest latency record on this GPU, or none}]}. Decode rows come without speculation and, where an acceptance
        length is known, with it; a ratio is to the baseline as it is served.

    Raises:
        MissingCheckpointError, CorruptCheckpointError: as `checkpoint.check`; names the command that makes it.
        FlagError: as `launch.resolve`.
        RooflineError: as `model`; drafts by another method than MTP, or an MTP head that is not there; weights and
            cache that do not fit the GPU; an acceptance length above depth + 1.
    """
    served = [_Served.of(one, on) for one in compared]
    longest = min(one.max_model_len for one in served)
    kept = sorted({min(context, longest) for context in contexts})
    if not kept or kept[0] < 1:
        raise RooflineError("a bound needs contexts of at least one token; give such")
    rows = [one.described(on, kept, acceptance_length) for one in served]
    as_served = {
        row["context"]: row for row in rows[0]["decode"] if row["depth"] == rows[0]["decode"][-1]["depth"]
    }
    for row in (row for one in rows for row in one["decode"]):
        for batch in ("one", "all"):
            against = as_served[row["context"]][batch]["tokens_per_second"]
            row[f"{batch}_over_baseline"] = row[batch]["tokens_per_second"] / against
    return {
        "gpu": on.model_dump(mode="json"),
        "assumptions": list(ASSUMPTIONS),
        "notes": [note for one in rows for note in _notes(one, on)],
        "baseline": compared[0].name,
        "contexts": kept,
        "variants": rows,
    }


@dataclass(frozen=True)
class _Served:
    """A variant with what its flags decide."""

    variant: Variant
    flags: Mapping[str, Any]
    digest: str
    model: Model
    depth: int
    max_model_len: int
    sequences: int

    @classmethod
    def of(cls, one: Variant, on: Gpu) -> "_Served":
        checkpoint.check(one.weights, variants.making_command(one.weights, one.root))
        command = launch.resolve(one, platform="cuda")
        flags = command.flags
        if flags.get("dtype") in ("float32", "float"):
            raise RooflineError(
                f"{one.name} is served in float32, for which eval/devices.yaml has no peak; set VLLM_DTYPE=bfloat16"
            )
        try:
            found = model(
                checkpoint.tensors(one.weights),
                checkpoint.read_config(one.weights),
                kv_cache_dtype=flags.get("kv-cache-dtype", "auto"),
                state_dtype=flags.get("mamba-ssm-cache-dtype", "auto"),
            )
        except RooflineError as error:
            raise RooflineError(f"{one.name}: {error}") from None
        depth = _depth(one, flags, found)
        return cls(
            one,
            flags,
            checkpoint.digest(one.weights),
            found,
            depth,
            command.max_model_len,
            flags.get("max-num-seqs") or on.default_sequences,
        )

    def described(self, on: Gpu, contexts: Sequence[int], given: float | None) -> dict[str, Any]:
        accepted = self.acceptance_length(given)
        served = [(0, 1.0)]
        if self.depth and accepted.value is not None:
            served.append((self.depth, accepted.value))
        of = self.model
        parts = {"body": of.body, "head": of.head, "drafter": of.drafter}
        return {
            "variant": self.variant.name,
            "checkpoint": self.digest,
            "weights": {**{name: dict(part.dtypes) for name, part in parts.items()}, "tied": of.tied},
            "l2_share": min(1.0, on.l2_cache_mb * 1e6 / of.resident_bytes(self.depth)),
            "kv_bytes_per_token": of.attention_layers * of.kv_bytes,
            "state_bytes_per_sequence": of.state_bytes,
            "max_num_seqs": self.sequences,
            "depth": self.depth,
            "acceptance_length": asdict(accepted),
            "decode": [
                {
                    "depth": depth,
                    "acceptance_length": length,
                    "context": context,
                    "weights_bytes_per_step": of.step_weights(depth),
                    "one": asdict(decode(of, on, 1, context, depth, length)),
                    "all": asdict(decode(of, on, self.batch(on, context), context, depth, length)),
                }
                for depth, length in served
                for context in contexts
            ],
            "prefill": [self.prefill(on, context) for context in contexts],
            "measured": self.measured(on),
        }

    def batch(self, on: Gpu, context: int) -> int:
        """Sequences served at a time, no more than fit."""
        share = float(self.flags.get("gpu-memory-utilization", _MEMORY_SHARE))
        room = share * on.memory_gib * 2**30 - self.model.resident_bytes(self.depth)
        fitting = int(room // self.model.sequence_bytes(context, self.depth))
        if fitting < 1:
            needed = self.model.resident_bytes(self.depth) + self.model.sequence_bytes(context, self.depth)
            raise RooflineError(
                f"{self.variant.name} needs {needed / 2**30:.1f} GiB for its weights and {context} tokens and may use "
                f"{share:.0%} of {on.name}'s {on.memory_gib:.0f} GiB; take a larger GPU or a smaller variant"
            )
        return min(self.sequences, fitting)

    def prefill(self, on: Gpu, tokens: int) -> dict[str, Any]:
        work = self.model.prefill(tokens, self.depth)
        seconds = work.seconds(on)
        return {
            "tokens": tokens,
            "bytes_per_token": work.bytes / tokens,
            "operations_per_token": sum(work.operations.values()) / tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "limited_by": work.limit(on),
        }

    def acceptance_length(self, given: float | None) -> AcceptanceLength:
        if not self.depth:
            return AcceptanceLength(1.0, "no speculation")
        why = f"there is no acceptance record of {self.variant.name}"
        for path in store.records(self.variant.folder, "acceptance"):
            record, name = store.read(path), f"{self.variant.name}/{path.name}"
            if record["provenance"]["checkpoint"]["digest"] != self.digest:
                why = f"{name} is of another checkpoint"
                continue
            for row in record["depths"]:
                if row["depth"] == self.depth:
                    return AcceptanceLength(row["length"]["value"], f"{name}, K = {self.depth}")
            why = f"{name} has no depth {self.depth}"
        if given is not None:
            _check_acceptance(given, self.depth)
            return AcceptanceLength(given, f"assumed: {why}")
        return AcceptanceLength(None, f"unknown, so only without speculation: {why}")

    def measured(self, on: Gpu) -> list[dict[str, Any]]:
        """The newest latency record on this GPU, of this checkpoint, drafts and cache, against its bound."""

        def fits(record: Mapping[str, Any]) -> bool:
            made = record["provenance"]
            names = {one["name"] for one in made["hardware"]["gpus"]}
            alike = all(
                made["flags"].get(key) == self.flags.get(key)
                for key in ("speculative-config", "kv-cache-dtype")
            )
            same = bool(made["checkpoint"]["digest"] == self.digest)
            return bool(names) and names <= set(on.nvidia_smi) and alike and same

        try:
            path = store.latest(self.variant.folder, "latency", fits)
        except store.MissingRecordError:
            return []
        rows = []
        for name, one in store.read(path)["classes"].items():
            # With drafts that were not counted, the bound is that of drafts that were all accepted.
            length = (one["acceptance"] or {"length": self.depth + 1})["length"]
            bound = self.whole_requests(on, one, length)
            rate = one["output_throughput_tokens_per_s"]
            rows.append(
                {
                    "record": path.name,
                    "class": name,
                    "prompt_tokens": one["prompt_tokens"],
                    "output_tokens": one["output_tokens"],
                    "concurrency": one["concurrency"],
                    "tokens_per_second": rate,
                    "bound_tokens_per_second": bound,
                    "share_of_bound": rate / bound,
                }
            )
        return rows

    def whole_requests(self, on: Gpu, one: Mapping[str, Any], length: float) -> float:
        """Output tokens a second at most over requests of a class, their prompts included."""
        prompt, output, sequences = one["prompt_tokens"], one["output_tokens"], one["concurrency"]
        step = decode(self.model, on, sequences, prompt, self.depth, length)
        seconds = (output - 1) / step.tokens_per_second
        # Requests side by side can share a pass between one's prompt and another's decoding.
        if sequences == 1:
            seconds += self.model.prefill(prompt, self.depth).seconds(on)
        return float(output / seconds)


def _notes(one: Mapping[str, Any], on: Gpu) -> list[str]:
    """What a reader of a variant's bounds has to know, in words."""
    name, accepted = one["variant"], one["acceptance_length"]
    notes = []
    if one["depth"]:
        value = "" if accepted["value"] is None else f" {accepted['value']:.3f}"
        notes.append(f"{name}: acceptance length at K = {one['depth']}{value} ({accepted['source']})")
    if one["l2_share"] > _TELLING_L2_SHARE:
        notes.append(
            f"{name}: {on.name}'s L2 cache holds {one['l2_share']:.0%} of its weights; what stays there from pass to "
            "pass need not come from memory, so this is no strict bound"
        )
    if not one["measured"]:
        notes.append(f"{name}: not measured on this GPU")
    return notes


def _check_acceptance(length: float, depth: int) -> None:
    if not 1 <= length <= depth + 1:
        raise RooflineError(
            f"an acceptance length of {length} is none for {depth} drafted tokens; it lies between 1 and {depth + 1}"
        )


def _depth(one: Variant, flags: Mapping[str, Any], found: Model) -> int:
    """Tokens drafted at a time (K)."""
    speculation = flags.get("speculative-config")
    if not speculation:
        return 0
    if "mtp" not in str(speculation.get("method")):
        raise RooflineError(
            f"{one.name} drafts by {speculation.get('method')!r} and only the passes of an MTP head are counted; "
            "set method to mtp in VLLM_SPECULATIVE_CONFIG or unset it"
        )
    if not found.drafter.bytes:
        raise RooflineError(
            f"{one.name} drafts by an MTP head and its checkpoint has none; unset VLLM_SPECULATIVE_CONFIG"
        )
    return int(speculation["num_speculative_tokens"])


def _table_and_head(tensors: Mapping[str, TensorInfo], tied: bool) -> tuple[str, list[str]]:
    """The embedding, and what is read as the output head: lm_head as stored, else that embedding."""
    tables = [
        name for name in tensors if name.endswith("embed_tokens.weight") and not name.startswith("mtp.")
    ]
    if len(tables) != 1:
        raise RooflineError("the checkpoint has no one embed_tokens.weight; take a language model")
    head = [
        name for name in tensors if name.startswith("lm_head.") and not name.endswith(("_shape", "_g_idx"))
    ]
    if not head and not tied:
        raise RooflineError(
            "the checkpoint has no lm_head, yet its config ties no embeddings; set tie_word_embeddings or add lm_head"
        )
    return tables[0], head or tables


def _is_unread(name: str) -> bool:
    """Whether no pass over text reads it: a vision tower, notes on a packing, an embedding that is gathered."""
    return "visual." in name or name.endswith(("_shape", "embed_tokens.weight"))


def _served_bytes(info: TensorInfo) -> int:
    """Bytes in memory: floats wider than 16 bits are served in 16."""
    return info.elements * _SIXTEEN_BIT if info.dtype in ("F32", "F64") else info.end - info.start


def _weights(part: Mapping[str, TensorInfo], quantisation: _Quantisation) -> Weights:
    dtypes: dict[str, int] = {}
    operations: dict[Precision, int] = {}
    for name, info in part.items():
        if name.endswith("qweight"):
            raise RooflineError(
                f"{name} is packed as AutoAWQ or GPTQ pack it; take a checkpoint of compressed-tensors"
            )
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + _served_bytes(info)
        # One dimension is a norm's or a gate's; scales and zero points go with the weights that they belong to.
        if len(info.shape) > 1 and name.endswith((".weight", ".weight_packed")):
            numbers = info.elements
            if name.endswith("_packed"):
                numbers = (info.end - info.start) * 8 // _packed_bits(quantisation)
            precision = _PRECISIONS.get(info.dtype, "bf16")
            operations[precision] = operations.get(precision, 0) + 2 * numbers
    return Weights(dtypes, operations)


def _packed_bits(quantisation: _Quantisation) -> int:
    widths = {group.weights.num_bits for group in quantisation.config_groups.values() if group.weights}
    if len(widths) != 1:
        raise RooflineError(
            f"config.json gives packed weights {len(widths)} widths and a bound reads one; give all groups one num_bits"
        )
    return widths.pop()


def _kv_bytes(flag: str, quantisation: _Quantisation) -> int:
    """Bytes of a number in the KV cache."""
    if flag == "auto":
        return quantisation.kv_cache_scheme.num_bits // 8 if quantisation.kv_cache_scheme else _SIXTEEN_BIT
    if flag not in _KV_BYTES:
        raise RooflineError(
            f"VLLM_KV_CACHE_DTYPE={flag} has a layout that is not counted; take {', '.join(_KV_BYTES)}"
        )
    return _KV_BYTES[flag]


def _state_bytes(flag: str, shape: _Shape) -> int:
    """Bytes of a number in a recurrent state."""
    dtype = shape.mamba_ssm_dtype or "bfloat16" if flag == "auto" else flag
    if dtype not in _STATE_BYTES:
        raise RooflineError(
            f"recurrent states in {dtype} are not known; mamba_ssm_dtype is one of {', '.join(_STATE_BYTES)}"
        )
    return _STATE_BYTES[dtype]


def _times(count: int, operations: Mapping[Precision, int]) -> dict[Precision, float]:
    return {precision: count * each for precision, each in operations.items()}


def _added(*several: Mapping[Precision, float]) -> dict[Precision, float]:
    total: dict[Precision, float] = {}
    for operations in several:
        for precision, count in operations.items():
            total[precision] = total.get(precision, 0) + count
    return total
