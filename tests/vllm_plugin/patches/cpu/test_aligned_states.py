"""States at block boundaries: the copies are those that a request needs.

That no greedy token changes beside drafts is seen in tests/evals/test_engine_process.py.
"""

from types import SimpleNamespace

import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import aligned_states

BLOCK_SIZE, DRAFTS, WIDTH, CHANNELS = 8, 3, 6, 2
REQUESTS, COLUMNS = 2, 12


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
