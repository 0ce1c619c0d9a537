"""Comparison of two checkpoints' next-token distributions: the baseline in transformers, the variant in vLLM."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from slimqwen.checkpoint.files import VOCAB_MAP, kept_token_ids
from slimqwen.evals import EvalError
from slimqwen.evals.baseline_model import KEPT_STATES, BaselineModel
from slimqwen.evals.fidelity_figures import (
    HEAD_LOG_PROBABILITY,
    JOINED,
    MODES,
    SERVED,
    TOP_K,
    FidelitySettings,
    TextComparison,
)
from slimqwen.progress import Progress, silent
from slimqwen.records.split import Split
from slimqwen.serving import in_process
from slimqwen.serving.http_client import open_client
from slimqwen.serving.shared_server import ServerLostError, SharedServer, server_lost
from slimqwen.text.text_prefix import find_prefix

_LEAST_SHARE = 1e-12
"""Smallest probability of the tail that is used, because rounding can make the computed one negative."""

_TIMEOUT_S = 600

_ROWS = 512
"""Positions compared at a time."""


@dataclass(frozen=True)
class TokenisedText:
    """One text in the token ids of baseline and variant; both lists begin with the prefix token.

    Attributes:
        name: id of the text.
        bytes: length in UTF-8 bytes.
        baseline_ids, variant_ids: token IDs of the text for each side.
        comparable: whether the variant's ids map to the baseline's, so that distributions can be compared.
        kept_ids: for a pruned vocabulary, the baseline's id of each id of the variant; else None.
    """

    name: str
    bytes: int
    baseline_ids: list[int]
    variant_ids: list[int]
    comparable: bool
    kept_ids: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class ReferenceTexts:
    """Texts in the token ids of a variant and its baseline, and the baseline that reads them.

    Attributes:
        texts: the texts of the settings, then one text that joins them up to the context length.
        available: number of texts in the file, or on the split's side; `most_texts` may limit how many are read.
        batch: number of texts that are read at once.
        baseline: the baseline in transformers, float32.
    """

    texts: list[TokenisedText]
    available: int
    batch: int
    baseline: BaselineModel

    @classmethod
    def load(
        cls,
        variant_weights: Path,
        baseline_weights: Path,
        settings: FidelitySettings,
        root: Path,
        *,
        max_model_len: int,
        split: Split | None = None,
    ) -> Self:
        """Tokenise the settings' texts for two checkpoints, and load the baseline.

        Args:
            variant_weights: checkpoint with the baseline's tokenizer or one pruned from it.
            baseline_weights: checkpoint of the baseline.
            settings: file of texts, prefix token and batch.
            root: folder of the workspace or checkout.
            max_model_len: longest joined text in tokens; must fit in the context of both checkpoints.
            split: side of the split whose texts are used; None for both sides.

        Raises:
            CorpusError: the file of texts is missing or malformed.
            EvalError: a text is missing or too long, the prefix is no token, or the vocabularies are unrelated.
        """
        known = settings.read_texts(root, split)
        texts = _tokenise_texts(
            variant_weights, baseline_weights, settings, known[: settings.most_texts], max_model_len
        )
        baseline = BaselineModel(baseline_weights, root / KEPT_STATES)
        return cls(texts, len(known), settings.batch, baseline)

    def batches(self, progress: Progress) -> Iterator[list[TokenisedText]]:
        """Yield the texts in groups of `batch`, which are read at once."""
        for first in range(0, len(self.texts), self.batch):
            progress("reading texts", first, len(self.texts))
            yield self.texts[first : first + self.batch]
        progress("reading texts", len(self.texts), len(self.texts))

    def log_probabilities(self, text: TokenisedText) -> Tensor:
        """The baseline's log-probabilities over its vocabulary at each position of a text: [tokens - 1, vocabulary]."""
        return self.baseline.log_probabilities(text.baseline_ids)


def compare_in_process(
    reference: ReferenceTexts,
    weights: Path,
    *,
    flags: Mapping[str, Any] | None = None,
    modes: Sequence[str] = MODES,
    progress: Progress = silent,
) -> list[TextComparison]:
    """Compare a checkpoint's distributions with the baseline's, in a vLLM engine of this process.

    Args:
        reference: the texts and the baseline.
        weights: folder of the checkpoint.
        flags: vLLM flags by name without dashes.
        modes: ways of running it: single, one text at a time; batched, several at once.
        progress: receives (activity, done, total) in texts.

    Returns:
        One comparison for each text and mode.

    Raises:
        EvalError: vLLM does not return every position of the texts.
    """
    comparisons: list[TextComparison] = []
    longest = max(len(text.variant_ids) for text in reference.texts)
    with in_process.engine(
        weights,
        max_model_len=16 * math.ceil((longest + 1) / 16),
        **{
            "max_num_seqs": reference.batch,
            # Fewer tokens than a batch of texts has, so that prefills are chunked and mixed.
            "max_num_batched_tokens": max(1024, reference.batch),
            **{name.replace("-", "_"): value for name, value in (flags or {}).items()},
        },
    ) as llm:
        for group in reference.batches(progress):
            comparisons += _compare_batch(llm, reference, group, modes)
    return comparisons


def _compare_batch(
    llm: Any, reference: ReferenceTexts, group: Sequence[TokenisedText], modes: Sequence[str]
) -> list[TextComparison]:
    # A function of its own, at whose end the log-probabilities are freed: those of the next batch need the memory.
    read = [(text, reference.log_probabilities(text)) for text in group]
    comparisons: list[TextComparison] = []
    for mode in modes:
        comparers = [_Comparer(text, mode, log_p) for text, log_p in read]
        for batch in [comparers] if mode == "batched" else [[each] for each in comparers]:
            _prefill(llm, batch)
        comparisons += [comparer.comparison for comparer in comparers]
    return comparisons


def compare_model(
    reference: ReferenceTexts, model: Any, mode: str, progress: Progress = silent
) -> list[TextComparison]:
    """Compare the distributions of a model in transformers with the baseline's: one comparison for each text.

    Args:
        reference: the texts and the baseline.
        model: model of transformers.
        mode: name that the comparisons get as their mode.
        progress: receives (activity, done, total) in texts.
    """
    comparisons = []
    for group in reference.batches(progress):
        for text in group:
            comparer = _Comparer(text, mode, reference.log_probabilities(text))
            ids = torch.tensor([text.variant_ids], device=model.device)
            with torch.inference_mode():
                logits = model(ids[:, :-1], use_cache=False).logits[0]
            comparer.add(logits.float().log_softmax(-1).cpu(), ids[0, 1:].cpu())
            comparer.require_complete()
            comparisons.append(comparer.comparison)
    return comparisons


def compare_served(
    reference: ReferenceTexts, server: SharedServer, *, progress: Progress = silent
) -> list[TextComparison]:
    """Compare a server's distributions with the baseline's.

    A server returns, for each position, the likeliest `TOP_K` tokens and the text's own token. All other tokens are one
    bucket, so the divergence is never larger than that of the whole distributions (Kullback, Information Theory and
    Statistics, 1959, on grouped observations). Agreement, regret, head tokens and bits are exact.

    Args:
        reference: the texts and the baseline.
        server: the variant's server.
        progress: receives (activity, done, total) in texts.

    Returns:
        One comparison for each text, in the mode `SERVED`.

    Raises:
        ServerLostError: the server died, or refused `TOP_K` log-probabilities.
    """
    comparisons = []
    with ThreadPoolExecutor(reference.batch) as pool:
        for group in reference.batches(progress):
            responses = pool.map(lambda text: _top_log_probabilities(server, text.variant_ids), group)
            for text, positions in zip(group, responses, strict=True):
                comparer = _Comparer(text, SERVED, reference.log_probabilities(text))
                comparer.add_top(positions)
                comparer.require_complete()
                comparisons.append(comparer.comparison)
    return comparisons


class _Comparer:
    """Adds the positions of one text to its comparison, as the variant's distributions arrive."""

    def __init__(self, text: TokenisedText, mode: str, log_p: Tensor) -> None:
        self.text = text
        self.comparison = TextComparison(text.name, mode, text.bytes)
        self._log_p = log_p
        self._done = 0
        targets = torch.tensor(text.baseline_ids[1:])
        bits = -log_p.gather(1, targets[:, None]).double().sum() / math.log(2)
        self.comparison.baseline_bits = float(bits)

    def expects(self, targets: Tensor) -> bool:
        """Whether `targets` are the next tokens of the text."""
        following = self.text.variant_ids[self._done + 1 : self._done + 1 + len(targets)]
        return bool(following == targets.tolist())

    def add(self, log_q: Tensor, targets: Tensor) -> None:
        """Add the next positions of the text.

        Args:
            log_q: log-probabilities of the variant, [positions, vocabulary].
            targets: tokens of the text, [positions].
        """
        start = self._done
        self._done += len(targets)
        own_q = log_q.gather(1, targets[:, None])[:, 0]
        self.comparison.variant_bits += float(-own_q.double().sum() / math.log(2))
        if not self.text.comparable:
            return
        for row in range(0, len(targets), _ROWS):
            rows = slice(row, row + _ROWS)
            q = log_q[rows]
            p = self._baseline_log_p(start + row, len(q))
            width = min(p.shape[1], q.shape[1])
            p, q = p[:, :width], q[:, :width]
            self._add_rows(p, p.exp() * (p - q), q.argmax(1), targets[rows], own_q[rows])

    def add_top(self, positions: Sequence[Mapping[int, float]]) -> None:
        """Add all positions of the text.

        Args:
            positions: for each position, log-probabilities by token id of the likeliest tokens and the text's own.
        """
        targets = torch.tensor(self.text.variant_ids[1 : 1 + len(positions)])
        own_q = torch.tensor([row[int(target)] for row, target in zip(positions, targets, strict=True)])
        self._done = len(positions)
        self.comparison.variant_bits = float(-own_q.double().sum() / math.log(2))
        if not self.text.comparable:
            return
        # Ties go to the lower token id, as by argmax in `add`; vLLM puts the text's own token first.
        ranked = [sorted(row.items(), key=lambda pair: (-pair[1], pair[0]))[:TOP_K] for row in positions]
        top = torch.tensor([[token for token, _ in row] for row in ranked])
        q = torch.tensor([[log_q for _, log_q in row] for row in ranked])
        for row in range(0, len(targets), _ROWS):
            rows = slice(row, row + _ROWS)
            p = self._baseline_log_p(row, len(targets[rows]))
            shares_p, shares_q = _with_tail(p.gather(1, top[rows])), _with_tail(q[rows])
            divergence = shares_p * (shares_p.log() - shares_q.log())
            self._add_rows(p, divergence, top[rows, 0], targets[rows], own_q[rows])

    def require_complete(self) -> None:
        """Raise an EvalError unless every position of the text has been added."""
        expected = len(self.text.variant_ids) - 1
        if self._done != expected:
            raise EvalError(
                f"vLLM returned {self._done} of {expected} positions of {self.text.name}; "
                "run `make install` for the vLLM version that Slimqwen needs"
            )

    def _baseline_log_p(self, start: int, count: int) -> Tensor:
        """The baseline's log-probabilities of `count` positions from `start` on: [count, vocabulary of the variant]."""
        p = self._log_p[start : start + count]
        kept_ids = self.text.kept_ids
        return p if kept_ids is None else p[:, kept_ids].log_softmax(-1)

    def _add_rows(self, p: Tensor, divergence: Tensor, best: Tensor, targets: Tensor, own_q: Tensor) -> None:
        comparison = self.comparison
        own_p = p.gather(1, targets[:, None])[:, 0]
        comparison.compared += len(p)
        comparison.kl_nats += float(divergence.double().sum())
        comparison.disagreements += int((p.argmax(1) != best).sum())
        regret = p.max(1).values - p.gather(1, best[:, None])[:, 0]
        comparison.regret_nats += float(regret.double().sum())
        head = own_p >= HEAD_LOG_PROBABILITY
        comparison.head_deltas += (own_q - own_p).abs()[head].tolist()


def _prefill(llm: Any, comparers: Sequence[_Comparer]) -> None:
    """Have vLLM read the texts of all comparers at once, and add each position to the comparer of its text."""

    def consume(log_q: Tensor, targets: Tensor) -> None:
        # Rows have no request id, so the text is identified by its tokens.
        for comparer in comparers:
            if comparer.expects(targets):
                comparer.add(log_q, targets)
                return
        raise EvalError(
            "vLLM returned positions of an unknown text; run `make install` for the vLLM version that Slimqwen needs"
        )

    in_process.read_prompts(llm, [comparer.text.variant_ids for comparer in comparers], consume)
    for comparer in comparers:
        comparer.require_complete()


def _with_tail(log_probabilities: Tensor) -> Tensor:
    """Probabilities of the given tokens, then of all others together, at least the floor: [positions, tokens + 1]."""
    shares = log_probabilities.double().exp()
    tail = (1 - shares.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([shares, tail], 1).clamp(min=_LEAST_SHARE)


def _top_log_probabilities(server: SharedServer, ids: Sequence[int]) -> list[dict[int, float]]:
    """For every position but the last, log-probabilities by token id of the likeliest tokens and the text's own."""
    request = {
        "model": server.server.model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP_K,
    }
    url = f"{server.server.base_url}/v1/completions"
    try:
        with open_client(_TIMEOUT_S) as client:
            positions = (
                client.post(url, json=request).raise_for_status().json()["choices"][0]["prompt_logprobs"][1:]
            )
        return [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in positions]
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            said = f"{error.response.status_code}, {error.response.text[:200]}"
            raise server_lost(server.server, "reading texts", said) from error
        raise ServerLostError(
            f"{url} refused {TOP_K} log-probabilities a position ({error.response.text[:200]}); set VLLM_MAX_LOGPROBS "
            f"to {TOP_K} or more in the config.env"
        ) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise server_lost(server.server, "reading texts", error) from error


def _tokenise_texts(
    variant_weights: Path,
    baseline_weights: Path,
    settings: FidelitySettings,
    texts: Sequence[tuple[str, str]],
    max_model_len: int,
) -> list[TokenisedText]:
    """Tokenise the texts, then one text that joins them up to `max_model_len` tokens."""
    kept_ids = kept_token_ids(variant_weights)
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(weights) for weights in (variant_weights, baseline_weights)
    ]

    prefixes = find_prefix(settings.prefix, [tokenizer.get_vocab() for tokenizer in tokenizers])
    if prefixes is None:
        raise EvalError(
            f"{settings.prefix!r} is not a token of both checkpoints; set another `prefix` in the section fidelity "
            "of eval/gates/"
        )

    def tokenise(name: str, text: str) -> TokenisedText:
        variant_ids, baseline_ids = (
            [prefix, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
            for prefix, tokenizer in zip(prefixes, tokenizers, strict=True)
        )
        mapped = variant_ids if kept_ids is None else kept_ids[variant_ids].tolist()
        if kept_ids is None and variant_ids != baseline_ids:
            raise EvalError(
                f"{variant_weights} and {baseline_weights} tokenise {name} differently and there is no {VOCAB_MAP}; "
                "name the variant's base as `baseline` in its measurements.json"
            )
        comparable = mapped == baseline_ids
        return TokenisedText(name, len(text.encode()), baseline_ids, variant_ids, comparable, kept_ids)

    tokenised = [tokenise(name, text) for name, text in texts]
    for each in tokenised:
        length = max(len(each.baseline_ids), len(each.variant_ids))
        if length >= max_model_len:
            raise EvalError(
                f"{settings.texts}: the text {each.name} has {length} tokens and the context holds {max_model_len}; "
                "divide the text"
            )
    joined = "\n".join(text for _, text in texts)
    whole = tokenise(JOINED, joined)
    # Cut between words, because the two sides may need different numbers of tokens.
    while (length := max(len(whole.baseline_ids), len(whole.variant_ids))) > max_model_len - 1:
        joined = joined[: int(len(joined) * 0.99 * (max_model_len - 1) / length)].rpartition(" ")[0]
        whole = tokenise(JOINED, joined)
    return [*tokenised, whole]
