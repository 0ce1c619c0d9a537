"""Every place where this package changes vLLM, or torch, Triton and FlashInfer inside vLLM: one row each.

The table imports nothing of vLLM. `upstream.py` compares each row with the installed code before the row's code runs.
"""

from collections.abc import Mapping
from types import MappingProxyType

from slimqwen.vllm_plugin.patches.patch import Patch

KNOWN_VERSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("0.32.0",), "cuda": ("0.32.0", "0.33.0")}
)
"""vLLM's platform, as `device_type` -> the versions that its patches were written for."""

_NONE = "none found, 2026-11-27"
_CPU = ("cpu",)
_CUDA = ("cuda",)


def _both(in_0_32: str, in_0_33: str) -> Mapping[str, str]:
    """Digests of a body that vLLM 0.33 changed, not in what its patch relies on."""
    return MappingProxyType({"0.32.0": in_0_32, "0.33.0": in_0_33})


_GDN = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_CONV = "vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d"
_WNA16 = "vllm.model_executor.kernels.linear.mixed_precision.cpu:CPUWNA16LinearKernel"
_STATES = "vllm.v1.worker.mamba_utils:MambaSpecDecodeGPUContext"
_ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_SAVED_GRAPH = "torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable"
_MTP = "vllm.model_executor.models.qwen3_5_mtp:Qwen3_5MTP"
_OPENAI = "vllm.entrypoints.openai"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding"
_LOOKUP = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding"

_ROWS = (
    Patch(
        "patches.serving.draft_head_class",
        "vLLM has another class for MTP heads, which knows no draft head",
        "vllm#29334",
        {},
    ),
    Patch(
        "patches.cpu.forked_processes",
        "vLLM would be imported three times, one process after the other",
        _NONE,
        {
            "vllm.platforms.cpu:CpuPlatform.check_and_update_config": "6f9943a1a842",
            "vllm.v1.engine.core:EngineCoreProc.run_engine_core": "b5a306be6b4c",
            "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main": "0980586cb117",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.model_inspection",
        "vLLM would be imported once more to inspect the model's class",
        "vllm#19317",
        {"vllm.model_executor.models.registry:_run_in_subprocess": "2495e9ba5db9"},
        _CPU,
    ),
    Patch(
        "patches.cpu.widened_linears",
        "this CPU has no 16-bit products: unquantised linears multiply in float32",
        "vllm#27524",
        {"vllm._custom_ops:create_onednn_mm": "f07db308d4f8", "vllm._custom_ops:onednn_mm": "2d55b733db36"},
        _CPU,
    ),
    Patch(
        "patches.cpu.int4_activations",
        "vLLM would round the activations of W4A16 linears to 8 bits where the CPU has AMX",
        "vllm#35697",
        {f"{_WNA16}.process_weights_after_loading": "404817133388"},
        _CPU,
    ),
    Patch(
        "patches.cpu.w4a16_linear",
        "vLLM's library for this CPU has no W4A16 kernel: torch's int4 product is used",
        "vllm#55613, vllm#55824",
        {f"{_WNA16}.can_implement": "57aac4c3a742", f"{_WNA16}.apply_weights": "577607f11d04"},
        _CPU,
    ),
    Patch(
        "patches.cpu.w8a16_linear",
        "vLLM has no W8A16 kernel for a CPU: torch's int8 product is used",
        _NONE,
        {"vllm.model_executor.kernels.linear:choose_mp_linear_kernel": "c2f606389b25"},
        _CPU,
    ),
    Patch(
        "patches.cpu.unpacked_prompts",
        "packed products are slow with many rows: prompts are multiplied with unpacked weights",
        _NONE,
        {
            f"{_WNA16}.process_weights_after_loading": "404817133388",
            f"{_WNA16}.apply_weights": "577607f11d04",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.mtp_rotary",
        "vLLM prepares M-RoPE positions for the MTP head of a text-only Qwen3.5, which has plain RoPE",
        _NONE,
        {
            "vllm.model_executor.models.config:Qwen3_5ForCausalLMConfig.verify_and_update_config": "ca2462df1fdf"
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.sampling_expansion",
        "without Triton, vLLM leaves the temperature, top-k and top-p of draft tokens unset",
        "vllm#42638",
        {"vllm.utils.cpu_triton_utils:_expand_kernel_impl": "6824aaf727d7"},
        _CPU,
    ),
    Patch(
        "patches.cpu.draft_logits",
        "vLLM applies min_p and logit_bias to no drafted token, and so refuses both beside drafts",
        "vllm#42744, vllm#42802, vllm#38467",
        {
            "vllm.v1.worker.gpu_model_runner:build_logitsprocs": "5acdb05ac125",
            "vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors": "b5a53301381c",
            "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": "511c6c3464f0",
            "vllm.sampling_params:SamplingParams._validate_spec_decode": "458240485f81",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.seeded_prompts",
        "a request with a seed and a prompt longer than max_num_batched_tokens ends the engine",
        "vllm-qaic#92",
        {
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "dd6ddac9e5a2",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": "17571cb50f39",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.top_k_without_drafts",
        "a request with top_k alone ends an engine that speculates",
        "vllm-ascend#7280",
        {"vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_only": "e7c5093a3c85"},
        _CPU,
    ),
    Patch(
        "patches.cpu.short_convolution",
        "without bfloat16 in oneDNN, torch's convolution in bfloat16 takes a hundred times as long as in float32",
        "vllm#49688",
        {
            f"{_CONV}:causal_conv1d_fn_cpu": "9377d4acd74a",
            f"{_CONV}:causal_conv1d_update_torch": "16e3ace41789",
            f"{_GDN}:_spec_forward": "60d00e770174",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.prompt_convolution",
        "beside drafts vLLM convolves prompts with torch, which takes six times as long as its own kernel",
        "vllm#49688, vllm#48577",
        {
            f"{_GDN}:causal_conv1d_torch": "9377d4acd74a",
            f"{_GDN}:_causal_conv1d_fwd_cpu": "6f5b459833f8",
            f"{_GDN}:_spec_aware_nonspec": "0d5b9253fa88",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.draft_prompts",
        "an MTP head attends from every token of a prompt, but drafts from the last one",
        _NONE,
        {"vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": "06f4ff322515"},
        _CPU,
    ),
    Patch(
        "patches.cpu.lone_token",
        "vLLM's convolution of prompts ends the engine at a prompt of one token",
        _NONE,
        {f"{_GDN}:_causal_conv1d_fwd_cpu": "6f5b459833f8"},
        _CPU,
    ),
    Patch(
        "patches.cpu.lone_sequence",
        "with drafts, a prompt whose last part has one token ends the engine",
        _NONE,
        {
            "vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_cpu": "4d201c5bcbc3",
            f"{_GDN}:_spec_aware_nonspec": "0d5b9253fa88",
        },
        _CPU,
    ),
    Patch(
        "patches.faults.padded_prompts",
        "with drafts, a prompt of one token that joins running requests is answered from a wrong recurrent state",
        "vllm#55178, vllm#54392, vllm#45237",
        {
            "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "4216bf7a33cd",
            "vllm.v1.core.sched.scheduler:Scheduler.schedule": _both("aec383d59905", "91bb959e7ef3"),
        },
    ),
    Patch(
        "patches.cpu.short_drafts",
        "vLLM assumes that every sequence always has K drafted tokens, which is wrong near the end of a context",
        "vllm#48577, vllm#56518",
        {f"{_GDN}:_spec_forward": "60d00e770174"},
        _CPU,
        fixed_in="0.33.0",
    ),
    Patch(
        "patches.cpu.aligned_states",
        "without Triton, prefix caching with MTP ends the engine at its first request",
        "vllm#54504",
        {f"{_STATES}.run_fused_precopy": "4680d4f707ce", f"{_STATES}.run_fused_postprocess": "4ac7badc61fd"},
        _CPU,
    ),
    Patch(
        "patches.faults.notify_mailbox",
        "under steady load the sockets that wake vLLM's processes hold 40 bytes more for every message",
        _NONE,
        {
            "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.record_read": "b745e5451079",
            "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait": "ac752911f78d",
        },
        fixed_in="0.33.0",
    ),
    Patch(
        "patches.faults.embedding_config",
        "Qwen3.5's embedding and its MTP head's get no quantisation config: a packed embedding cannot be loaded",
        "vllm#54304, vllm#45994, vllm#54463",
        {f"{_EMBEDDING}.__init__": "7aefa78cea6e"},
    ),
    Patch(
        "patches.cpu.embedding_lookup",
        "without Triton, the first token that is looked up in a packed embedding ends the engine",
        "none found, 2026-11-28",
        {f"{_LOOKUP}:_dequant_gather_triton": "0b56e08d310c"},
        _CPU,
    ),
    Patch(
        "patches.cpu.aot_load",
        "vLLM cannot load the graphs that torch's inductor backend saved",
        _NONE,
        {
            f"{_SAVED_GRAPH}.deserialize_compile_artifacts": "12e082cd24cc",
        },
        _CPU,
    ),
    Patch(
        "patches.cpu.quoted_paths",
        "torch would not quote a path for the compiler",
        "pytorch#191010",
        {"torch._inductor.cpp_builder:CppBuilder.__init__": "a85d3d14c3d9"},
        _CPU,
    ),
    Patch(
        "patches.cpu.eager_ranks",
        "vLLM would compile a kernel at the first request with log-probabilities",
        "sendnn-inference#550",
        {"vllm.v1.sample.sampler:batched_count_greater_than": "1e6ad0c185ee"},
        _CPU,
    ),
    Patch(
        "patches.cpu.prompt_logits",
        "log-probabilities of a long prompt take gigabytes for the logits of all its tokens",
        "vllm#52054, vllm#45327, vllm#5907",
        {
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": "61e1701dc7d4",
            "vllm.v1.sample.sampler:Sampler.gather_logprobs": "de7bdf580af3",
        },
        _CPU,
    ),
    # Below: `draft_vocabulary` makes it, where a checkpoint has a draft head.
    Patch(
        "draft_vocabulary",
        "vLLM's MTP head has the whole vocabulary's output head and no other",
        "vllm#29334",
        {f"{_MTP}.compute_logits": "f97bbc5f150e", f"{_MTP}.load_weights": "631dc5186af0"},
        function="DraftVocabularyMTP",
    ),
    # Below: what `compile_watch.register` makes, in every process of an engine that compiles.
    Patch(
        "patches.serving.compile_watch",
        "vLLM's log does not say of each graph whether it was loaded or compiled, nor why",
        "vllm#16848",
        {"vllm.compilation.decorators:monitor_torch_compile": "cc41810594db"},
        function="watch_compilations",
    ),
    Patch(
        "patches.serving.compile_watch",
        "vLLM's compile key has the checkpoint's path, so a compile cache cannot be moved",
        "vllm#47573, vllm#52154",
        {"vllm.config.model:ModelConfig.compute_hash": _both("f882ac670989", "5664dd876011")},
        function="leave_checkpoint_path_out_of_key",
    ),
    Patch(
        "patches.serving.compile_watch",
        "FlashInfer checks with ninja and a CUDA toolkit, at each start, libraries that it compiled before",
        "flashinfer#4884, flashinfer#4885",
        {"flashinfer.jit.env:get_aot_artifacts": "0df682e58bb6"},
        _CUDA,
        function="load_flashinfer_libraries",
    ),
    Patch(
        "patches.serving.triton_cache",
        "Triton finds the files of a kernel by absolute paths, so its cache cannot be moved",
        _NONE,
        {"triton.runtime.cache:FileCacheManager.get_group": _both("a073fd3c49d0", "dff2fc1a7e9f")},
        _CUDA,
        function="find_beside_group_file",
    ),
    Patch(
        "patches.serving.triton_cache",
        "Triton's log does not say which kernels were compiled anew",
        _NONE,
        {"triton.compiler.compiler:compile": "abebb8432922"},
        _CUDA,
        function="log_compilations",
    ),
    # Below: the API server alone. `endpoints.Endpoints` makes these.
    Patch(
        "patches.serving.request_limits",
        "vLLM parses a body of any size",
        _NONE,
        {},
        function="BodyLimit",
    ),
    Patch(
        "patches.serving.request_limits",
        "a stream that begins with an error has status 200",
        "vllm#58192",
        {
            "vllm.entrypoints.generate.base.serving:GenerateBaseServing.create_streaming_error_response": "0e66dc1e58d1"
        },
        function="RefusedStreams",
    ),
    Patch(
        "patches.serving.request_limits",
        "a full queue is answered with 503 and without Retry-After",
        "vllm#49445, vllm#49330",
        {f"{_ASYNC_LLM}.check_admission": "157a42ef2f78"},
        function="answer_overload",
    ),
    Patch(
        "patches.serving.request_limits",
        "a value of the wrong type in a body is answered with 500",
        _NONE,
        {
            f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.check_structured_outputs_count": "3215f85b7a3b"
        },
        function="refuse_unreadable_bodies",
    ),
    Patch(
        "patches.serving.request_limits",
        "a response that would not fit the context is shortened and nothing says so",
        _NONE,
        {
            f"{_OPENAI}.chat_completion.serving:get_max_tokens": "b7e31f5e602d",
            f"{_OPENAI}.chat_completion.batch_serving:get_max_tokens": "b7e31f5e602d",
            f"{_OPENAI}.completion.serving:get_max_tokens": "b7e31f5e602d",
        },
        function="refuse_longer_answers",
    ),
    Patch(
        "patches.serving.request_limits",
        "a request that could not be sent to the engine stays in the queue for ever",
        _NONE,
        {f"{_ASYNC_LLM}._add_request": "79c022f77fbc", f"{_ASYNC_LLM}.add_request": "5b6d7cda60e5"},
        function="forget_unsent_requests",
    ),
    Patch(
        "patches.serving.request_limits",
        "with drafts, log-probabilities of chosen tokens end the engine",
        "vllm#42592, vllm#44727",
        {"vllm.sampling_params:SamplingParams.verify": "d814fd4f8ef8"},
        function="refuse_chosen_logprobs_of_drafts",
    ),
    Patch(
        "patches.serving.request_limits",
        "a server cannot give a thinking budget to requests that set none",
        "vllm#55382",
        {
            f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": _both(
                "41272c0e2d64", "d9f86e098046"
            ),
            f"{_OPENAI}.completion.protocol:CompletionRequest.to_sampling_params": _both(
                "397ba9e645f4", "49236b369733"
            ),
            f"{_OPENAI}.responses.protocol:ResponsesRequest.to_sampling_params": _both(
                "7c4ae16e80c8", "c63f05c25659"
            ),
        },
        function="limit_thinking",
    ),
    # Below: `readiness.Readiness` makes these, as vLLM's middleware.
    Patch(
        "patches.serving.engine_paths",
        "paths that occupy the engine are open without the API key",
        "vllm#58144, vllm#58028",
        {"vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.__call__": "4a895b5be7ae"},
        function="guard_engine_paths",
    ),
    Patch(
        "patches.serving.cut_answers",
        "a response that shutdown or engine death cuts is a 500, or a 200 that looks complete",
        "vllm#57082",
        {f"{_ASYNC_LLM}.generate": _both("aa0f55c9fc29", "7a99591a0340")},
        function="cut_outputs",
    ),
    Patch(
        "patches.serving.cut_answers",
        "a shutdown leaves some requests waiting for ever",
        "vllm#36964",
        {f"{_ASYNC_LLM}.shutdown": "2912462afc15"},
        function="fail_unfinished",
    ),
    Patch(
        "readiness",
        "a server is ready before its warm-up and while it drains; one whose engine dies ends with exit code 0",
        "vllm#48966",
        {
            "vllm.entrypoints.launchers.launcher:watchdog_loop": "a23f970b3063",
            "vllm.entrypoints.launchers.launcher:serve_http": "4afec93f522a",
        },
        function="Readiness",
    ),
    Patch(
        "api_server",
        "vLLM leaves the sockets between its processes in the temporary folder",
        _NONE,
        {"vllm.utils.network_utils:get_open_zmq_ipc_path": "e4030e9b2da9"},
        function="_own_sockets",
    ),
)

PATCHES: Mapping[str, Patch] = MappingProxyType({patch.name: patch for patch in _ROWS})
"""Name -> row, in the order of installation."""
