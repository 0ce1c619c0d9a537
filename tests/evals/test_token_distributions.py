"""Fidelity on the embedded model: itself, damaged, pruned; against transformers where the answer is known."""

import dataclasses
import json
import math
import re
import shutil
from types import SimpleNamespace

import httpx
import pytest
import torch
import transformers

from slimqwen import variant
from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError, token_distributions
from slimqwen.evals.fidelity_figures import (
    JOINED,
    MODES,
    PLAIN,
    SERVED,
    TOP_K,
    FidelitySettings,
    judge_figures,
    noise_ratios,
    summarise_texts,
)
from slimqwen.evals.token_distributions import ReferenceTexts, TokenisedText
from slimqwen.progress import silent
from slimqwen.recipe.stages import prune_vocab
from slimqwen.records.split import Split
from slimqwen.serving.server import free_port
from slimqwen.serving.shared_server import ServerLostError, SharedServer
from slimqwen.stats.verdict import Verdict
from tests.checkpoints import edited_tensors

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
CONTEXT = 1400
"""Longer than the engine's token budget, so that the joined text is read in parts."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Every fifth of the committed texts, the committed limits."""
    whole = FidelitySettings.load("tinyworld", ROOT)
    lines = (ROOT / whole.texts).read_text().splitlines()[::5]
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("\n".join(lines))
    return whole.model_copy(update={"texts": file, "batch": 4})


def test_a_side_of_the_split_has_texts_of_its_own(settings, tmp_path):
    both = settings.read_texts(ROOT)
    search, proof = (
        settings.read_texts(ROOT, Split(side=side, proof_share=0.5)) for side in ("search", "proof")
    )
    assert sorted(search + proof) == sorted(both)
    assert min(len(search), len(proof)) > 1
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"id": "a", "text": "alone"}))
    with pytest.raises(
        EvalError, match="of 1 texts are on the proof split, 50% of the items; add texts, or change"
    ):
        settings.model_copy(update={"texts": few}).read_texts(ROOT, Split(side="proof", proof_share=0.5))


@pytest.fixture(scope="module")
def read(settings):
    """read(folder) -> the comparisons of its texts, each folder once, in the modes that are asked for first."""
    done = {}

    def once(folder, modes=MODES):
        if folder not in done:
            reference = reference_of(folder, TINY, settings)
            done[folder] = token_distributions.compare_in_process(reference, folder, modes=modes)
        return done[folder]

    return once


def reference_of(weights, baseline, settings):
    return ReferenceTexts.load(weights, baseline, settings, ROOT, max_model_len=CONTEXT)


def in_mode(texts, mode):
    return [each for each in texts if each.mode == mode]


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """Five per cent of the embedding's rows in each other's places."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("damaged") / "swapped")
    with edited_tensors(folder) as tensors:
        table = tensors["model.embed_tokens.weight"]
        rows = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[: len(table) // 20]
        table[rows] = table[rows.roll(1)]
    return folder


@pytest.mark.engine
def test_a_checkpoint_is_faithful_to_itself_in_every_mode(read, settings):
    summary = summarise_texts(read(TINY))
    for mode in MODES:
        assert set(judge_figures(summary[mode], settings.limits).values()) == {Verdict.PASS}
        assert summary[mode].texts_compared == summary[mode].texts == 12
        assert summary[mode].kl_nats.value > 0
        assert summary[mode].joined_kl_nats > 0
    ratios = noise_ratios(read(TINY), settings.unchanged_ratio)
    assert [row.figure for row in ratios] == ["kl_nats", "head_delta_mean", "joined_kl_nats"]
    assert {row.verdict for row in ratios} == {Verdict.PASS}


@pytest.mark.engine
def test_a_served_checkpoint_is_compared_over_http_as_it_is_in_process(served_tiny, read, settings):
    readings = token_distributions.compare_served(reference_of(TINY, TINY, settings), served_tiny)
    figures = summarise_texts(readings)[SERVED]
    assert set(judge_figures(figures, settings.limits).values()) == {Verdict.PASS}
    assert figures.positions_compared == summarise_texts(read(TINY))[PLAIN].positions_compared
    ratios = noise_ratios([*in_mode(read(TINY), PLAIN), *readings], settings.unchanged_ratio)
    assert {row.mode for row in ratios} == {SERVED}
    assert {row.verdict for row in ratios} == {Verdict.PASS}


@pytest.mark.engine
def test_another_checkpoint_fails_over_http_as_it_does_in_process(served_tiny, read, settings, swapped):
    readings = token_distributions.compare_served(reference_of(TINY, swapped, settings), served_tiny)
    figures = summarise_texts(readings)[SERVED]
    assert judge_figures(figures, settings.limits)["kl_nats"] == Verdict.FAIL


def test_a_dead_server_is_told_and_no_reading_comes(settings):
    gone = SimpleNamespace(base_url=f"http://127.0.0.1:{free_port()}", model="default", log=None, pid=1)
    nobody = SharedServer(variant.load("tiny"), gone, True, CONTEXT)
    with pytest.raises(ServerLostError, match="failed while reading texts"):
        token_distributions.compare_served(reference_of(TINY, TINY, settings), nobody)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (503, "the server failed while reading texts: 503, the engine died"),
        (400, f"refused {TOP_K} log-probabilities a position (the engine died); set VLLM_MAX_LOGPROBS"),
    ],
)
def test_an_engine_that_died_and_too_few_log_probabilities_are_told_apart(
    settings, monkeypatch, status, said
):
    server = SimpleNamespace(base_url="http://127.0.0.1:1", model="default", log=None, pid=1)
    responses = httpx.MockTransport(lambda _: httpx.Response(status, text="the engine died"))
    monkeypatch.setattr(
        token_distributions, "open_client", lambda timeout_s: httpx.Client(transport=responses)
    )
    shared = SharedServer(variant.load("tiny"), server, True, CONTEXT)
    with pytest.raises(ServerLostError, match=re.escape(said)):
        token_distributions.compare_served(reference_of(TINY, TINY, settings), shared)


def test_the_tail_as_one_never_raises_divergence_and_changes_no_other_figure():
    """Grouping loses information; where the tail is alike on both sides it loses none."""
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(64, 300, generator=rng).mul(3).log_softmax(-1) for _ in range(2))
    ids = torch.randint(300, (65,), generator=rng).tolist()
    text = TokenisedText("a", 1, ids, ids, True)
    one, other = (token_distributions._Comparer(text, mode, p) for mode in ("batched", SERVED))
    one.add(q, torch.tensor(ids[1:]))
    positions = []
    for row, wanted in zip(q, ids[1:], strict=True):
        best = row.topk(TOP_K).indices.tolist()
        positions.append({token: float(row[token]) for token in {*best, wanted}})
    other.add_top(positions)
    whole, grouped = one.comparison, other.comparison
    assert 0.2 * whole.kl_nats < grouped.kl_nats < whole.kl_nats
    assert grouped.compared == whole.compared == 64
    assert grouped.disagreements == whole.disagreements > 0
    assert grouped.regret_nats == pytest.approx(whole.regret_nats, rel=1e-5)
    assert grouped.variant_bits == pytest.approx(whole.variant_bits, rel=1e-5)
    for bits, scores in ((whole.baseline_bits, p), (whole.variant_bits, q)):
        nats = -sum(float(row[token]) for row, token in zip(scores, ids[1:], strict=True))
        assert bits == pytest.approx(nats / math.log(2), rel=1e-5)
    assert grouped.head_deltas == pytest.approx(whole.head_deltas, rel=1e-4)


@pytest.mark.engine
def test_every_token_of_every_text_is_compared_in_parts_or_whole(read, settings):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    texts = [json.loads(line) for line in settings.texts.read_text().splitlines()]
    lengths = {row["id"]: len(tokenizer(row["text"], add_special_tokens=False)["input_ids"]) for row in texts}
    for mode in MODES:
        compared = {one.name: one.compared for one in read(TINY) if one.mode == mode}
        joined = compared.pop("joined")
        assert compared == lengths
        assert 1024 < joined < CONTEXT


@pytest.mark.engine
def test_swapped_embedding_rows_fail_and_are_measured_as_transformers_measures_them(read, settings, swapped):
    for figures in summarise_texts(read(swapped)).values():
        assert Verdict.FAIL in judge_figures(figures, settings.limits).values()
    readings = in_mode(read(swapped), PLAIN)
    changed = [dataclasses.replace(each, mode="changed") for each in readings]
    ratios = noise_ratios([*in_mode(read(TINY), PLAIN), *changed], settings.unchanged_ratio)
    assert {row.verdict for row in ratios} == {Verdict.FAIL}

    first = json.loads(settings.texts.read_text().splitlines()[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(settings.prefix + first["text"], add_special_tokens=False)["input_ids"]
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
def test_a_pruned_checkpoint_is_compared_over_the_tokens_that_it_kept(read, settings, tmp_path):
    pruned = tmp_path / "pruned"
    pruned.mkdir()
    corpus = prune_vocab.CountedText(path="tinyworld", documents=400)
    prune_vocab.prune_vocabulary(
        TINY, pruned, prune_vocab.PruneVocabParameters(size=6144, corpus=corpus), silent
    )
    readings = read(pruned, [PLAIN])
    figures = summarise_texts(readings)[PLAIN]
    assert 2 <= figures.texts_compared < figures.texts
    # Over the kept tokens the weights are the baseline's: what is left is the noise of the engine.
    kept = {each.name: dataclasses.replace(each, mode="pruned") for each in readings}
    plain = [each for each in in_mode(read(TINY), PLAIN) if kept[each.name].compared or each.name == JOINED]
    kl, *_ = noise_ratios([*plain, *kept.values()], settings.unchanged_ratio)
    assert kl.verdict == Verdict.PASS
    # Bits are those of all texts, also of those that take other tokens now.
    others = [each for each in readings if not each.compared]
    assert figures.bits_per_byte.count == figures.texts
    assert any(abs(each.variant_bits - each.baseline_bits) > 1 for each in others)


def test_unrelated_vocabularies_are_refused(settings, tmp_path):
    other = shutil.copytree(TINY, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[1000:1002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[:100]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        EvalError, match=r"differently and there is no vocab_map\.json; name the variant's base"
    ):
        reference_of(other, TINY, settings)


def test_no_more_texts_are_read_than_the_settings_say(settings):
    few = settings.model_copy(update={"most_texts": 3})
    names = [name for name, _ in settings.read_texts(ROOT)]
    reference = reference_of(TINY, TINY, few)
    assert [text.name for text in reference.texts] == [*names[:3], JOINED]
    assert (reference.available, len(names)) == (len(names), 12)
    assert len(reference_of(TINY, TINY, settings).texts) == 1 + len(names)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": "a"}'], "line 1: neither a text nor a chat"),
        (['{"id": "a", "text": "A boat."}', '{"id": "b", "text": ""}'], "line 2: no text"),
        (["A boat."], "line 1: not JSON"),
        (['{"text": "A boat."}'], "1 of 1 texts, but fidelity compares at least two; add texts"),
        ([], "0 of 0 texts, but fidelity compares at least two; add texts"),
        (
            [f'{{"id": "{n}", "text": "{"a boat " * 2000}"}}' for n in "ab"],
            "text a has .* the context holds 1400",
        ),
    ],
)
def test_texts_that_cannot_be_compared_are_told(settings, tmp_path, lines, message):
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    bad = settings.model_copy(update={"texts": tmp_path / "texts.jsonl"})
    with pytest.raises(SlimqwenError, match=message):
        reference_of(TINY, TINY, bad)


def test_a_text_with_a_line_separator_is_one_text(settings, tmp_path):
    rows = [{"id": str(n), "text": f"text\u2028{n}\x0c"} for n in range(2)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    own = settings.model_copy(update={"texts": tmp_path / "texts.jsonl"})
    assert own.read_texts(ROOT) == [(row["id"], row["text"]) for row in rows]
