"""The data model of a plan: vLLM's predicted configuration for one variant on one device."""

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.vllm_plugin.engine_facts import AttentionLayers


class Facts(BaseModel):
    """Base class of a plan and of its parts; they are frozen, and unknown fields are errors."""

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
    num_speculative_tokens: int = Field(description="drafted tokens per step (K); 0 without drafts")
    kv_cache_dtype: str
    state_dtype: str = Field(
        description="dtype of the Gated DeltaNet state; auto: as in the checkpoint's config"
    )
    state_cache_mode: str = Field(description="none, all or align: how states of a prefix are kept")
    compilation: str
    requested_graph_mode: str
    requested_graph_sizes: list[int] = Field(description="tokens of a step for which a graph is requested")


class LinearKernels(Facts):
    """The linear layers that one kernel computes."""

    kernel: str
    layers: dict[str, int] = Field(description="name of the layer -> number of layers")


class KvCache(Facts):
    """The KV cache, pages of states included."""

    available_bytes: int
    block_size: int = Field(description="tokens, after vLLM aligned it to the state pages")
    blocks: int
    tokens: int = Field(description="capacity for requests of max_model_len tokens")
    sequences_at_max_model_len: float
    shortest_prompt_with_hit: int | None = Field(description="tokens; null without prefix caching")


class Graphs(Facts):
    """CUDA graphs, after vLLM's fallbacks."""

    mode: str
    captured: dict[str, list[int]] = Field(
        description="mode -> numbers of tokens for which a step is captured"
    )
    decode_query_len: int = Field(description="tokens of a request in a verify step, K + 1")


class JitModule(Facts):
    """Kernels of FlashInfer or Humming that are compiled at their first use."""

    module: str
    reason: str
    possible: bool = Field(description="whether the host of the plan has the compiler that the kernels need")


class Plan(Facts):
    """Predicted configuration of vLLM for one variant on one device; fields after a failed step are null or empty."""

    variant: str
    gpu: str = Field(description="short name of the GPU model; cpu for a CPU")
    compute_capability: str | None = Field(description="of the GPU, such as 8.6; null for a CPU")
    planned: str = Field(description="time of the plan, UTC, to the second")
    vllm: str
    checkpoint: str = Field(description="where the dimensions of the checkpoint come from")
    inputs: dict[str, str] = Field(
        default={},
        description="digests of the checkpoint's config.json, where it is here, and of the GPU's data sheet; absent in "
        "old records",
    )
    flags: dict[str, str] = Field(
        {}, description="vLLM's flags (values as JSON) and environment variables of the server, by name"
    )
    engine: EngineConfig | None = None
    attention: list[AttentionLayers] = []
    linears: list[LinearKernels] = []
    weight_bytes: dict[str, int] = Field({}, description="kind of weights -> bytes")
    kv_cache: KvCache | None = None
    graphs: Graphs | None = None
    jit: list[JitModule] = []
    failed_at: str | None = Field(None, description="the step that failed; null where none did")
    error: str | None = None
