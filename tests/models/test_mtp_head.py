import pytest
import torch
from tinyworld.model import TinyShape, build, save_drafting_model
from transformers import Qwen3_5TextConfig

from slimqwen.models import mtp_head
from slimqwen.models.mtp_head import (
    DraftingModel,
    DraftUnroller,
    MtpHead,
    MtpHeadError,
    count_served_steps,
    drafts_accepted,
    gain_interval,
    load_drafting_model,
    served_steps,
    summarise_acceptance,
)
from tests.checkpoints import TINY, edited_tensors
from tests.zoo.published_forms import PUBLISHED_FORMS

HEAD_NAMES = {
    "fc.weight",
    "norm.weight",
    "pre_fc_norm_hidden.weight",
    "pre_fc_norm_embedding.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
}
SMALL = TinyShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)


@pytest.fixture(scope="module")
def small():
    return build(SMALL, seed=1).eval()


@pytest.fixture
def saved(small, tmp_path):
    save_drafting_model(small, tmp_path)
    return tmp_path


def test_the_head_has_the_4b_shape_when_the_config_says_so():
    config = Qwen3_5TextConfig(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
    )
    with torch.device("meta"):
        head = MtpHead(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    assert set(shapes) == HEAD_NAMES
    assert shapes["fc.weight"] == (2560, 5120)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (2 * 16 * 256, 2560), "queries and their output gate"
    assert shapes["layers.0.self_attn.k_proj.weight"] == (4 * 256, 2560)
    assert shapes["layers.0.mlp.gate_proj.weight"] == (9216, 2560)


def test_building_a_head_leaves_the_config_as_it_was():
    config = Qwen3_5TextConfig(num_hidden_layers=4, hidden_size=32, intermediate_size=32)
    before = list(config.layer_types)
    MtpHead(config)
    assert config.layer_types == before
    assert config.num_hidden_layers == 4


def test_saving_and_loading_gives_the_same_bfloat16_weights(saved, small):
    loaded = load_drafting_model(saved)
    for (name, before), (other, after) in zip(
        small.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(before.to(torch.bfloat16).float(), after)


def refuse(folder, message):
    with pytest.raises(MtpHeadError, match=message):
        load_drafting_model(folder)


def test_missing_weights_head_and_tensors_and_another_shape_are_each_named(saved):
    with edited_tensors(saved) as tensors:
        tensors["mtp.norm.weight"] = torch.zeros(7)
    refuse(saved, r"mtp\.norm\.weight is \(7,\)")
    with edited_tensors(saved) as tensors:
        del tensors["mtp.fc.weight"]
    refuse(saved, r"mtp\.fc\.weight is missing")
    with edited_tensors(saved) as tensors:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]
    refuse(saved, "has no MTP head and cannot draft")


def test_unrolling_all_positions_equals_drafting_from_one_as_a_server_does(small):
    """Steps 2 and 3 of one position, recomputed on a text cut off there, with the keys that a server would have."""
    tokens = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = small.hidden_states(tokens[:, :9])
        together = DraftUnroller(small, hidden)
        deep = [together.step(tokens[:, step : step + 9]) for step in (1, 2, 3)]
        for start in (0, 4, 8):
            # Alone: the true text up to `start`, then this head's own states, one causal sequence.
            states = hidden[:, : start + 1]
            for step in range(3):
                length = start + 1 + step
                positions = torch.arange(length)[None, None].expand(3, 1, length)
                rotary = small.backbone.model.rotary_emb(states, positions)
                output = small.head(states, small.embed(tokens[:, 1 : length + 1]), rotary)
                assert torch.allclose(output[:, -1], deep[step][:, start], atol=1e-5)
                states = torch.cat([states, output[:, -1:]], dim=1)


def test_a_server_steps_over_what_it_accepted():
    assert served_steps([2, 4, 1, 0, 3, 3]) == [2, 0, 3]
    assert served_steps([]) == []


def test_acceptance_adds_up_by_hand():
    acceptance = summarise_acceptance([[2, 0], [1]], depth=2)
    assert acceptance.drafts == 3
    assert acceptance.accepted_per_position == (2, 1)
    assert acceptance.rates == (2 / 3, 1 / 3)
    assert acceptance.mean_length == 1 + 3 / 3
    assert acceptance.standard_error == 0, "both texts accept one token a draft on average"


def test_no_text_long_enough_is_an_error():
    with pytest.raises(MtpHeadError, match="long enough to draft 4"):
        summarise_acceptance([[], []], depth=4)


class ScriptedHead:
    """Stands for a model whose head drafts a fixed successor of each token, and whose text is counted by hand."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch, successor):
        class Unroller:
            def __init__(self, model, hidden):
                pass

            def step(self, tokens):
                return tokens

        monkeypatch.setattr(mtp_head, "DraftUnroller", Unroller)
        self.successor = successor

    def hidden_states(self, tokens):
        return tokens

    def drafts(self, tokens):
        return torch.tensor([[self.successor[token] for token in row] for row in tokens.tolist()])


def test_accepted_drafts_are_counted_until_the_first_wrong_one(monkeypatch):
    model = ScriptedHead(monkeypatch, successor={0: 1, 1: 2, 2: 3, 3: 9, 4: 5, 5: 6, 6: 7, 7: 8, 8: 8, 9: 9})
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    # From position i the drafts after token i+1 follow the successors; only 3 -> 9 is wrong (the text has 4).
    assert drafts_accepted(model, text, start=0, depth=2) == [2, 1, 0, 2, 2, 2]
    acceptance = summarise_acceptance(count_served_steps(model, [(text[:1], text[1:])], 2), 2)
    assert acceptance.drafts == 2  # position 0 accepts 2, then position 3 accepts 2, then the text ends
    assert acceptance.mean_length == 3


def test_stored_states_give_the_drafts_that_the_whole_backbone_gives(small, saved):
    text = torch.randint(64, (14,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, around = load_drafting_model(saved), load_drafting_model(saved, with_layers=False)
    with torch.no_grad():
        hidden = whole.hidden_states(torch.tensor([text[:-3]]))
    texts = [(text[:4], text[4:])]
    assert count_served_steps(around, texts, 2, [hidden]) == count_served_steps(whole, texts, 2)
    assert torch.equal(around.logits(hidden), whole.logits(hidden))


def test_a_text_shorter_than_the_drafts_gives_no_step(monkeypatch):
    model = ScriptedHead(monkeypatch, successor={})
    assert drafts_accepted(model, [1, 2, 3], start=0, depth=4) == []


def test_drafts_come_from_the_rows_of_a_draft_head(small):
    hidden = torch.randn(2, 5, SMALL.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 7, 20, 63])
    trimmed = DraftingModel(
        small.backbone, small.head, mtp_head.DraftHead(small.backbone.lm_head.weight[ids], ids)
    )
    with torch.no_grad():
        expected = ids[small.logits(hidden)[..., ids].argmax(-1)]
        assert torch.equal(trimmed.drafts(hidden), expected)
        assert torch.equal(small.drafts(hidden), small.logits(hidden).argmax(-1))
        assert torch.equal(trimmed.logits(hidden), small.logits(hidden)), "the target verifies with all rows"


def test_a_draft_head_is_loaded_and_the_mtp_head_has_no_part_of_it(saved):
    ids = torch.tensor([1, 5, 63])
    with edited_tensors(saved) as tensors:
        rows = tensors["model.embed_tokens.weight"][ids]
        tensors |= {"mtp.draft_head.weight": rows, "mtp.draft_head.token_ids": ids}
    loaded = load_drafting_model(saved)
    assert torch.equal(loaded.draft_head.weight, rows.float())
    assert torch.equal(loaded.draft_head.token_ids, ids)
    assert mtp_head.read_head_tensors(saved).keys() == HEAD_NAMES
    assert load_drafting_model(TINY).draft_head is None


def test_the_head_of_a_multimodal_checkpoint_drafts_as_that_of_its_text_only_form(tmp_path):
    drafts = []
    for name in ("w4a16", "multimodal-w4a16"):
        model = load_drafting_model(PUBLISHED_FORMS[name].build(tmp_path / name))
        tokens = torch.tensor([[5, 600, 7000, 42, 3, 77]])
        with torch.no_grad():
            hidden = model.hidden_states(tokens)
            drafts.append(DraftUnroller(model, hidden).step(tokens))
    assert torch.equal(*drafts)


def test_the_interval_of_a_gain_is_that_of_paired_texts() -> None:
    """Pairs of texts that differ by the same gain leave it no noise, whatever their own lengths are."""
    before = [[0, 1], [2, 3], [1, 1], [4, 0]]
    assert gain_interval(before, [[accepted + 1 for accepted in text] for text in before]) == pytest.approx(
        (1, 1)
    )
    low, high = gain_interval(before, before)
    assert (low, high) == (0, 0)
    low, high = gain_interval(before, [[2, 1], [2, 3], [1, 1], [4, 0]])
    assert low < 0 < high
    assert low + high == pytest.approx(2 * 0.25)  # two more accepted in eight steps
    # By hand: residuals of the texts of both sides, over all eight steps.
    ratios = (12 / 8, 14 / 8)
    sums = ((1, 5, 2, 4), (3, 5, 2, 4))
    residuals = [
        (after - 2 * ratios[1] - first + 2 * ratios[0]) / 8 for first, after in zip(*sums, strict=True)
    ]
    error = (4 / 3 * sum(residual**2 for residual in residuals)) ** 0.5
    assert high - low == pytest.approx(2 * 1.959964 * error)
