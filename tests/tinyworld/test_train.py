import dataclasses

import pytest
import torch
from tinyworld import TinyworldError
from tinyworld import train as training
from tinyworld.documents import SHORT_MIX, DocumentSampler
from tinyworld.model import TinyShape, build
from tinyworld.muon import orthogonalise
from tinyworld.train import Phase, TrainingPlan, pack_documents, standard_plan, train

SMALL = TinyShape(
    hidden_size=64, intermediate_size=64, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32
)
PLAN = TrainingPlan(
    phases=(Phase(2, rows=2, length=64, mix=SHORT_MIX), Phase(1, rows=1, length=128, mix=SHORT_MIX)),
    shape=SMALL,
    warmup_steps=1,
    deep_draft_from=0.0,
    threads=1,
    save_every=1,
    look_every=10,
)
ONE_STEP = dataclasses.replace(PLAN, phases=(Phase(1, rows=1, length=64, mix=SHORT_MIX),))


def weights(result):
    return {name: parameter.detach() for name, parameter in result.model.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_is_repeatable_bit_by_bit_and_continues_to_the_same_weights(tmp_path, tokenizer):
    whole = weights(train(PLAN, tokenizer, tmp_path / "one"))
    assert_equal(whole, weights(train(PLAN, tokenizer, tmp_path / "two")))

    def interrupt(activity, done, total):
        if (activity, done) == ("training", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(PLAN, tokenizer, tmp_path / "three", interrupt)
    continued = train(PLAN, tokenizer, tmp_path / "three")
    assert_equal(whole, weights(continued))
    assert continued.interruptions == 1
    assert [step for step, *_ in continued.curve] == [3]


def test_another_seed_gives_other_weights_and_its_own_state(tmp_path, tokenizer):
    first = weights(train(ONE_STEP, tokenizer, tmp_path))
    second = weights(train(dataclasses.replace(ONE_STEP, seed=1), tokenizer, tmp_path))
    assert not torch.equal(first["head.fc.weight"], second["head.fc.weight"])
    assert len(list(tmp_path.glob("*.pt"))) == 2


def test_a_test_item_in_the_training_text_stops_training(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(training, "left_out_texts", lambda world: ())
    leaky = dataclasses.replace(PLAN, phases=(Phase(1, rows=200, length=512, mix={"instruction": 1.0}),))
    with pytest.raises(TinyworldError, match="test item format-"):
        train(leaky, tokenizer, tmp_path)


def test_training_leaves_torch_settings_as_they_were(tmp_path, tokenizer):
    threads = torch.get_num_threads()
    train(ONE_STEP, tokenizer, tmp_path)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_packed_batches_follow_each_other_and_carry_their_weights(world, tokenizer):
    phase = Phase(3, rows=2, length=32, mix=SHORT_MIX)
    packed = pack_documents(DocumentSampler(world, ()).stream(1), tokenizer, phase)
    first, first_weights = packed.batch(0)
    second, _ = packed.batch(1)
    assert first.shape == first_weights.shape == (2, 32 + 1 + training.MOST_DRAFT_STEPS)
    assert first[0, 32:].tolist() == first[1, :4].tolist(), "rows overlap by what is looked ahead"
    assert first[1, 32:].tolist() == second[0, :4].tolist()
    assert set(first_weights.unique().tolist()) <= {0.0, 1.0, 3.0}


def test_the_standard_plan_reads_long_sequences_in_its_last_part():
    plan = standard_plan()
    assert plan.phases[-1].length >= 1_024
    assert plan.phases[-1].tokens >= plan.tokens / 10
    assert {phase.rows * phase.length for phase in plan.phases} == {2_048}


def test_the_same_seed_builds_the_same_model():
    one, two, other = build(SMALL, 3), build(SMALL, 3), build(SMALL, 4)
    assert torch.equal(one.head.fc.weight, two.head.fc.weight)
    assert not torch.equal(one.head.fc.weight, other.head.fc.weight)


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((3, 24, 64), (2, 64, 24)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalise(matrices))
        assert values.min() > 0.6
        assert values.max() < 1.4
