"""The search: forecasts candidates of a base on a GPU, checks the best, proves one, and writes the record.

The first candidates are chosen by forecasts alone. The ratio of their measured divergence to the forecast corrects the
forecasts of later ones: forecasts assume rounding to nearest, and calibration loses less.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slimqwen import host
from slimqwen import variant as variants
from slimqwen.bench.latency.speedups import ALL_CLASSES, compare_latency
from slimqwen.checkpoint.files import sha256
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import find_subject
from slimqwen.plan import devices, shapes
from slimqwen.plan.host_gpus import choose_gpu
from slimqwen.processes import Executor, Result, run_tasks
from slimqwen.records import provenance, store
from slimqwen.records.record import Finding, Verdict
from slimqwen.report.choice import judged_by_gate
from slimqwen.search import SearchError
from slimqwen.search.candidate import STAGES_BY_PLATFORM
from slimqwen.search.front import Forecast, Front, Limits
from slimqwen.search.measurements import RecordSettings, latency_task, recipe_task
from slimqwen.search.proof import climb, prove_finalists
from slimqwen.search.record import Incumbent, Search, Sensitivity, Trial
from slimqwen.search.sensitivities import Change, Sensitivities, measure_sensitivities
from slimqwen.variant import Variant
from slimqwen.workspace import locate

_CHEAP = ("fidelity", "acceptance")
"""Checks that every candidate climbs; the others follow for the fastest that passed these."""

_ROUNDS = 4
"""Latency rounds where the GPU is here."""


@dataclass(frozen=True)
class _Texts:
    """The texts of the candidates' recipes.

    Attributes:
        stages: parameters by stage.
        corpus: text of a recipe; None where the stages name theirs.
    """

    stages: Mapping[str, Mapping[str, Any]]
    corpus: str | None

    @classmethod
    def of(cls, incumbent: Variant, corpus: str | None) -> "_Texts":
        """The given text; else those of the incumbent's recipe, or without one what the model itself writes."""
        recipe = yaml.safe_load(incumbent.recipe.read_text(encoding="utf-8")) if incumbent.recipe else {}
        if corpus or not recipe:
            return cls(STAGES_BY_PLATFORM[host.detect()], corpus or "self")
        found: dict[str, Mapping[str, Any]] = {}
        for entry in recipe["stages"]:
            [(name, given)] = (entry if isinstance(entry, dict) else {entry: None}).items()
            parameters = given or {}
            if name == "calibrate" and "corpus" in parameters:
                found.setdefault(name, {"corpus": parameters["corpus"]})
            if name == "sample_outputs":
                found.setdefault(name, parameters)
        return cls(found, recipe.get("corpus"))


@dataclass
class _Search:
    """A search in progress."""

    base: Variant
    front: Front
    incumbent: Incumbent
    texts: _Texts
    evaluation: str
    executor: Executor
    settings: RecordSettings
    trials: list[Trial]
    factor: float = 1.0

    def try_candidates(self, count: int) -> None:
        """Have the next candidates of the front that may be faster than the incumbent climb the cheap checks."""
        known = [trial.candidate for trial in self.trials]
        made: dict[str, Forecast] = {}
        for each in self.front.choose(count, self.factor, known):
            if each.tokens_per_second > self.incumbent.tokens_per_second:
                made[self._scaffold(each).name] = each
        with self.executor:
            climbs = climb(list(made), _CHEAP, self.executor, self.settings, self.base.root)
        for name, forecast in made.items():
            found = climbs[name]
            [share] = [each.value for each in found.findings if _is_share(each)] or [None]
            speed = None
            if not found.reasons:
                speed = self.front.bound_candidate(forecast.candidate, 1.0 if share is None else share)
            self.trials.append(
                Trial(
                    name=name,
                    changes=forecast.candidate.changes,
                    forecast_kl_nats=forecast.kl_nats,
                    forecast_acceptance_share=forecast.acceptance_share,
                    forecast_tokens_per_second=forecast.tokens_per_second,
                    findings=tuple(found.findings),
                    reason="; ".join(found.reasons),
                    tokens_per_second=speed,
                )
            )
        ratios = [
            math.log(trial.kl.value / trial.forecast_kl_nats)
            for trial in self.trials
            if trial.kl and trial.kl.value and trial.forecast_kl_nats
        ]
        self.factor = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    def time_finalists(self) -> bool:
        """Where the GPU is here, time what passed in turns with the incumbent; returns whether that was done."""
        root, finalists = self.base.root, self.finalists()
        here = choose_gpu(None, root) if host.detect() == "cuda" else None
        if not finalists or here is None or here.gpu.name != self.front.gpu.name:
            return False
        sides = [
            variants.load(name, root) for name in (self.incumbent.variant, *(each.name for each in finalists))
        ]
        settings = RecordSettings(self.settings.command)
        with self.executor:
            run_tasks([recipe_task(side) for side in sides if side.recipe], self.executor)
            [outcome] = run_tasks([latency_task(sides, _ROUNDS, settings)], self.executor).values()
        if not isinstance(outcome, Result):
            raise SearchError(f"timing of the finalists: {outcome.reason}")
        first, *others = outcome.value.paths
        for trial, path in zip(finalists, others, strict=True):
            rows = compare_latency(first, path)
            speedup = next(
                row.speedup for row in rows if (row.prompt_class, row.measure) == (ALL_CLASSES, "e2el_ms")
            )
            self.trials[self.trials.index(trial)] = trial.model_copy(update={"speedup": speedup})
        return True

    def finalists(self) -> list[Trial]:
        """Trials that nothing failed and that are faster than the incumbent; undecided ones last, else by speed."""
        least = self.incumbent.tokens_per_second
        passed = [trial for trial in self.trials if trial.factor_over(least) > 1]
        return sorted(passed, key=lambda trial: (trial.is_undecided, -trial.factor_over(least)))

    def find_winner(self) -> str | None:
        """The fastest finalist that passes all checks on the search's items, or that they leave undecided."""
        undecided = None
        for trial in self.finalists():
            [judged] = prove_finalists(
                [trial.name],
                self.executor,
                self.base.root,
                command=self.settings.command,
                side="search",
                first_failure_ends=True,
            ).finalists
            reason = judged.reason or ""
            ended = {"findings": judged.findings or trial.findings, "reason": reason}
            self.trials[self.trials.index(trial)] = trial.model_copy(update=ended)
            if judged.verdict == Verdict.PASS:
                return trial.name
            if judged.verdict == Verdict.INCONCLUSIVE:
                undecided = undecided or trial.name
        return undecided

    def _scaffold(self, forecast: Forecast) -> Variant:
        return forecast.candidate.scaffold(
            self.base, "search", self.texts.stages, self.texts.corpus, self.evaluation
        )


def search_variants(
    base: Variant,
    gpu_name: str,
    budget: str,
    executor: Executor,
    *,
    command: Sequence[str],
    candidates: int = 5,
    corpus: str | None = None,
) -> Path:
    """Search for the fastest variant of a base on a GPU within a quality budget, prove it, and write the record.

    Candidates become variants of experiments/. What was measured is kept, so the same call continues. If no candidate
    keeps the limits, or the proof fails, the record says so and nothing is raised.

    Args:
        base: variant to search from; its checkpoint is the base of every candidate's recipe.
        gpu_name: name of a GPU in eval/devices.yaml.
        budget: name of a file of eval/gates/, whose limits every candidate must keep.
        executor: runs the measurements; this function enters it.
        command: command line that the records state as their origin.
        candidates: most candidates that become variants.
        corpus: calibration text of their recipes; None for the text that the promoted recipe names.

    Returns:
        File of the record.

    Raises:
        SlimqwenError: base, GPU or budget cannot be used, or a sensitivity could not be measured.
    """
    started, root = provenance.utc_now(), base.root
    base.require_weights()
    gpu = devices.read_gpu(gpu_name, root)
    gate = GateSettings.load(budget, root)
    subject = find_subject(base.name, root)
    acceptance = gate.of(AcceptanceSettings).at_depth_of(base)
    limits = Limits(gate.of(FidelitySettings).limits.kl_nats, acceptance.least_share, acceptance.gate_depth)
    promoted = [*_list_promoted(base), base]
    # Any promoted recipe names texts; which one is the incumbent is known only with the sensitivities.
    texts = _Texts.of(promoted[0], corpus)
    with executor:
        sensitivities = measure_sensitivities(
            base,
            texts.stages.get("sample_outputs", {}),
            texts.corpus,
            executor,
            root / ".cache" / "search" / base.name,
        )
    front = Front(
        shapes.variant_shape(base), ServerSettings.of(subject, None, None), gpu, sensitivities, limits
    )
    incumbent = max((_bound(each, front) for each in promoted), key=lambda each: each.tokens_per_second)
    search = _Search(
        base,
        front,
        incumbent,
        texts,
        budget,
        executor,
        RecordSettings(tuple(command), split_side="search"),
        [],
    )
    later = candidates // 3
    for count in (candidates - later, later):
        search.try_candidates(count)
    is_timed = search.time_finalists()
    winner = search.find_winner()
    proof = prove_finalists([winner], executor, root, command=command) if winner else None
    record = Search(
        variant=base.name,
        gpu=gpu.name,
        budget=budget,
        incumbent=incumbent,
        sensitivities=tuple(_describe(sensitivities, front)),
        trials=tuple(search.trials),
        is_timed=is_timed,
        winner=winner,
        proof=proof,
        provenance=provenance.of_variant(
            base,
            command,
            started,
            devices=sha256(locate(devices.FILE, root)),
            datasets=provenance.data_digests(gate.files(root), root),
        ),
    )
    return store.write_record(base.folder, record)


def _list_promoted(base: Variant) -> list[Variant]:
    """The promoted variants of a base."""
    found = []
    for name in variants.names(base.root):
        one = variants.load(name, base.root)
        if one.baseline == base.name and store.read_measurements(one.folder).status == "promoted":
            found.append(one)
    return found


def _bound(variant: Variant, front: Front) -> Incumbent:
    """A variant with its bound, by its share of the base's acceptance length that its gate measured."""
    server = ServerSettings.of(find_subject(variant.name, variant.root), None, None)
    judged = judged_by_gate(variant)
    findings = map(Finding.model_validate, store.read_items(judged[0])) if judged else ()
    share = next((each.value for each in findings if _is_share(each) and each.value is not None), 1.0)
    depth = server.depth if front.sensitivities.base_rates else 0
    model = front.model(shapes.variant_shape(variant))
    return Incumbent(
        variant=variant.name,
        tokens_per_second=front.bound(model, depth, share * front.length(depth)),
        acceptance_share=share if depth else None,
    )


def _is_share(finding: Finding) -> bool:
    return finding.gate == "acceptance" and finding.limit > 0


def _describe(sensitivities: Sensitivities, front: Front) -> Iterator[Sensitivity]:
    """What each change costs, and the share of the base's step that it saves with drafts of the gate's depth."""
    depth = front.limits.depth if sensitivities.base_rates else 0
    draft_heads = [each for each in sensitivities.rates if each.choice == "draft_vocabulary"]

    def seconds(changes: Sequence[Change]) -> float:
        return 1 / front.bound(front.model_with(changes), depth, 1.0)

    def saved(change: Change) -> float:
        # Only a draft head of its own can be packed.
        beside = draft_heads[:1] if change.choice == "draft_bits" else []
        return (seconds(beside) - seconds([*beside, change])) / seconds([])

    for change, kl_nats in sensitivities.kl_nats.items():
        yield Sensitivity(change=change.label, kl_nats=kl_nats, acceptance_share=None, saved=saved(change))
    for change in sensitivities.rates:
        share = (1 + sum(sensitivities.rates_with([change])[:depth])) / front.length(depth)
        yield Sensitivity(change=change.label, kl_nats=None, acceptance_share=share, saved=saved(change))
