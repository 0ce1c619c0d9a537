"""Which inputs of the MTP head count for GPTQ, and that it rounds better on them than to nearest."""

import itertools
from pathlib import Path

import pytest
import torch
from tinyworld.documents import DocumentSampler
from tinyworld.tokenizer import load_tokenizer
from tinyworld.world import World

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.models.mtp_head import DraftUnroller, load_drafting_model
from slimqwen.models.mtp_rounding import measure_moments, round_head
from slimqwen.models.shape import Packing
from slimqwen.progress import silent
from tests.checkpoints import TINY


def texts(count: int, length: int = 48) -> list[list[int]]:
    tokenizer = load_tokenizer(TINY)
    prose = DocumentSampler(World(), left_out=(), mix={"prose": 1.0}).stream(seed=7)
    return [tokenizer(each.text)["input_ids"][:length] for each in itertools.islice(prose, count)]


def test_inputs_of_the_first_step_count_at_every_position(tmp_path: Path) -> None:
    [text] = texts(1)
    moments = measure_moments(TINY, [text], 1, tmp_path / "states", silent)
    model, tokens = load_drafting_model(TINY), torch.tensor([text])
    with torch.no_grad():
        embeddings = model.head.pre_fc_norm_embedding(model.embed(tokens[:, 1:-1]))
        states = model.head.pre_fc_norm_hidden(model.hidden_states(tokens[:, :-2]))
        inputs = torch.cat([embeddings, states], dim=-1)[0]
    torch.testing.assert_close(moments["fc"], inputs.T @ inputs, rtol=1e-3, atol=1e-2)
    assert moments.keys() == {
        "fc",
        *(f"layers.0.self_attn.{part}_proj" for part in "qkvo"),
        *(f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
    }


def test_inputs_of_a_later_step_count_as_often_as_a_draft_reaches_it(tmp_path: Path) -> None:
    [text] = texts(1)
    length = len(text) - 3
    model, tokens, later = load_drafting_model(TINY), torch.tensor([text]), []
    with torch.no_grad():
        unroller = DraftUnroller(model, model.hidden_states(tokens[:, :length]))
        drafted = model.drafts(unroller.step(tokens[:, 1 : length + 1]))
        right = drafted[0] == tokens[0, 2 : length + 2]
        model.head.fc.register_forward_pre_hook(lambda _, inputs: later.append(inputs[0][0]))
        second = model.drafts(unroller.step(drafted))[0] == tokens[0, 3 : length + 3]
    reached = later[0][right]
    accepted = int(right.sum()) + int((right & second).sum())
    assert 0 < len(reached) < length
    # With one token less, a draft of one token begins at the same positions.
    both = measure_moments(TINY, [text], 2, tmp_path / "two", silent)["fc"]
    first = measure_moments(TINY, [text[:-1]], 1, tmp_path / "one", silent)["fc"]
    expected = reached.T @ reached * length / (length + accepted)
    torch.testing.assert_close(both - first, expected, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("packed", [Packing(bits=4, group_size=32), Packing(bits=8, group_size=None)])
def test_every_linear_keeps_its_products_better_than_to_nearest(tmp_path: Path, packed: Packing) -> None:
    rounded = round_head(TINY, texts(24), 4, packed, tmp_path / "states", silent)
    linears = packing.linears(list_tensors(TINY), "mtp")
    assert rounded.keys() == linears.keys()
    for name, info in linears.items():
        tensors = packing.rounded_to_nearest(info, name, packed.bits, packed.group_size, rounded[name])
        for tensor in tensors.values():
            list(tensor.chunks())
        error, nearest = rounded[name].errors
        assert 0 < error < nearest, name
