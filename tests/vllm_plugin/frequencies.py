"""Tokens drawn from an engine at a temperature, and a test whether two engines draw them as often.

Drafting must not change the frequencies: rejection sampling corrects for what was drafted.
"""

import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from tinyworld.documents import DocumentSampler
from tinyworld.tokenizer import load_tokenizer
from tinyworld.world import World

from slimqwen.models.mtp_head import load_drafting_model

Draws = list[list[tuple[int, ...]]]
"""Sampled continuations of each prompt."""

DRAWS = 240
"""Sampled continuations of each prompt; without speculation, the common reference, twice as many."""
LONGEST_BEGINNING = 12  # tokens
DRAWN_TOKENS = 3  # the first is sampled as ever, the others pass through the rejection sampler
LEVEL = 1e-5
"""Significance of each test: all correct, at least one fails with a probability below 2e-5."""


def draw(llm: Any, prompts: list[list[int]], count: int, seed: int) -> Draws:
    """`count` continuations of each prompt at temperature 0.7, beside greedy requests in the same batches."""
    from vllm import SamplingParams

    narrowed = [{}, {}, {"seed": seed}, {"top_k": 5}, {"top_p": 0.8}]
    sampled = [
        SamplingParams(n=count, temperature=0.7, max_tokens=DRAWN_TOKENS, ignore_eos=True, **extra)
        for extra in narrowed
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    torch.manual_seed(seed)
    starts = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(starts + starts, sampled + [greedy] * len(starts), use_tqdm=False)
    return [[tuple(each.token_ids) for each in output.outputs] for output in outputs[: len(sampled)]]


def continuations(samples: list[tuple[int, ...]]) -> dict[tuple[int, ...], Counter[int]]:
    """Counts of the next token after each prefix that was drawn."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in samples:
        for position, token in enumerate(tokens):
            counts[tokens[:position]][token] += 1
    return counts


def homogeneity(some: Draws, others: Draws) -> tuple[float, int]:
    """Chi-squared test that two sets of draws, [prompts][draws][tokens], come from the same distribution.

    Given the prefix, the next token of each draw is independent of the others, so each prefix adds a 2 x tokens
    table. Tokens expected less than 5 times in either row are one bin. Returns the p-value and the degrees
    of freedom.
    """
    statistic, freedom = 0.0, 0
    for these, those in zip(some, others, strict=True):
        left, right = continuations(these), continuations(those)
        for prefix in left.keys() & right.keys():
            a, b = left[prefix], right[prefix]
            pooled = a + b
            enough = 5 * pooled.total() / min(a.total(), b.total())
            bins = [[token] for token, count in pooled.items() if count >= enough]
            rare = [token for token, count in pooled.items() if count < enough]
            if sum(pooled[token] for token in rare) >= enough:
                bins.append(rare)
            elif bins:
                min(bins, key=lambda tokens: pooled[tokens[0]]).extend(rare)
            if len(bins) > 1:
                table = [[sum(row[token] for token in tokens) for tokens in bins] for row in (a, b)]
                statistic += stats.chi2_contingency(table, correction=False).statistic
                freedom += len(bins) - 1
    return stats.chi2.sf(statistic, freedom), freedom


def accept_every_draft(draws: Draws, reference: Draws) -> Draws:
    """What a fault would make of draws: each first token is followed by the likeliest ones, as drafts are."""
    faulty: Draws = []
    for sampled, correct in zip(draws, reference, strict=True):
        counts = continuations(correct)
        faulty.append([])
        for tokens in sampled:
            prefix = tokens[:1]
            while len(prefix) < len(tokens) and prefix in counts:
                prefix += (counts[prefix].most_common(1)[0][0],)
            faulty[-1].append(prefix)
    return faulty


def uncertain_beginnings(checkpoint: Path) -> list[list[int]]:
    """Five short beginnings of prose after which the model is least certain: a certain one has nothing to compare.

    Short, because every draw reads its beginning anew.
    """
    model, tokenizer = load_drafting_model(checkpoint), load_tokenizer(checkpoint)
    prose = DocumentSampler(World(), left_out=(), mix={"prose": 1.0}).stream(seed=3)
    found = []
    for document in itertools.islice(prose, 100):
        ids = tokenizer(document.text)["input_ids"][: LONGEST_BEGINNING + DRAWN_TOKENS]
        with torch.no_grad():
            scores = model.logits(model.hidden_states(torch.tensor([ids])))[0].log_softmax(-1) / 0.7
        uncertainty = torch.distributions.Categorical(logits=scores).entropy()
        over_draws = uncertainty.unfold(0, DRAWN_TOKENS, 1).sum(1)
        found.append((over_draws.max().item(), ids[: 1 + int(over_draws.argmax())]))
    return [ids for _, ids in sorted(found, reverse=True)[:5]]
