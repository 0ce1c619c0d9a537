"""The correctness matrix: a variant's greedy tokens in each combination of engine modes against the plain engine's.

The plain engine has the same checkpoint and nothing that could change its answers: no MTP, no prefix caching, no
chunks, no compilation, the model's own KV cache dtype, one request at a time. Each combination runs in a process of its
own, so that a crash of vLLM is a finding. A combination that changes a token, far from a tie, or crashes goes into
eval/unsafe_engines.json, which `slimqwen.serving.launch` obeys; one that is fine again is taken out.
"""

import contextlib
import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.evaluation import engine_scenarios
from slimqwen.evaluation.answers import kept, unfinished
from slimqwen.evaluation.engine_scenarios import Answer, EngineMatrixError, Mode, Plan, Request, Run
from slimqwen.evaluation.verdict import Verdict
from slimqwen.progress import Progress, silent
from slimqwen.recipe import worker
from slimqwen.records import provenance, store
from slimqwen.serving import compile_watch, launch, unsafe_engines
from slimqwen.serving import platform as machine
from slimqwen.serving.unsafe_engines import Modes
from slimqwen.variant import Variant


class State(StrEnum):
    """What a combination of modes was found to be."""

    FINE = "fine"
    UNSAFE = "unsafe"
    NOT_AVAILABLE = "not available"


@dataclass(frozen=True)
class Cell:
    """A combination of modes.

    Attributes:
        flags: vLLM's, by name without dashes.
        served: it is what the variant is served with.
        mixed: it has to answer the mixed requests too.
        refusal: why this platform or vLLM's configuration does not have it, None where they do.
    """

    modes: Modes
    flags: Mapping[str, Any]
    served: bool
    mixed: bool
    refusal: str | None = None


@dataclass(frozen=True)
class Reference:
    """What every combination is asked and compared with; requests and answers by group, in the same order."""

    cells: list[Cell]
    requests: Mapping[str, list[Request]]
    answers: Mapping[str, list[Answer]]


@dataclass(frozen=True)
class Comparison:
    """A reply held against the plain engine's.

    Attributes:
        same: how many tokens are the same before the first that is not.
        gap_nats: how much less likely the plain engine finds the other token there; None where it is none of the
            likeliest, or where nothing differs.
        near_tie: it differs where either token is right.
    """

    same: int
    differs: bool
    near_tie: bool
    gap_nats: float | None


@dataclass(frozen=True)
class _Task:
    """What the process of the plain engine is told."""

    plan: Plan
    flags: Mapping[str, Any]
    platform: machine.Platform
    context: int
    root: Path


def measure(one: Variant, plan_name: str, *, command: Sequence[str], progress: Progress = silent) -> Path:
    """Try a variant in every combination of modes, write its record, and bring eval/unsafe_engines.json up to date.

    Combinations that an interrupted run has tried are not tried again.

    Args:
        one: the variant.
        plan_name: of eval/engine/.
        command: the command that asked for it, for the record.
        progress: hears the scenarios done of each combination.

    Returns:
        The record's path.

    Raises:
        EngineMatrixError: the plan does not fit the variant, the plain engine fails, or a worker was killed.
        RunInProgressError: another process is at the same run.
        SlimqwenError: weights are missing, or a line of its config.env is wrong.
    """
    started = provenance.utc_now()
    plan = engine_scenarios.load_plan(plan_name, one.root)
    checkpoint.check(one.weights, variants.making_command(one.weights, one.root))
    served = launch.resolve(one)
    if served.platform != machine.detect():
        raise launch.PlatformError(f"{one.name} needs a GPU and there is none here; check it on a GPU host")
    log = one.root / "logs" / f"engine_{one.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    build = unsafe_engines.build(one.weights, served.platform)
    beginning = _Task(plan, dict(served.flags), served.platform, served.max_model_len, one.root)
    with _naming("the plain engine", progress) as heard:
        plain = apart(
            _answer_plainly, one.weights, beginning, _environment(served, None), plan.timeout_s, log, heard
        )
    if isinstance(plain, str):
        raise EngineMatrixError(
            f"{one.name}: the plain engine fails ({plain}); nothing can be compared with it: {log}"
        )
    reference: Reference = plain
    rows: list[dict[str, Any]] = []
    # The plain engine's own come first, as the cell 0.
    items: list[dict[str, Any]] = [
        {"cell": 0, "group": group, "request": number, "tokens": list(answer.tokens)}
        for group, answers in reference.answers.items()
        for number, answer in enumerate(answers)
    ]
    with kept(unfinished("engine", served, plan.model_dump(mode="json"))) as tried:
        for number, cell in enumerate(reference.cells, start=1):
            name = f"{number}/{len(reference.cells)} {cell.modes}"
            found = tried.get(cell.modes.model_dump())
            if found is None:
                found = _try(cell, reference, one, served, plan, _naming(name, progress), log)
                tried.keep(cell.modes.model_dump(), found)
            row, compared = found
            rows.append(row)
            items += [{"cell": number, **item} for item in compared]
        record = {
            "schema": "engine/1",
            "variant": one.name,
            "plan": plan_name,
            "build": build.model_dump(),
            "near_tie_nats": plan.near_tie_nats,
            "cells": rows,
            "provenance": provenance.describe(
                root=one.root,
                command=command,
                started=started,
                flags=served.flags,
                environment=served.environment,
                weights=one.weights,
                datasets=[one.root / "eval" / "engine" / f"{plan_name}.yaml"],
                seeds={"prompts": plan.seed},
                server="started",
            ),
        }
        path = store.write(one.folder, record, items)
        shown = provenance.portable(str(path), one.root)
        of = {state: [row for row in rows if row["state"] == state] for state in State}
        unsafe_engines.update(
            one.root,
            build,
            unsafe=[
                unsafe_engines.Finding(
                    build=build, modes=Modes(**row["modes"]), reason=row["reason"], record=shown
                )
                for row in of[State.UNSAFE]
            ],
            fine=[Modes(**row["modes"]) for row in of[State.FINE]],
        )
        tried.discard()
    return path


def _try(
    cell: Cell,
    reference: Reference,
    one: Variant,
    served: launch.ServerCommand,
    plan: Plan,
    naming: contextlib.AbstractContextManager[Progress],
    log: Path,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Have an engine of its own answer in a combination of modes: its row and items."""
    began = time.monotonic()
    run: Run | str | None = None
    if cell.refusal is None:
        asked = {group: some for group, some in reference.requests.items() if cell.mixed or group != "mixed"}
        task = (cell.modes, cell.flags, asked)
        environment = _environment(served, cell)
        with naming as heard:
            run = apart(engine_scenarios.play, one.weights, task, environment, plan.timeout_s, log, heard)
    row, compared = judge(cell, run, reference.answers, plan.near_tie_nats)
    return {**row, "seconds": round(time.monotonic() - began, 1)}, compared


def verdict(record: store.Record) -> Verdict:
    """What a record says of the variant as it is served: of its own modes, at its concurrency and below.

    Inconclusive where its own combination could not be tried.
    """
    served = next(row for row in record["cells"] if row["served"])
    met = [
        row["state"]
        for row in record["cells"]
        if unsafe_engines.covers(served["modes"], Modes(**row["modes"]))
    ]
    if State.UNSAFE in met:
        return Verdict.FAIL
    return Verdict.PASS if served["state"] == State.FINE else Verdict.INCONCLUSIVE


def compare(answer: Answer, tokens: Sequence[int], near_tie_nats: float) -> Comparison:
    """Hold tokens against the plain engine's; what follows a first difference says nothing more."""
    pairs = enumerate(zip(answer.tokens, tokens, strict=False))
    same = next((place for place, (plain, other) in pairs if plain != other), None)
    if same is None:
        shorter = min(len(answer.tokens), len(tokens))
        return Comparison(shorter, len(answer.tokens) != len(tokens), False, None)
    likeliest = answer.log_probabilities[same]
    other = likeliest.get(tokens[same])
    gap = None if other is None else likeliest[answer.tokens[same]] - other
    return Comparison(same, True, gap is not None and gap < near_tie_nats, gap)


def judge(
    cell: Cell, run: Run | str | None, answers: Mapping[str, Sequence[Answer]], near_tie_nats: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A combination's row of the record, without its seconds, and an item for each reply; tokens where they differ.

    Args:
        cell: the combination.
        run: what it did; the reason where it broke down, None where it is not available.
        answers: the plain engine's, by group.
        near_tie_nats: of the plan.
    """
    row: dict[str, Any] = {
        "modes": cell.modes.model_dump(),
        "served": cell.served,
        "state": State.FINE,
        "reason": None,
        "items": 0,
        "near_ties": 0,
        "tokens_compared": 0,
        "drafts": 0,
        "accepted_drafts": 0,
        "prefix_hits": 0,
        "preemptions": None,
        "aborted": 0,
        "notes": [],
    }
    if run is None:
        return row | {"state": State.NOT_AVAILABLE, "reason": cell.refusal}, []
    if isinstance(run, str):
        return row | {"state": State.UNSAFE, "reason": run}, []
    items: list[dict[str, Any]] = []
    wrong = []
    for reply in run.replies:
        found = compare(answers[reply.group][reply.number], reply.tokens, near_tie_nats)
        item = {"scenario": reply.scenario, "group": reply.group, "request": reply.number}
        items.append(
            item | dataclasses.asdict(found) | {"tokens": list(reply.tokens) if found.differs else None}
        )
        if found.differs and not found.near_tie:
            wrong.append((reply, found))
    row |= {
        "items": len(items),
        "near_ties": sum(item["near_tie"] for item in items),
        "tokens_compared": sum(item["same"] for item in items),
        **{
            name: getattr(run, name)
            for name in ("drafts", "accepted_drafts", "prefix_hits", "preemptions", "aborted", "notes")
        },
    }
    if wrong:
        reply, found = wrong[0]
        how = "beyond the likeliest" if found.gap_nats is None else f"{found.gap_nats:.2f} nats less likely"
        row |= {
            "state": State.UNSAFE,
            "reason": f"{len(wrong)} of {len(items)} answers differ; first {reply.scenario}, request {reply.number}, "
            f"token {found.same} ({how})",
        }
    return row, items


def cells(
    plan: Plan,
    served: Modes,
    flags: Mapping[str, Any],
    platform: machine.Platform,
    context: int,
    *,
    has_mtp: bool,
) -> list[Cell]:
    """The combinations that a plan asks for, the served one first, none twice.

    Args:
        plan: which modes are crossed.
        served: the variant's own modes.
        flags: its flags by name, max-num-batched-tokens among them.
        platform: with its graph modes and its table of what a CPU lacks.
        context: tokens, the budget of a prefill that is not cut.
        has_mtp: the checkpoint has an MTP head.
    """
    graph_modes = get_args(unsafe_engines.GraphMode)[: 2 if platform == "cpu" else 3]
    values: dict[Mode, Sequence[Any]] = {
        "draft_tokens": (0, served.draft_tokens or plan.draft_tokens),
        "prefix_caching": (False, True),
        "kv_cache_dtype": list(dict.fromkeys([served.kv_cache_dtype, *plan.kv_cache_dtypes])),
        "chunked_prefill": (True, False),
        "concurrency": (1, served.concurrency if served.concurrency > 1 else plan.concurrency),
        "graphs": graph_modes,
    }
    wanted = [served]
    for group in plan.crossed:
        for chosen in itertools.product(*(values[mode] for mode in group)):
            wanted.append(served.model_copy(update=dict(zip(group, chosen, strict=True))))
    found = []
    for modes in dict.fromkeys(wanted):
        its_flags = _flags(modes, served, flags, plan, platform, context)
        refusal = None
        if modes.draft_tokens and not has_mtp:
            refusal = "the checkpoint has no MTP head"
        elif platform == "cpu":
            refusal = next(
                (
                    row.why
                    for row in machine.GPU_ONLY
                    if row.flag in its_flags and row.applies(its_flags[row.flag], its_flags)
                ),
                None,
            )
        as_served = modes.model_copy(update={"concurrency": served.concurrency}) == served
        mixed = modes == served or (as_served and modes.concurrency > 1)
        found.append(Cell(modes, its_flags, modes == served, mixed, refusal))
    return found


def _flags(
    modes: Modes,
    served: Modes,
    flags: Mapping[str, Any],
    plan: Plan,
    platform: machine.Platform,
    context: int,
) -> dict[str, Any]:
    """A variant's flags with other modes; what is no mode stays, but what belongs to a mode that changed."""
    changed = {
        **flags,
        "enable-prefix-caching": modes.prefix_caching,
        "kv-cache-dtype": modes.kv_cache_dtype,
        "enable-chunked-prefill": modes.chunked_prefill,
        "max-num-seqs": modes.concurrency,
        "enforce-eager": modes.graphs == "eager",
        "max-model-len": context,
    }
    if modes.draft_tokens != served.draft_tokens:
        changed["speculative-config"] = {"method": "mtp", "num_speculative_tokens": modes.draft_tokens}
    if not modes.draft_tokens:
        changed.pop("speculative-config", None)
    if not modes.chunked_prefill:
        changed["max-num-batched-tokens"] = max(context, flags["max-num-batched-tokens"])
    if (modes.draft_tokens, modes.concurrency) != (served.draft_tokens, served.concurrency):
        changed.pop("cudagraph-capture-sizes", None)
    if platform == "cuda" and modes.graphs != served.graphs:
        compilation = dict(flags.get("compilation-config") or {})
        compilation.pop("cudagraph_mode", None)
        changed["compilation-config"] = compilation | (
            {"cudagraph_mode": "NONE"} if modes.graphs == "compiled" else {}
        )
    return changed


def _environment(served: launch.ServerCommand, cell: Cell | None) -> dict[str, str]:
    """Of a worker: the server's, but with a compile cache that combinations share."""
    environment = served.process_environment()
    environment.pop(compile_watch.VARIABLE, None)
    if cell is not None and cell.modes.graphs != "eager":
        # vLLM's own key has left the draft depth out before.
        root = served.variant.root / ".cache" / f"{served.variant.name}-engines-{cell.modes.draft_tokens}"
        environment |= {
            "VLLM_CACHE_ROOT": str(root / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        }
    return environment


@contextlib.contextmanager
def _naming(name: str, progress: Progress) -> Iterator[Progress]:
    """The progress of one engine under one name, whichever scenario it is at."""
    progress(name, 0, 0)
    last = [1.0]

    def heard(scenario: str, done: float, total: float) -> None:
        last[0] = total
        progress(name, done, total)

    yield heard
    progress(name, last[0], last[0])


def apart(
    function: Callable[..., Any],
    weights: Path,
    task: Any,
    environment: Mapping[str, str],
    timeout_s: float,
    log: Path,
    progress: Progress,
) -> Any:
    """Call function(weights, folder, task, progress) in a process of its own, by `slimqwen.recipe.worker`.

    The function has to tell its progress before it does anything else: a process that ends before is no finding.

    Returns:
        what it returns; one line of text where it raised, crashed or hung.

    Raises:
        EngineMatrixError: it did not begin, or was killed from outside, as by the kernel where memory runs out.
        SlimqwenError: that it raised.
    """
    scenario = None
    deadline = time.monotonic() + timeout_s
    with log.open("ab") as output, worker.started(environment, output) as (process, messages):
        try:
            worker.give(process, function, weights, log.parent, task)
            while messages.poll(max(0.0, deadline - time.monotonic())):
                kind, *content = messages.recv()
                if kind == "progress":
                    scenario = content[0]
                    progress(*content)
                elif kind == "refused":
                    raise content[0]
                elif kind == "failed":
                    return f"{scenario}: {content[0][:300]}"
                else:
                    worker.wait_for_end(process)
                    return content[0]
            return f"{scenario or 'starting'}: no end within {timeout_s:.0f} s"
        except (EOFError, BrokenPipeError):
            exit_code = process.wait()
            if exit_code == -signal.SIGKILL:
                raise EngineMatrixError(
                    f"the process of an engine was killed ({scenario}), as when memory runs out; free some and run "
                    f"again: {log}"
                ) from None
            died = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
            if scenario is None:
                raise EngineMatrixError(f"the process of an engine did not begin ({died}): {log}") from None
            return f"{scenario}: the process died ({died})"


def _answer_plainly(weights: Path, _: Path, task: _Task, progress: Progress) -> Reference:
    """In a process of its own: form the combinations, cut the prompts, and answer them by the plain engine.

    Raises:
        EngineMatrixError: the prompts do not fit the context.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    progress("starting", 0, 0)

    def configured(flags: Mapping[str, Any]) -> Any:
        engine_arguments = EngineArgs(model=str(weights), **engine_scenarios.arguments(flags))
        return engine_arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)

    # What the flags leave to vLLM, as its server would choose.
    config = configured(task.flags)
    chosen = {
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "concurrency": config.scheduler_config.max_num_seqs,
    }
    given = unsafe_engines.served_modes(task.flags, task.platform)
    served = Modes(**{name: chosen[name] if value is None else value for name, value in given.items()})
    budget = task.flags.get("max-num-batched-tokens") or config.scheduler_config.max_num_batched_tokens
    flags = {**task.flags, "max-num-batched-tokens": budget}
    has_mtp = bool(checkpoint.text_config(checkpoint.read_config(weights)).get("mtp_num_hidden_layers"))
    wanted = []
    for cell in cells(task.plan, served, flags, task.platform, task.context, has_mtp=has_mtp):
        refusal = cell.refusal
        if refusal is None:
            try:
                configured(cell.flags)
            except (ValueError, NotImplementedError, AssertionError) as error:
                said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                refusal = f"vLLM refuses it: {' '.join(said.split())[:200]}"
        wanted.append(dataclasses.replace(cell, refusal=refusal))
    several = served.concurrency if served.concurrency > 1 else task.plan.concurrency
    plain = Modes(
        draft_tokens=0,
        prefix_caching=False,
        kv_cache_dtype="auto",
        # vLLM does not vouch for this model without; with a budget of the whole context it never cuts a prompt.
        chunked_prefill=True,
        concurrency=1,
        graphs="eager",
    )
    plain_flags = _flags(plain, served, flags, task.plan, task.platform, task.context)
    answers: dict[str, list[Answer]] = {}
    with engine_scenarios.engine(
        weights, plain_flags, max_num_batched_tokens=max(task.context, budget)
    ) as llm:
        requests = engine_scenarios.cut_requests(
            task.plan,
            weights,
            task.root,
            context=task.context,
            budget=budget,
            block=engine_scenarios.block_tokens(llm),
            draft_tokens=served.draft_tokens or task.plan.draft_tokens,
            concurrency=several,
        )
        total, done = sum(map(len, requests.values())), 0
        for group, asked in requests.items():
            answers[group] = []
            for request in asked:
                progress(f"answering {group}", done, total)
                answers[group] += engine_scenarios.replay(llm, [request], log_probabilities=True)
                done += 1
    return Reference(wanted, requests, answers)
