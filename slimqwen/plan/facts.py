"""The model of a plan: predicted facts about vLLM for one variant on one device."""

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.vllm_plugin.engine_facts import AttentionLayers


class Facts(BaseModel):
    """Base of every group of facts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(Facts):
    """vLLM's engine configuration."""

    architecture: str
    dtype: str
    quantization: str | None
    model_runner: str = Field(description="V1 or V2")
    max_model_len: int = Field(description="tokens of prompt and output together")
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    prefix_caching: bool
    num_speculative_tokens: int = Field(description="0 without drafts")
    kv_cache_dtype: str
    state_dtype: str = Field(description="of the Gated DeltaNet state; auto: as in the checkpoint's config")
    state_cache_mode: str = Field(description="none, all or align: how states of a prefix are kept")
    compilation: str
    requested_graph_mode: str
    requested_graph_sizes: list[int] = Field(description="tokens of a step")


class LinearKernels(Facts):
    """Linear layers that one kernel computes."""

    kernel: str
    layers: dict[str, int] = Field(description="name of the layer -> number of layers")


class KvCache(Facts):
    """The KV cache, state pages included."""

    available_bytes: int
    block_size: int = Field(description="tokens, after vLLM aligned it to the state pages")
    blocks: int
    tokens: int = Field(description="capacity for requests of max_model_len tokens")
    sequences_at_max_model_len: float
    shortest_prompt_with_hit: int | None = Field(description="tokens; null without prefix caching")


class Graphs(Facts):
    """CUDA graphs, after vLLM's fallbacks."""

    mode: str
    captured: dict[str, list[int]] = Field(description="mode -> tokens of each captured step")
    decode_query_len: int = Field(description="tokens of a request in a verify step, K+1")


class JitModule(Facts):
    """Kernels of FlashInfer or Humming that are compiled at their first use."""

    module: str
    reason: str
    possible: bool = Field(description="whether the host of the plan has their compiler")
    libraries: list[str] = Field(
        default=[], description="names in FlashInfer; empty where they cannot be compiled ahead"
    )
    baked: bool = Field(
        default=False,
        description="whether an archive beside the checkpoint holds all of them, so that none is compiled",
    )


class LostChoice(Facts):
    """A choice of an autotuner, or the only form of a kernel, that a GPU cannot run."""

    choice: str = Field(description="choice of the autotuner; empty without one")
    reason: str


class TritonKernel(Facts):
    """A Triton kernel that was compiled for a GPU, in all its signatures and with all choices of its autotuner."""

    kernel: str
    compiled: int = Field(description="signatures times choices")
    lost: list[LostChoice]
    runs: bool = Field(description="whether every launch has a choice that the GPU can run")


class TritonKernels(Facts):
    """Triton kernels that vLLM's own warm-up launches, compiled without a GPU."""

    target: str = Field(description="such as sm_86")
    kernels: list[TritonKernel]
    left_out: list[str] = Field(description="kernels that were not compiled, and why")
    forms: int = Field(description="compiled kernels times signatures times choices")
    compiled_at_start: int = Field(
        description="forms that a first start compiles, as no archive beside the checkpoint holds them"
    )


class Plan(Facts):
    """Predicted configuration of vLLM for one variant on one device; after a failed step fields are null or empty."""

    variant: str
    gpu: str = Field(description="short name of the GPU model; cpu for a CPU")
    planned: str = Field(description="UTC, to the second")
    vllm: str
    checkpoint: str = Field(description="where its dimensions come from")
    flags: dict[str, str] = Field(
        {}, description="vLLM's flags, values as JSON, and variables of the server, by name"
    )
    engine: EngineConfig | None = None
    attention: list[AttentionLayers] = []
    linears: list[LinearKernels] = []
    weight_bytes: dict[str, int] = Field({}, description="by kind of weight")
    kv_cache: KvCache | None = None
    graphs: Graphs | None = None
    jit: list[JitModule] = []
    kernels: TritonKernels | None = Field(None, description="null where they were not requested")
    failed_at: str | None = Field(None, description="the step that failed; null where none did")
    error: str | None = None
