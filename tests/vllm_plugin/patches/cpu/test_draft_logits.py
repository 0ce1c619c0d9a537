"""Drafted tokens under min_p and logit_bias: their rows, what is drawn, and an engine beside one without drafts."""

import importlib
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from slimqwen.serving.in_process import engine
from slimqwen.vllm_plugin.patches.cpu import draft_logits, sampling_expansion, top_k_without_drafts

VOCABULARY, DRAWS, COPIES = 12, 20_000, 500
BANNED, PUSHED = -100.0, 3.0


@dataclass(frozen=True)
class Kind:
    """A request of the batch: its fields, and the tokens that are drafted for it."""

    drafts: tuple[int, ...]
    fields: dict = field(default_factory=dict)


KINDS = (
    Kind((3, 1)),
    Kind((3, 1, 7), {"min_p": 0.2}),
    Kind((2, 5), {"logit_bias": {5: PUSHED, 2: BANNED, 9: -1.5}}),
    Kind((), {"min_p": 0.3, "logit_bias": {4: PUSHED}}),
    Kind((0, 6, 6), {"min_p": 0.1, "logit_bias": {6: 1.0}, "temperature": 2.0, "top_k": 6, "top_p": 0.8}),
    Kind((1,), {"min_p": 0.5, "temperature": 0.3}),
    Kind((5, 5), {"logit_bias": {5: 2.0}, "repetition_penalty": 2.0, "presence_penalty": 0.5}),
    Kind((4, 8), {"logit_bias": {8: 20.0}, "allowed_token_ids": [1, 4, 8]}),
    Kind((8, 2), {"logit_bias": {8: 20.0, 2: 10.0}, "min_p": 0.9, "temperature": 0.0}),
)


@pytest.fixture
def upstream(stock_vllm, monkeypatch):
    """vLLM's modules; the rejection sampler is one of this test alone, with the CPU's kernels in place of Triton's."""
    import vllm.v1.sample
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils as kernels
    from vllm.v1.worker import gpu_model_runner

    current_platform.import_kernels()
    sampling_expansion.install()
    top_k_without_drafts.install()
    monkeypatch.setattr(
        vllm.v1.sample, "rejection_sampler", vllm.v1.sample.rejection_sampler
    )  # is as it was after
    sampling = importlib.import_module("vllm.v1.sample.rejection_sampler")
    names = ("rejection_greedy_sample", "rejection_random_sample", "expand", "sample_recovered_tokens")
    register_kernels(
        {f"{sampling.__name__}.{name}_kernel": getattr(kernels, f"_{name}_kernel_impl") for name in names}
    )
    return SimpleNamespace(sampling=sampling, runner=gpu_model_runner)


def processors(upstream, parameters, drafts):
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=len(parameters)),
        speculative_config=SimpleNamespace() if drafts else None,
    )
    built = upstream.runner.build_logitsprocs(config, torch.device("cpu"), False, False)
    added = [(row, each, [0], []) for row, each in enumerate(parameters)]
    for each in built.all:
        each.update_state(BatchUpdate(len(parameters), removed=[], added=added, moved=[]))
    return built


def metadata_of(upstream, kinds, *, drafts, before=None):
    """vLLM's sampling metadata of a batch; `before` has the output tokens of each request so far."""
    from vllm import SamplingParams
    from vllm.v1.sample.metadata import SamplingMetadata

    parameters = [SamplingParams(**kind.fields) for kind in kinds]
    allowed = torch.zeros(len(kinds), VOCABULARY, dtype=torch.bool)  # True where a token is left out
    for row, each in enumerate(parameters):
        if each.allowed_token_ids:
            allowed[row] = True
            allowed[row, each.allowed_token_ids] = False

    def column(name, dtype=torch.float32):
        return torch.tensor([getattr(each, name) for each in parameters], dtype=dtype)

    temperature = column("temperature")
    top_k = column("top_k", torch.int32)
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        top_p=column("top_p"),
        top_k=top_k.where(top_k > 0, VOCABULARY),
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.zeros(len(kinds), 1, dtype=torch.int64),
        frequency_penalties=column("frequency_penalty"),
        presence_penalties=column("presence_penalty"),
        repetition_penalties=column("repetition_penalty"),
        output_token_ids=before or [[1] for _ in kinds],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={},
        logitsprocs=processors(upstream, parameters, drafts),
        spec_token_ids=[list(kind.drafts) for kind in kinds] if drafts else None,
    )


def draft_metadata(kinds):
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    made = SpecDecodeMetadata.make_dummy([list(kind.drafts) for kind in kinds], torch.device("cpu"))
    lengths = [len(kind.drafts) + 1 for kind in kinds]
    last = list(itertools.accumulate(lengths))
    made.bonus_logits_indices = torch.tensor(last) - 1
    made.target_logits_indices = torch.tensor(
        [row for end, length in zip(last, lengths, strict=True) for row in range(end - length, end - 1)],
        dtype=torch.int64,
    )
    return made


def logits_of(kinds):
    """[request][position] -> [vocabulary], by the number of the request among KINDS and the position alone."""
    chance = torch.Generator().manual_seed(0)
    drawn = 2 * torch.randn(len(KINDS), 4, VOCABULARY, generator=chance)
    return [
        [drawn[KINDS.index(kind), position] for position in range(len(kind.drafts) + 1)] for kind in kinds
    ]


def undrafted(upstream, kind, position):
    """Probabilities of the token at this position after the drafts before it, by vLLM's sampler without drafts."""
    from vllm.v1.sample.sampler import Sampler

    before = [[1, *kind.drafts[:position]]]
    metadata = metadata_of(upstream, [kind], drafts=False, before=before)
    metadata.max_num_logprobs = -1
    sampler = Sampler(logprobs_mode="processed_logprobs")
    found = sampler(logits_of([kind])[0][position].unsqueeze(0).clone(), metadata)
    if metadata.all_greedy:
        return torch.nn.functional.one_hot(found.sampled_token_ids[0, 0].long(), VOCABULARY).float()
    return found.logprobs_tensors.logprobs[0].exp()


def test_the_fix_is_still_needed(upstream):
    """Fails when vLLM applies or accepts the two fields beside drafts: the fix can go then."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    for fields in ({"min_p": 0.2}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            SamplingParams(**fields)._validate_spec_decode(SimpleNamespace())
    built = upstream.runner.build_logitsprocs(
        SimpleNamespace(speculative_config=SimpleNamespace(), scheduler_config=SimpleNamespace()),
        torch.device("cpu"), False, False,
    )  # fmt: skip
    assert [type(each).__name__ for each in built.all] == ["MinTokensLogitsProcessor"]


def test_requests_with_the_two_fields_are_accepted_and_others_refused_as_by_vllm(upstream, monkeypatch):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    def refuse(self, speculative_config):
        if self.min_p or self.logit_bias or self.top_k == 7:
            raise VLLMValidationError("refused")

    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", refuse)
    assert draft_logits.install()
    assert not draft_logits.install()
    accepted = SamplingParams(min_p=0.2, logit_bias={3: 1.0})
    accepted._validate_spec_decode(SimpleNamespace())
    assert (accepted.min_p, accepted.logit_bias) == (0.2, {3: 1.0})
    with pytest.raises(VLLMValidationError, match="refused"):
        SamplingParams(min_p=0.2, top_k=7)._validate_spec_decode(SimpleNamespace())


def test_each_drafted_row_is_processed_as_without_drafts(upstream):
    """Bit for bit, in a batch of every kind of request."""
    assert draft_logits.install()
    sampler = upstream.sampling.RejectionSampler(upstream_sampler())
    metadata, drafted = metadata_of(upstream, KINDS, drafts=True), draft_metadata(KINDS)
    rows = torch.stack([row for each in logits_of(KINDS) for row in each[:-1]])
    processed = sampler.apply_logits_processors(rows.clone(), metadata, drafted)
    totals = drafted.cu_num_draft_tokens
    drawn_from = (
        upstream.sampling.apply_sampling_constraints(processed, totals, metadata).log_softmax(-1).exp()
    )
    places = [(kind, position) for kind in KINDS for position in range(len(kind.drafts))]
    assert len(places) == len(drawn_from)
    for found, (kind, position) in zip(drawn_from, places, strict=True):
        expected = undrafted(upstream, kind, position)
        if kind.fields.get("temperature") == 0:
            assert found.argmax() == expected.argmax()
        else:
            assert torch.equal(found, expected), (kind, position)


def upstream_sampler():
    from vllm.v1.sample.sampler import Sampler

    return Sampler()


@pytest.mark.parametrize("is_fixed", [True, False])
def test_tokens_are_drawn_as_without_drafts(upstream, is_fixed):
    """20,000 draws of each kind, all kinds in each batch.

    A token counts where the drafts before it were accepted, for only there were its logits those of its text.
    """
    from scipy.stats import chi2

    if is_fixed:
        assert draft_logits.install()
    torch.manual_seed(0)
    batch = [kind for kind in KINDS for _ in range(COPIES)]
    metadata, drafted = metadata_of(upstream, batch, drafts=True), draft_metadata(batch)
    logits = torch.stack([row for each in logits_of(batch) for row in each])
    sampler = upstream.sampling.RejectionSampler(upstream_sampler())
    longest = max(len(kind.drafts) for kind in KINDS) + 1
    counts = torch.zeros(len(KINDS), longest, VOCABULARY)
    for _ in range(DRAWS // COPIES):
        tokens = sampler(drafted, None, logits.clone(), metadata).sampled_token_ids.long()
        for number, rows in enumerate(tokens.split(COPIES)):
            for position in range(len(KINDS[number].drafts) + 1):
                reached = rows[rows[:, position] >= 0, position]
                counts[number, position] += torch.bincount(reached, minlength=VOCABULARY)
    wrong = {
        number
        for number, kind in enumerate(KINDS)
        for position in range(len(kind.drafts) + 1)
        if not is_drawn_from(counts[number, position], undrafted(upstream, kind, position), chi2)
    }
    # The fields of the two other kinds change little here; those of kind 3, which has no drafts, its last row.
    assert wrong == set() if is_fixed else wrong >= {1, 2, 3, 5, 6, 8}


def is_drawn_from(counts, probabilities, chi2):
    """Whether a chi-square test with an error of one in a million does not tell counts and probabilities apart.

    Tokens of which fewer than five are expected are one cell, as the distribution of the figure needs it.
    """
    if counts[probabilities == 0].any():
        return False
    expected = counts.sum() * probabilities
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    figure = float(((observed - expected) ** 2 / expected.clamp(min=5)).sum())
    return len(expected) <= 2 or figure < chi2.isf(1e-6, len(expected) - 1)


@pytest.mark.engine
def test_an_engine_with_drafts_honours_both_as_one_without(tiny, texts):
    """Greedy tokens, and those of min_p = 1, which leaves the likeliest; requests without either in the same batch."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": text[:30]} for text in texts]
    likely = [text[30] for text in texts]
    always = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    settings = [
        (
            SamplingParams(temperature=0.0, **always),
            SamplingParams(temperature=0.0, logit_bias={token: BANNED, 300: 1.0}, **always),
            SamplingParams(temperature=1.0, min_p=1.0, seed=1, **always),
            SamplingParams(temperature=0.0, logit_bias={token: PUSHED}, repetition_penalty=1.2, **always),
        )[number % 4]
        for number, token in enumerate(likely)
    ]
    found = {}
    for drafts in (0, 4):
        with engine(tiny, num_speculative_tokens=drafts, logprobs_mode="processed_logits") as llm:
            found[drafts] = [each.outputs[0] for each in llm.generate(prompts, settings, use_tqdm=False)]
            free = llm.generate(prompts, SamplingParams(temperature=0.0, **always), use_tqdm=False)
            counters = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    assert counters["vllm:spec_decode_num_accepted_tokens"] > 0
    compared = zip(*found.values(), strict=True)
    for number, (plain, drafted) in enumerate(compared):
        assert drafted.token_ids == plain.token_ids or parts_at_a_tie(plain, drafted), number
    changed = [each.token_ids != one.outputs[0].token_ids for each, one in zip(found[4], free, strict=True)]
    assert any(changed[1::4])
    assert any(changed[3::4])


def parts_at_a_tie(plain, drafted):
    """Whether the first token that differs had a rival within 0.1 nats."""
    place = next(
        at
        for at, pair in enumerate(zip(plain.token_ids, drafted.token_ids, strict=True))
        if pair[0] != pair[1]
    )
    first, second = sorted((each.logprob for each in plain.logprobs[place].values()), reverse=True)[:2]
    return first - second < 0.1
