"""States at block boundaries: the copies are those that a request needs, and no greedy token changes."""

from types import SimpleNamespace

import pytest
import torch

from slimqwen.serving import in_process
from slimqwen.vllm_plugin.engine_fixes import aligned_states

BLOCK_SIZE, DRAFTS, WIDTH, CHANNELS = 8, 3, 6, 2
REQUESTS, COLUMNS = 2, 12
NEAR_TIE_NATS = 0.1
OUTPUT_TOKENS = 24


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def memory():
    """Two requests whose blocks are scattered, a convolution's windows and recurrent states; each cell is unique."""
    blocks = REQUESTS * COLUMNS
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    table = table.reshape(REQUESTS, COLUMNS).contiguous()
    windows = torch.arange(blocks * WIDTH * CHANNELS, dtype=torch.bfloat16).reshape(blocks, WIDTH, CHANNELS)
    # Recurrent states lie in pages that are larger than they are.
    pages = torch.arange(blocks * 8, dtype=torch.float32).reshape(blocks, 8)
    context = SimpleNamespace(
        is_initialized=True,
        block_size=BLOCK_SIZE,
        state_base_addrs=torch.tensor([windows.data_ptr(), pages.data_ptr()]),
        state_block_strides=torch.tensor([windows.stride(0) * 2, pages.stride(0) * 4]),
        state_elem_sizes=int32(2, 4),
        state_inner_sizes=torch.tensor([CHANNELS, 5]),
        state_conv_widths=int32(WIDTH, 0),
        state_group_indices=int32(0, 0),
        block_table_ptrs=torch.tensor([table.data_ptr()]),
        block_table_stride_req=table.stride(0),
        num_accepted_tokens_out=torch.zeros(REQUESTS, dtype=torch.int32),
    )
    return SimpleNamespace(context=context, table=table, windows=windows, pages=pages)


def copied(memory, request, source, target, bias):
    """Both states as they are to be after one copy."""
    windows, pages, row = memory.windows.clone(), memory.pages.clone(), memory.table[request].tolist()
    windows[row[target], : WIDTH - bias] = memory.windows[row[source], bias:]
    pages[row[target], :5] = memory.pages[row[source + bias], :5]
    return windows, pages


def assert_states(memory, windows, pages):
    assert torch.equal(memory.windows, windows)
    assert torch.equal(memory.pages, pages)


@pytest.mark.parametrize("bias", [0, 2])
def test_before_a_step_a_state_moves_into_the_block_that_the_step_writes(memory, bias):
    expected = copied(memory, 1, 2, 5, bias)
    # The first request goes on in its block.
    aligned_states.run_precopy(None, memory.context, 2, int32(4, 5), int32(4, 2), int32(1, bias), None)
    assert_states(memory, *expected)


def test_a_new_request_has_no_state_to_move(memory):
    expected = memory.windows.clone(), memory.pages.clone()
    aligned_states.run_precopy(None, memory.context, 2, int32(0, 0), int32(-1, -1), int32(0, 0), None)
    assert_states(memory, *expected)


@pytest.mark.parametrize(
    ("computed", "accepted", "source", "target", "bias"),
    [
        (14, 3, 2, 1, 1),  # tokens 15 to 17 stay: block 1 ends after the second of them
        (15, 1, 2, 1, 0),  # the only token that stays ends block 1
        (13, 3, 1, 1, 2),  # the block ends with the last accepted token, in place
    ],
)
def test_after_a_step_the_state_at_the_last_full_block_is_set_aside(
    memory, computed, accepted, source, target, bias
):
    expected = copied(memory, 0, source, target, bias)
    step = [int32(each) for each in (accepted, source, 1 + DRAFTS, computed, DRAFTS)]
    aligned_states.run_postprocess(None, memory.context, 1, *step)
    assert_states(memory, *expected)
    assert memory.context.num_accepted_tokens_out[0] == (1 if source == target else accepted)


@pytest.mark.parametrize(("computed", "accepted"), [(9, 1), (12, 3)])
def test_within_a_block_nothing_is_set_aside(memory, computed, accepted):
    expected = memory.windows.clone(), memory.pages.clone()
    step = [int32(each) for each in (accepted, 1, 1 + DRAFTS, computed, DRAFTS)]
    aligned_states.run_postprocess(None, memory.context, 1, *step)
    assert_states(memory, *expected)
    assert memory.context.num_accepted_tokens_out[0] == accepted


def answers(llm, prompts, log_probabilities=None):
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=log_probabilities
    )
    # One after the other: which prompts share a step would decide near ties.
    return [llm.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)[0] for ids in prompts]


def is_same(plain, cached):
    """Whether two greedy answers agree up to a near tie of the plain engine."""
    pairs = zip(plain.token_ids, cached.token_ids, plain.logprobs, strict=True)
    for first, second, likeliest in pairs:
        if first != second:
            best, other = sorted((each.logprob for each in likeliest.values()), reverse=True)[:2]
            return best - other < NEAR_TIE_NATS
    return True


@pytest.mark.engine
def test_prefixes_from_the_cache_change_no_greedy_token_beside_drafts(tiny, texts):
    with in_process.engine(tiny, max_model_len=1024) as llm:
        block_size = llm.llm_engine.vllm_config.cache_config.block_size
        document = [token for ids in texts for token in ids][: 2 * block_size + 40]
        document *= -(-(2 * block_size + 40) // len(document))
        # Answers cross the end of a block at every distance; the longer prompts hit.
        ends = [
            *range(block_size - OUTPUT_TOKENS, block_size, 5),
            *range(2 * block_size, 2 * block_size + 40, 7),
        ]
        prompts = [document[:end] for end in ends]
        plain = answers(llm, prompts, log_probabilities=2)
    with in_process.engine(
        tiny, num_speculative_tokens=4, enable_prefix_caching=True, max_model_len=1024
    ) as llm:
        cold, hit = answers(llm, prompts), answers(llm, prompts)
        accepted = in_process.counter(llm, "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 0
    assert sum(answer.num_cached_tokens > 0 for answer in hit) >= 4
    for answered in (cold, hit):
        different = [
            len(prompt)
            for prompt, first, second in zip(prompts, plain, answered, strict=True)
            if not is_same(first.outputs[0], second.outputs[0])
        ]
        assert different == []
