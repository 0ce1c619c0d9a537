"""How far a checkpoint's next-token distributions are from its baseline's, token by token on fixed texts.

The baseline is read by transformers in 32 bit, the variant by vLLM as it serves: the same texts go through both, and
every position gives the whole distribution of each (no top k). Scores of tasks need thousands of answers to see what
these figures see in a minute.

A pruned variant is compared on the texts whose tokens it all kept, against the baseline's distribution over the kept
tokens; bits per byte are compared on every text, for they do not depend on the vocabulary.

What the distributions hardly show is looked for layer by layer: one that came out wrong where it matters little.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import layer_error, plan_file, served, statistics
from slimqwen.evaluation.served import Served, ServerLostError
from slimqwen.evaluation.verdict import Verdict, overall
from slimqwen.progress import Progress, silent
from slimqwen.recipe import recipe_file, runner
from slimqwen.recipe.prune_vocab import VOCAB_MAP
from slimqwen.records import provenance, store
from slimqwen.serving import in_process, launch
from slimqwen.variant import Variant

MODES = ("single", "batched")
"""One text at a time, and several at once with a token budget that cuts their prompts into chunks."""

SERVED = "served"
"""Several at once over HTTP, by the server of the variant with everything that its config.env turns on."""

TOP_K = 20
"""Tokens of each position that a server is asked for, vLLM's default limit; all others are one bucket, the tail."""

_HEAD_LOG_PROBABILITY = math.log(0.01)
"""A token that the baseline gives at least this is a head token: the tail's log-probabilities are noise."""

_WEIGHT_FLAGS = ("dtype", "kv-cache-dtype", "quantization")
_JOINED = "joined"
"""All texts as one, to the context's length: not a further text, so kept out of every mean."""

_LEAST_SHARE = 1e-12
"""Rounding leaves a tail of less than nothing where the likeliest tokens are almost all there is."""

_ANSWER_TIMEOUT_S = 600

_LAYER_TOKENS = 2048
"""Of the first texts, which the layers are compared on: a layer's error needs few, and their states fill memory."""

_ROWS = 512
"""Positions whose distributions are compared at a time."""


class FidelityError(SlimqwenError):
    """Texts, limits or the two checkpoints do not allow a comparison."""


class Limits(BaseModel):
    """The largest values that still pass, all in nats a token but the shares and the bits.

    Attributes:
        kl_nats: mean divergence of the variant from the baseline, KL(baseline || variant).
        top1_disagreement: share of positions whose likeliest token differs.
        regret_nats: mean of what the baseline's log-probability loses where the variant would choose another token.
        head_delta_mean: mean |log-probability difference| of the text's own tokens that the baseline gives 1 % or more.
        head_delta_p99: their 99th percentile.
        bits_per_byte: growth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kl_nats: float
    top1_disagreement: float
    regret_nats: float
    head_delta_mean: float
    head_delta_p99: float
    bits_per_byte: float


class Plan(BaseModel):
    """eval/fidelity/<name>.yaml.

    Attributes:
        texts: a .jsonl file of {"id", "text"}, relative to the repository.
        prefix: the token that every text follows, by name.
        batch: texts replayed together in the mode batched.
        layer_error_ratio: the largest error of a quantised layer that still passes, plain rounding's being 1.
        limits: for same_weights and changed_weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts: Path
    prefix: str
    batch: int
    layer_error_ratio: float
    limits: dict[str, Limits]


@dataclass(frozen=True)
class PairedText:
    """One text in the token ids of both sides, the prefix first.

    Attributes:
        comparable: the variant's ids are the baseline's, mapped: its distributions can be compared.
    """

    name: str
    bytes: int
    baseline_ids: list[int]
    variant_ids: list[int]
    comparable: bool


@dataclass
class Reading:
    """What the two sides made of one text in one mode; sums are over its positions."""

    name: str
    mode: str
    bytes: int
    compared: int = 0
    kl_nats: float = 0.0
    disagreements: int = 0
    regret_nats: float = 0.0
    baseline_bits: float = 0.0
    variant_bits: float = 0.0
    head_deltas: list[float] = field(default_factory=list)


def load_plan(name: str, root: Path) -> Plan:
    """Read eval/fidelity/<name>.yaml.

    Raises:
        FidelityError: no such file, or a field is missing or wrong.
    """
    plan = plan_file.read("fidelity", name, root, Plan, FidelityError, "write its texts and limits there")
    if set(plan.limits) != {"same_weights", "changed_weights"}:
        raise FidelityError(f"eval/fidelity/{name}.yaml: limits are for same_weights and changed_weights")
    return plan


def weight_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those of vLLM's flags that decide what a prompt's distributions are, as far as they are set."""
    return {name: flags[name] for name in _WEIGHT_FLAGS if name in flags}


def measure(
    one: Variant,
    plan_name: str,
    *,
    command: Sequence[str],
    stages: bool,
    records_folder: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Compare a variant with its baseline, or a baseline with itself, and write its fidelity record.

    Args:
        one: the variant; its weights, dtype and KV cache are compared in an engine of its own without compilation,
            then all that it is served with, by its server.
        plan_name: of eval/fidelity/.
        command: the command that asked for it, for the record.
        stages: compare what each stage of its recipe made too, as far as the store has it.
        records_folder: instead of the variant's own folder.
        progress: hears the texts done.

    Returns:
        The record's path.

    Raises:
        FidelityError: no comparison is possible.
        ServerLostError: the server died or refused; nothing is recorded.
        SlimqwenError: weights are missing, or what `compare` raises.
    """
    started = provenance.utc_now()
    plan = load_plan(plan_name, one.root)
    baseline = variants.load(one.baseline, one.root) if one.baseline else one
    for side in (one, baseline):
        checkpoint.check(side.weights, variants.making_command(side.weights, side.root))
    command_line = launch.resolve(one)
    flags = weight_flags(command_line.flags)
    context = min(command_line.max_model_len, launch.resolve(baseline).max_model_len)

    def read(folder: Path) -> list[Reading]:
        return compare(
            folder, baseline.weights, plan, one.root, flags=flags, max_model_len=context, progress=progress
        )

    readings = read(one.weights)
    layers = compare_layers(one.weights, baseline.weights, plan, one.root, progress)
    log = one.root / "logs" / f"eval-fidelity-{one.name}.log"
    with served.serve(one, log=log, progress=progress) as by:
        readings += compare_served(
            by, baseline.weights, plan, one.root, max_model_len=context, progress=progress
        )
    modes = summarise(readings)
    modes[SERVED]["top_k"] = TOP_K
    same = checkpoint.digest(one.weights) == checkpoint.digest(baseline.weights)
    kind = "same_weights" if same else "changed_weights"
    verdicts = {mode: judge(modes[mode], plan.limits[kind]) for mode in modes}
    record = {
        "schema": "fidelity/1",
        "variant": one.name,
        "baseline": baseline.name,
        "plan": plan_name,
        "limits": {"of": kind, **plan.limits[kind].model_dump()},
        "modes": modes,
        "verdicts": verdicts,
        "layers": layers,
        "verdict": overall(
            [
                *(each for mode in modes for each in verdicts[mode].values()),
                *([Verdict(layers["verdict"])] if layers else []),
            ]
        ),
        "stages": [
            {"stage": stage, **summarise(read(folder))["single"]}
            for stage, folder in (_stages(one) if stages else [])
        ],
        "provenance": provenance.describe(
            root=one.root,
            command=command,
            started=started,
            flags=by.server.command.flags,
            environment=by.server.command.environment,
            weights=one.weights,
            datasets=[one.root / plan.texts, one.root / "eval" / "fidelity" / f"{plan_name}.yaml"],
            seeds={},
            server="found" if by.found else "started",
        ),
    }
    items = [{key: value for key, value in asdict(one).items() if key != "head_deltas"} for one in readings]
    return store.write(records_folder or one.folder, record, items)


def compare(
    variant: Path,
    baseline: Path,
    plan: Plan,
    root: Path,
    *,
    max_model_len: int,
    flags: Mapping[str, Any] | None = None,
    modes: Sequence[str] = MODES,
    progress: Progress = silent,
) -> list[Reading]:
    """Read the plan's texts with both checkpoints, each text alone and all joined to the context's length.

    Args:
        variant: a checkpoint that vLLM serves; of the baseline's tokenizer, or pruned from it.
        baseline: a checkpoint that transformers loads.
        plan: texts and batch.
        root: what the plan's paths are relative to.
        max_model_len: tokens that the long text is cut to, both sides' context allowing it.
        flags: of vLLM, by name without dashes.
        modes: how vLLM reads them.
        progress: hears the texts done.

    Returns:
        one reading a text and mode.

    Raises:
        FidelityError: a text or the prefix is missing, or the vocabularies are unrelated.
    """
    texts = _texts(root / plan.texts)
    kept = _kept(variant)
    sequences = list(_sequences(variant, baseline, texts, plan.prefix, kept, max_model_len))
    model = _Baseline(baseline)
    readings: list[Reading] = []
    longest = max(len(sequence.variant_ids) for sequence in sequences)
    with in_process.engine(
        variant,
        max_model_len=16 * math.ceil((longest + 1) / 16),
        max_num_seqs=plan.batch,
        # Less than a batch of texts has, so that prompts are cut and mixed.
        max_num_batched_tokens=max(1024, plan.batch),
        **{name.replace("-", "_"): value for name, value in (flags or {}).items()},
    ) as llm:
        for first in range(0, len(sequences), plan.batch):
            progress("reading texts", first, len(sequences))
            group = sequences[first : first + plan.batch]
            expected = [model.log_probabilities(sequence.baseline_ids) for sequence in group]
            for mode in modes:
                fresh = [Reading(sequence.name, mode, sequence.bytes) for sequence in group]
                readers = [
                    _Reader(sequence, log_p, kept, reading)
                    for sequence, log_p, reading in zip(group, expected, fresh, strict=True)
                ]
                together = [readers] if mode == "batched" else [[reader] for reader in readers]
                for these in together:
                    _replay(llm, these)
                readings += fresh
        progress("reading texts", len(sequences), len(sequences))
    return readings


def compare_layers(
    variant: Path, baseline: Path, plan: Plan, root: Path, progress: Progress = silent
) -> dict[str, Any] | None:
    """Compare every quantised layer with the baseline's and with plain rounding, on the plan's first texts.

    Args:
        variant: a checkpoint.
        baseline: the one that it was made from, not quantised.
        plan: texts and limit.
        root: what the plan's paths are relative to.
        progress: hears the models done.

    Returns:
        {"limit", "verdict", "tokens", "rows": [{"layer", "error", "rounded_error", "ratio"}]}; None where the variant
        has no layer with linears packed by compressed-tensors.

    Raises:
        FidelityError: texts are missing.
        LayerError: the layers cannot be compared.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(baseline)
    texts: list[list[int]] = []
    room = _LAYER_TOKENS
    for _, text in _texts(root / plan.texts):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:room]
        room -= len(ids)
        texts += [ids] if ids else []
    found = layer_error.measure(variant, baseline, texts, progress)
    if not found:
        return None
    within = all(one.ratio <= plan.layer_error_ratio for one in found)
    return {
        "limit": plan.layer_error_ratio,
        "verdict": Verdict.PASS if within else Verdict.FAIL,
        "tokens": _LAYER_TOKENS - room,
        "rows": [{**asdict(one), "ratio": one.ratio} for one in found],
    }


def compare_served(
    by: Served,
    baseline: Path,
    plan: Plan,
    root: Path,
    *,
    max_model_len: int,
    progress: Progress = silent,
) -> list[Reading]:
    """Read the plan's texts with a server and with the baseline.

    A server tells the likeliest `TOP_K` tokens of a position and the text's own. Divergence is that of these tokens and
    of one bucket for all others, so never more than the whole distributions' (Kullback, Information Theory and
    Statistics, 1959, on grouped observations); agreement, regret, head tokens and bits are exact.

    Args:
        by: the server of the variant.
        baseline: a checkpoint that transformers loads.
        plan: texts, and how many are asked for at once.
        root: what the plan's paths are relative to.
        max_model_len: tokens that the long text is cut to.
        progress: hears the texts done.

    Returns:
        one reading a text, in the mode `SERVED`.

    Raises:
        FidelityError: as for `compare`.
        ServerLostError: the server died, or refused to give as many log-probabilities.
    """
    weights = by.variant.weights
    kept = _kept(weights)
    sequences = list(
        _sequences(weights, baseline, _texts(root / plan.texts), plan.prefix, kept, max_model_len)
    )
    model = _Baseline(baseline)
    readings = []
    with ThreadPoolExecutor(plan.batch) as pool:
        for first in range(0, len(sequences), plan.batch):
            progress("reading served texts", first, len(sequences))
            group = sequences[first : first + plan.batch]
            answers = pool.map(lambda one: _ask(by, one.variant_ids), group)
            expected = [model.log_probabilities(sequence.baseline_ids) for sequence in group]
            for sequence, log_p, positions in zip(group, expected, answers, strict=True):
                reading = Reading(sequence.name, SERVED, sequence.bytes)
                reader = _Reader(sequence, log_p, kept, reading)
                reader.take_top(positions)
                reader.finish()
                readings.append(reading)
    progress("reading served texts", len(sequences), len(sequences))
    return readings


def summarise(readings: Sequence[Reading]) -> dict[str, dict[str, Any]]:
    """Figures of each mode with standard errors over texts: what a record holds."""
    modes = dict.fromkeys(one.mode for one in readings)
    return {mode: _summary([one for one in readings if one.mode == mode]) for mode in modes}


def judge(figures: Mapping[str, Any], limits: Limits) -> dict[str, Verdict]:
    """A verdict for each limit: pass where the whole interval is within it, fail where all of it is beyond.

    The joined text is one, so its divergence has no interval and is held against the limit as it is.
    """
    verdicts = {}
    for name, limit in limits:
        found = figures[name]
        if found is None:
            verdicts[name] = Verdict.INCONCLUSIVE
            continue
        half = statistics.Z * found["standard_error"]
        low, high = found["value"] - half, found["value"] + half
        verdicts[name] = (
            Verdict.PASS if high <= limit else Verdict.FAIL if low > limit else Verdict.INCONCLUSIVE
        )
    joined = figures["joined_kl_nats"]
    if joined is not None:
        verdicts["joined_kl_nats"] = Verdict.PASS if joined <= limits.kl_nats else Verdict.FAIL
    return verdicts


def _summary(everything: Sequence[Reading]) -> dict[str, Any]:
    readings = [one for one in everything if one.name != _JOINED]
    joined = next((one for one in everything if one.name == _JOINED), None)
    compared = [one for one in readings if one.compared]
    positions = [one.compared for one in compared]

    def over_positions(sums: Sequence[float]) -> dict[str, Any] | None:
        if len(compared) < 2:
            return None
        shares = [total / count for total, count in zip(sums, positions, strict=True)]
        return asdict(statistics.mean(shares, positions))

    heads = [one for one in compared if one.head_deltas]
    mean = p99 = None
    if len(heads) >= 2:
        weights = [len(one.head_deltas) for one in heads]
        mean = asdict(
            statistics.mean([sum(one.head_deltas) / len(one.head_deltas) for one in heads], weights)
        )
        p99 = asdict(statistics.percentile_over_groups([one.head_deltas for one in heads], 99))
    sizes = [one.bytes for one in readings]
    growth = statistics.paired_difference(
        [one.baseline_bits / one.bytes for one in readings],
        [one.variant_bits / one.bytes for one in readings],
        sizes,
    )
    return {
        "texts": len(readings),
        "texts_compared": len(compared),
        "positions_compared": sum(positions),
        "kl_nats": over_positions([one.kl_nats for one in compared]),
        "top1_disagreement": over_positions([one.disagreements for one in compared]),
        "regret_nats": over_positions([one.regret_nats for one in compared]),
        "head_delta_mean": mean,
        "head_delta_p99": p99,
        "head_delta_max": max((delta for one in heads for delta in one.head_deltas), default=None),
        "bits_per_byte": {
            "value": growth.value,
            "standard_error": growth.standard_error,
            "count": growth.count,
        },
        "joined_kl_nats": joined.kl_nats / joined.compared if joined and joined.compared else None,
        "joined_tokens": joined.compared if joined else 0,
        "baseline_bits_per_byte": sum(one.baseline_bits for one in readings) / sum(sizes),
    }


class _Baseline:
    """The baseline in transformers, 32 bit."""

    def __init__(self, folder: Path) -> None:
        config = checkpoint.read_config(folder)
        if "quantization_config" in config:
            raise FidelityError(
                f"{folder} is quantised itself; compare with the checkpoint that it was made from"
            )
        architecture = getattr(transformers, config["architectures"][0])
        transformers.utils.logging.set_verbosity_error()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = architecture.from_pretrained(folder, dtype=torch.float32).eval().to(self._device)

    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """[len(ids) - 1, vocabulary], float32: of every token after the first."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids[:-1]], device=self._device), use_cache=False).logits[0]
            return logits.float().log_softmax(-1).cpu()


class _Reader:
    """Compares the variant's distributions of one text with the baseline's as they come."""

    def __init__(self, sequence: PairedText, log_p: Tensor, kept: Tensor | None, reading: Reading) -> None:
        self.sequence = sequence
        self._log_p, self._kept, self._reading = log_p, kept, reading
        self._done = 0
        targets = torch.tensor(sequence.baseline_ids[1:])
        bits = -log_p.gather(1, targets[:, None]).double().sum() / math.log(2)
        reading.baseline_bits = float(bits)

    def expects(self, targets: Tensor) -> bool:
        """Whether these are the next tokens of the text."""
        following = self.sequence.variant_ids[self._done + 1 : self._done + 1 + len(targets)]
        return bool(following == targets.tolist())

    def take(self, log_q: Tensor, targets: Tensor) -> None:
        """Add the next positions; log_q [positions, vocabulary]."""
        reading, start = self._reading, self._done
        self._done += len(targets)
        chosen = log_q.gather(1, targets[:, None])[:, 0]
        reading.variant_bits += float(-chosen.double().sum() / math.log(2))
        if not self.sequence.comparable:
            return
        for at in range(0, len(targets), _ROWS):
            q, wanted = log_q[at : at + _ROWS], targets[at : at + _ROWS]
            p = self._expected(start + at, len(q))
            width = min(p.shape[1], q.shape[1])
            p, q = p[:, :width], q[:, :width]
            self._add(p, p.exp() * (p - q), q.argmax(1), wanted, q.gather(1, wanted[:, None])[:, 0])

    def take_top(self, positions: Sequence[Mapping[int, float]]) -> None:
        """Add the whole text: of each position the log-probabilities of its likeliest tokens and of the text's own."""
        reading = self._reading
        targets = torch.tensor(self.sequence.variant_ids[1 : 1 + len(positions)])
        own = torch.tensor([of[int(wanted)] for of, wanted in zip(positions, targets, strict=True)])
        self._done = len(positions)
        reading.variant_bits = float(-own.double().sum() / math.log(2))
        if not self.sequence.comparable:
            return
        # Ties go to the lower id, as in `take`: vLLM puts the text's own token first.
        ranked = [sorted(of.items(), key=lambda pair: (-pair[1], pair[0]))[:TOP_K] for of in positions]
        top = torch.tensor([[token for token, _ in of] for of in ranked])
        q = torch.tensor([[log_q for _, log_q in of] for of in ranked])
        for at in range(0, len(targets), _ROWS):
            rows = slice(at, at + _ROWS)
            p = self._expected(at, len(targets[rows]))
            shares_p = _with_tail(p.gather(1, top[rows]))
            shares_q = _with_tail(q[rows])
            divergence = shares_p * (shares_p.log() - shares_q.log())
            self._add(p, divergence, top[rows, 0], targets[rows], own[rows])

    def _expected(self, start: int, count: int) -> Tensor:
        """The baseline's log-probabilities [count, vocabulary of the variant] from a position on."""
        p = self._log_p[start : start + count]
        return p if self._kept is None else p[:, self._kept].log_softmax(-1)

    def _add(self, p: Tensor, divergence: Tensor, best: Tensor, wanted: Tensor, own_q: Tensor) -> None:
        reading = self._reading
        own = p.gather(1, wanted[:, None])[:, 0]
        reading.compared += len(p)
        reading.kl_nats += float(divergence.double().sum())
        reading.disagreements += int((p.argmax(1) != best).sum())
        reading.regret_nats += float((p.max(1).values - p.gather(1, best[:, None])[:, 0]).double().sum())
        head = own >= _HEAD_LOG_PROBABILITY
        reading.head_deltas += (own_q - own).abs()[head].tolist()

    def finish(self) -> None:
        """Check that the whole text came."""
        if self._done != len(self.sequence.variant_ids) - 1:
            raise FidelityError(
                f"vLLM gave {self._done} of {len(self.sequence.variant_ids) - 1} positions of {self.sequence.name}; "
                "its version may differ from the one this was written for"
            )


def _replay(llm: Any, readers: Sequence[_Reader]) -> None:
    """Have vLLM read texts at once."""

    def consume(log_q: Tensor, targets: Tensor) -> None:
        # Rows come without the request's name: what follows tells whose they are.
        for reader in readers:
            if reader.expects(targets):
                reader.take(log_q, targets)
                return
        raise FidelityError("vLLM gave positions of a text that was not asked for")

    in_process.read_prompts(llm, [reader.sequence.variant_ids for reader in readers], consume)
    for reader in readers:
        reader.finish()


def _with_tail(log_probabilities: Tensor) -> Tensor:
    """Probabilities [positions, tokens + 1] of the tokens given and of all others together, none of them zero."""
    shares = log_probabilities.double().exp()
    rest = (1 - shares.sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([shares, rest], 1).clamp(min=_LEAST_SHARE)


def _ask(by: Served, ids: Sequence[int]) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest tokens, and of the one that follows, at every position but the last."""
    asked = {
        "model": by.server.model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP_K,
    }
    url = f"{by.server.base_url}/v1/completions"
    try:
        answer = httpx.post(
            url, json=asked, headers=launch.authorization(), timeout=_ANSWER_TIMEOUT_S, trust_env=False
        )
        answer.raise_for_status()
        positions = answer.json()["choices"][0]["prompt_logprobs"][1:]
        return [{int(token): float(found["logprob"]) for token, found in of.items()} for of in positions]
    except httpx.HTTPStatusError as error:
        raise ServerLostError(
            f"{url} refused {TOP_K} log-probabilities a position: {error.response.text[:200]}"
        ) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerLostError(
            f"the server failed while it read texts ({type(error).__name__}: {error}); nothing was recorded, run again"
        ) from error


def _texts(file: Path) -> list[tuple[str, str]]:
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        return [(str(row["id"]), str(row["text"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FidelityError(f'{file}: not usable ({error!r}); give {{"id", "text"}} a line') from None


def _sequences(
    variant: Path,
    baseline: Path,
    texts: Sequence[tuple[str, str]],
    prefix: str,
    kept: Tensor | None,
    max_model_len: int,
) -> Iterator[PairedText]:
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (variant, baseline))
    to_old = None if kept is None else kept.tolist()
    starts = [tokenizer.get_vocab().get(prefix) for tokenizer in (ours, theirs)]
    if None in starts:
        raise FidelityError(f"{prefix!r} is no token of both checkpoints; name another prefix in the plan")

    def sequence(name: str, text: str) -> PairedText:
        new, old = (
            [start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
            for tokenizer, start in ((ours, starts[0]), (theirs, starts[1]))
        )
        mapped = new if to_old is None else [to_old[token] for token in new]
        if to_old is None and new != old:
            raise FidelityError(
                f"{variant} and {baseline} read {name} differently and there is no {VOCAB_MAP}; they are unrelated"
            )
        return PairedText(name, len(text.encode()), old, new, mapped == old)

    for name, text in texts:
        yield sequence(name, text)
    joined = "\n".join(text for _, text in texts)
    long = sequence(_JOINED, joined)
    # Cut between words, for the two sides may need different numbers of tokens.
    while (length := max(len(long.baseline_ids), len(long.variant_ids))) > max_model_len - 1:
        joined = joined[: int(len(joined) * 0.99 * (max_model_len - 1) / length)].rpartition(" ")[0]
        long = sequence(_JOINED, joined)
    yield long


def _stages(one: Variant) -> list[tuple[str, Path]]:
    """What the stages of a variant's recipe made, those left out that changed neither tensors nor tokens.

    Raises:
        FidelityError: it has no recipe, or the store lacks a stage's output.
    """
    if one.recipe is None:
        raise FidelityError(f"{one.name} has no recipe, so there are no stages to tell apart")
    weights = one.root / "weights"
    forecasts = runner.status(
        recipe_file.read(one.recipe), weights, lambda base: variants.load(base, one.root).weights
    )
    found: list[tuple[str, Path]] = []
    last: list[str] = []
    for forecast in forecasts:
        if not forecast.reused or forecast.key is None:
            raise FidelityError(
                f"the store has no output of {forecast.stage}; `make recipe VARIANT={one.name}` makes it"
            )
        folder = weights / "store" / forecast.key
        files = checkpoint.Manifest.read(folder).files
        decisive = [
            record.sha256
            for name, record in files.items()
            if name.endswith((".safetensors", "tokenizer.json"))
        ]
        if decisive != last:
            found.append((forecast.stage, folder))
        last = decisive
    return found


def _kept(folder: Path) -> Tensor | None:
    """The baseline's id of each of a pruned checkpoint's tokens."""
    file = folder / VOCAB_MAP
    if not file.is_file():
        return None
    return torch.tensor(json.loads(file.read_text(encoding="utf-8"))["new_to_old"])
