"""Fidelity on the embedded model: itself, damaged, pruned; against transformers where the answer is known."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slimqwen import variant
from slimqwen.evaluation import fidelity, served
from slimqwen.evaluation.fidelity import FidelityError, Limits, PairedText, Reading
from slimqwen.evaluation.served import Served, ServerLostError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.progress import silent
from slimqwen.recipe import prune_vocab
from slimqwen.serving import launch

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
CONTEXT = 1400
"""Longer than the engine's token budget, so that the joined text is read in parts."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Every fifth of the committed texts, the committed limits."""
    whole = fidelity.load_plan("tinyworld", ROOT)
    lines = (ROOT / whole.texts).read_text().splitlines()[::5]
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(lines))
    return whole.model_copy(update={"texts": file, "batch": 4})


@pytest.fixture(scope="module")
def read(plan):
    """read(folder) -> its summary, each folder once."""
    done = {}

    def once(folder):
        if folder not in done:
            done[folder] = fidelity.compare(folder, TINY, plan, ROOT, max_model_len=CONTEXT)
        return done[folder]

    return once


def damaged(folder, change):
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """One layer's down projection with noise of a quarter of its size."""

    def change(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        weight = tensors[name].float()
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.std() / 4
        tensors[name] = (weight + noise).bfloat16()

    return damaged(tmp_path_factory.mktemp("damaged") / "noisy", change)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """Five per cent of the embedding's rows in each other's places."""

    def change(tensors):
        name = "model.embed_tokens.weight"
        rows = torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(0))
        rows = rows[: len(rows) // 20]
        tensors[name][rows] = tensors[name][rows.roll(1)].clone()

    return damaged(tmp_path_factory.mktemp("damaged") / "swapped", change)


@pytest.mark.engine
def test_a_checkpoint_is_faithful_to_itself_in_every_mode(read, plan):
    summary = fidelity.summarise(read(TINY))
    for mode in fidelity.MODES:
        assert set(fidelity.judge(summary[mode], plan.limits["same_weights"]).values()) == {Verdict.PASS}
        assert summary[mode]["texts_compared"] == summary[mode]["texts"] == 12
        assert 0 < summary[mode]["kl_nats"]["value"] < 2e-4
        assert 0 < summary[mode]["joined_kl_nats"] < 2e-4


@pytest.fixture
def served_tiny(tiny_server):
    return Served(variant.load("tiny"), tiny_server, True, served.max_model_len(tiny_server.base_url))


@pytest.mark.engine
def test_a_served_checkpoint_is_compared_over_http_as_it_is_in_process(served_tiny, read, plan):
    readings = fidelity.compare_served(served_tiny, TINY, plan, ROOT, max_model_len=CONTEXT)
    figures = fidelity.summarise(readings)[fidelity.SERVED]
    assert set(fidelity.judge(figures, plan.limits["same_weights"]).values()) == {Verdict.PASS}
    in_process = fidelity.summarise(read(TINY))["batched"]
    assert figures["positions_compared"] == in_process["positions_compared"]
    assert 0 < figures["kl_nats"]["value"] < 2e-4
    for name in ("top1_disagreement", "head_delta_mean"):
        assert figures[name]["value"] == pytest.approx(in_process[name]["value"], rel=0.5)


@pytest.mark.engine
def test_another_checkpoint_fails_over_http_as_it_does_in_process(served_tiny, read, plan, swapped):
    readings = fidelity.compare_served(served_tiny, swapped, plan, ROOT, max_model_len=CONTEXT)
    figures = fidelity.summarise(readings)[fidelity.SERVED]
    assert fidelity.judge(figures, plan.limits["changed_weights"])["kl_nats"] == Verdict.FAIL


def test_a_dead_server_is_told_and_no_reading_comes(plan):
    gone = SimpleNamespace(base_url=f"http://127.0.0.1:{launch.free_port()}", model="default")
    nobody = Served(variant.load("tiny"), gone, True, CONTEXT)
    with pytest.raises(ServerLostError, match="failed while it read texts"):
        fidelity.compare_served(nobody, TINY, plan, ROOT, max_model_len=CONTEXT)


def test_the_tail_as_one_never_raises_divergence_and_changes_no_other_figure():
    """Grouping loses information; where the tail is alike on both sides it loses none."""
    chance = torch.Generator().manual_seed(5)
    p, q = (torch.randn(64, 300, generator=chance).mul(3).log_softmax(-1) for _ in range(2))
    ids = torch.randint(300, (65,), generator=chance).tolist()
    text = PairedText("a", 1, ids, ids, True)
    whole, grouped = Reading("a", "batched", 1), Reading("a", fidelity.SERVED, 1)
    fidelity._Reader(text, p, None, whole).take(q, torch.tensor(ids[1:]))
    positions = []
    for row, wanted in zip(q, ids[1:], strict=True):
        best = row.topk(fidelity.TOP_K).indices.tolist()
        positions.append({token: float(row[token]) for token in {*best, wanted}})
    fidelity._Reader(text, p, None, grouped).take_top(positions)
    assert 0.2 * whole.kl_nats < grouped.kl_nats < whole.kl_nats
    assert grouped.compared == whole.compared == 64
    assert grouped.disagreements == whole.disagreements > 0
    assert grouped.regret_nats == pytest.approx(whole.regret_nats, rel=1e-5)
    assert grouped.variant_bits == pytest.approx(whole.variant_bits, rel=1e-5)
    assert grouped.head_deltas == pytest.approx(whole.head_deltas, rel=1e-4)


@pytest.mark.engine
def test_every_token_of_every_text_is_compared_in_parts_or_whole(read, plan):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    texts = [json.loads(line) for line in plan.texts.read_text().splitlines()]
    lengths = {row["id"]: len(tokenizer(row["text"], add_special_tokens=False)["input_ids"]) for row in texts}
    for mode in fidelity.MODES:
        compared = {one.name: one.compared for one in read(TINY) if one.mode == mode}
        joined = compared.pop("joined")
        assert compared == lengths
        assert 1024 < joined < CONTEXT


@pytest.mark.engine
def test_a_layer_with_some_noise_is_not_the_same(read, plan, noisy):
    for figures in fidelity.summarise(read(noisy)).values():
        assert Verdict.FAIL in fidelity.judge(figures, plan.limits["same_weights"]).values()


@pytest.mark.engine
def test_swapped_embedding_rows_fail_and_are_measured_as_transformers_measures_them(read, plan, swapped):
    for figures in fidelity.summarise(read(swapped)).values():
        assert Verdict.FAIL in fidelity.judge(figures, plan.limits["changed_weights"]).values()

    readings = [one for one in read(swapped) if one.mode == "single"]
    first = json.loads(plan.texts.read_text().splitlines()[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(plan.prefix + first["text"], add_special_tokens=False)["input_ids"]
    p, q = (
        transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids[:-1]]))
        .logits[0]
        .log_softmax(-1)
        .detach()
        for folder in (TINY, swapped)
    )
    by_hand = (p.exp() * (p - q)).sum().item()
    assert readings[0].name == first["id"]
    assert readings[0].kl_nats == pytest.approx(by_hand, rel=0.05)
    bits = -q.gather(1, torch.tensor(ids[1:])[:, None]).sum().item() / math.log(2)
    assert readings[0].variant_bits == pytest.approx(bits, rel=0.01)


@pytest.mark.engine
def test_a_pruned_checkpoint_is_compared_over_the_tokens_that_it_kept(read, plan, tmp_path):
    pruned = tmp_path / "pruned"
    pruned.mkdir()
    corpus = prune_vocab.Corpus(source="tinyworld", documents=400)
    prune_vocab.run(TINY, pruned, prune_vocab.PruneVocabParameters(size=6144, corpus=corpus), silent)
    figures = fidelity.summarise(read(pruned))["single"]
    assert 2 <= figures["texts_compared"] < figures["texts"]
    # Over the kept tokens the weights are the baseline's: what is left is the noise of the engine.
    assert figures["kl_nats"]["value"] < 2e-4
    assert figures["bits_per_byte"]["value"] > 0.001


def test_unrelated_vocabularies_are_refused(plan, tmp_path):
    other = shutil.copytree(TINY, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[1000:1002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[:100]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        FidelityError, match=r"differently and there is no vocab_map\.json; they are unrelated"
    ):
        fidelity.compare(other, TINY, plan, ROOT, max_model_len=CONTEXT)


def test_a_quantised_baseline_is_refused(plan, tmp_path):
    other = shutil.copytree(TINY, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    with pytest.raises(FidelityError, match="is quantised itself"):
        fidelity.compare(TINY, other, plan, ROOT, max_model_len=CONTEXT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("texts: a\nprefix: b\nbatch: 4\n", "unusable"),
        (
            "texts: a\nprefix: b\nbatch: 4\nlayer_error_ratio: 2\nlimits: {}\n",
            "limits are for same_weights and changed_weights",
        ),
        ("{", "unusable"),
    ],
)
def test_a_plan_that_cannot_be_used_is_told_in_one_line(tmp_path, content, said):
    folder = tmp_path / "eval" / "fidelity"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "p.yaml").write_text(content)
    with pytest.raises(FidelityError, match=said) as refusal:
        fidelity.load_plan("p", tmp_path)
    assert "\n" not in str(refusal.value)


def test_texts_that_cannot_be_read_are_told(plan, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"id": "a"}\n')
    bad = plan.model_copy(update={"texts": tmp_path / "texts.jsonl"})
    with pytest.raises(FidelityError, match=r'give \{"id", "text"\} a line'):
        fidelity.compare(TINY, TINY, bad, ROOT, max_model_len=CONTEXT)


def estimate(value, error):
    return {"value": value, "standard_error": error, "count": 9}


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (0.01, 0.001, Verdict.PASS),
        (0.049, 0.001, Verdict.INCONCLUSIVE),
        (0.051, 0.001, Verdict.INCONCLUSIVE),
        (0.06, 0.001, Verdict.FAIL),
    ],
)
def test_the_whole_interval_decides(value, error, said):
    limits = Limits(**dict.fromkeys(Limits.model_fields, 0.05))
    figures = {name: estimate(value, error) for name in Limits.model_fields} | {"joined_kl_nats": None}
    assert set(fidelity.judge(figures, limits).values()) == {said}


def test_a_figure_that_could_not_be_measured_is_inconclusive():
    limits = Limits(**dict.fromkeys(Limits.model_fields, 0.05))
    figures = dict.fromkeys((*Limits.model_fields, "joined_kl_nats"))
    assert set(fidelity.judge(figures, limits).values()) == {Verdict.INCONCLUSIVE}
