"""Tables over several records of one or two variants."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from slimqwen import variant as variants
from slimqwen.bench.latency import Latency, speedups
from slimqwen.bench.latency.tables import comparisons
from slimqwen.bench.start_up import StartUp
from slimqwen.evals import acceptance_share, quality, quality_comparison, runaways
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.changed_items import changed_items_table
from slimqwen.evals.checks.quality import find_response_limits
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.quality import Quality
from slimqwen.records import pairing, provenance, store
from slimqwen.records.record import MeasuredCheckpoint, Record
from slimqwen.records.table import Table
from slimqwen.vllm_plugin.patches.table import KNOWN_VERSIONS, PATCHES

_NO_VARIANTS = (
    "None yet: `slimqwen variant new --name base --checkpoint FOLDER` makes one of your model. Those that are shipped, "
    "such as tiny-best, work by their names."
)

Sources = list[tuple[Record, Path]]
"""Records that a table is made from, with their files; functions that yield rows add the records they use."""


def comparison_tables(first: Path, second: Path) -> list[Table]:
    """Tables that compare two variants, from their folders of records: quality with sizes, and latency.

    A note replaces quality or latency if it has not been measured comparably for both.

    Raises:
        MissingRecordError: neither quality nor latency has been measured for both.
        NotComparableError: records exist but cannot be paired.
    """
    tables: list[Table] = []
    missing: list[store.MissingRecordError] = []
    for build in (_quality_comparison, comparisons):
        try:
            tables += build(first, second)
        except store.MissingRecordError as error:
            missing.append(error)
    if not tables:
        raise store.MissingRecordError(
            f"neither quality nor latency of {first.name} and {second.name} was measured comparably; `slimqwen gate "
            f"{second.name}` scores it and its baseline, `slimqwen bench latency {second.name} --against {first.name}` "
            "times both in turns"
        )
    if missing:
        notes = (*tables[-1].notes, *(f"Not shown: {error}." for error in missing))
        tables[-1] = replace(tables[-1], notes=notes)
    return tables


def results_table(path: Path) -> Table:
    """The first table of one record, which its kind defines; by default a row per figure with its interval.

    Raises:
        RecordError: the record cannot be read.
    """
    return store.read_record(path).tables(path)[0]


def results_tables(folder: Path) -> list[Table]:
    """Tables of a variant's latest figures.

    Args:
        folder: the variant's folder of records.

    Raises:
        MissingRecordError: nothing has been measured.
    """
    scored = quality_comparison.largest_record(quality_comparison.current_records(folder))
    newest = [*([scored.path] if scored else []), *_newest_by_workload(folder)]
    if not newest:
        store.latest(folder, Quality)  # raises an error that names the command
    return [results_table(path) for path in newest]


def variants_table(root: Path, *, with_weights: bool = False) -> Table:
    """Table of the shipped variants: hypothesis, baseline, standing and latest figures.

    Args:
        with_weights: whether to add what only this machine has: variants that git does not track, checkpoints, and
            records that are not cited.

    Raises:
        SlimqwenError: a variant or a record cannot be read.
    """
    rows = []
    for name in variants.local_names(root) if with_weights else provenance.shipped_variants(root):
        try:
            variant = variants.load(name, root)
        except variants.ConfigError as error:
            if not with_weights:
                raise
            # Such as one whose base was removed: the others are still listed.
            rows.append((name, f"cannot be read: {error}", "-", "unreadable", "-", "-", "-"))
            continue
        claims = store.read_measurements(variant.folder)
        decided = claims.status in ("promoted", "rejected")
        cited = store.list_only(f"{name}/{record}" for record in claims.records)
        with contextlib.nullcontext() if with_weights else cited:
            figures = _latest_quality(variant.folder), _latest_latency(variant.folder)
        rows.append(
            (
                name,
                variant.hypothesis,
                variant.baseline or "-",
                claims.status if decided else claims.verdict or claims.status,
                *figures,
                *(("yes" if variant.weights.is_dir() else "no",) if with_weights else ()),
            )
        )
    columns: tuple[str, ...] = ("variant", "hypothesis", "baseline", "verdict", "quality", "median E2EL, ms")
    columns = (*columns, "weights here") if with_weights else columns
    notes = () if rows else (_NO_VARIANTS,)
    return Table("Variants", columns, tuple(rows), notes, text_columns=len(columns))


def summary_table(root: Path, baseline: str, name: str, folder: str = "experiments") -> Table:
    """Table of a variant and its baseline: speed, start-up, acceptance length, size, fidelity and quality.

    Other figures than quality come from the newest records of the checkpoints that quality scored; a measure without
    such records has no row.

    Args:
        baseline: name of the baseline.
        name: name of the variant.
        folder: folder with both variants' folders of records, relative to `root`.

    Raises:
        MissingRecordError: one of the two variants has no quality record.
        NotComparableError: quality records exist but cannot be paired.
    """
    folders = (root / folder / baseline, root / folder / name)
    paths = quality_comparison.pair_quality_records(*folders)
    records = [store.read_record(path, Quality) for path in paths]
    first, second = (record.provenance.checkpoint.size_bytes / 1e6 for record in records)
    checkpoints = [record.provenance.checkpoint for record in records]
    sources: Sources = []
    rows = [*_speed_rows(folders, checkpoints, sources)]
    rows += _start_up_rows(folders[1], checkpoints[1], sources)
    rows += _acceptance_rows(folders, checkpoints, sources)
    rows.append(
        ("size on disk, MB", f"{first:.2f}", f"{second:.2f}", f"{first / second:.2f}x smaller", "", "")
    )
    rows += _fidelity_rows(folders[1], baseline, checkpoints[1], sources)
    sources += zip(records, paths, strict=True)
    prefix = f"{records[0].suite}_"
    for row in quality_comparison.compare_quality(*paths):
        rows.append(
            (
                f"{row.task.removeprefix(prefix)}, {quality.MEASURE_NAMES.get(row.measure, row.measure)}",
                f"{row.first:.3f}",
                f"{row.second:.3f}",
                f"{row.difference.value:+.3f} ± {row.difference.standard_error:.3f}",
                f"{row.judgement.verdict} (margin {row.judgement.margin:g})",
                f"{row.difference.count} items{quality_comparison.items_planned(row)}",
            )
        )
    limits = find_response_limits(records[0].suite, root)
    if limits and (responses := runaways.compare_responses(*paths, limits)):
        rows.append(
            (
                "responses that run away",
                *(f"{side.runaway} of {side.count}" for side in (responses.first, responses.second)),
                f"{responses.runaway_growth:+.2%}",
                f"{responses.runaway.verdict} (limit {limits.runaway_share:.0%})",
                f"{responses.items} items ({responses.items_planned:,})",
            )
        )
    notes = (
        quality.TABLE_NOTE,
        quality_comparison.VERDICT_NOTE,
        *_note_builds(name, checkpoints[1], sources),
        *provenance.cpu_notes(*records),
        *provenance.shared_source_notes(*zip(*sources, strict=True)),
    )
    columns = (
        "measure",
        baseline,
        name,
        "change ± SE, or ratio",
        "verdict",
        "sample (items planned)",
    )
    return Table(f"{name} and its baseline {baseline}", columns, tuple(rows), notes)


def _note_builds(name: str, scored: MeasuredCheckpoint, sources: Sources) -> list[str]:
    """Note that names the records of another build of a variant than the one whose quality was scored."""
    measured = [(record.provenance.checkpoint, path) for record, path in sources if record.variant == name]
    other = [path.name for one, path in measured if one and one.compare_build(scored) == "another build"]
    return [f"Measured on another build of {name} than its quality: {', '.join(other)}."] if other else []


def _quality_comparison(first: Path, second: Path) -> list[Table]:
    paths = quality_comparison.pair_quality_records(first, second)
    return [quality_comparison.comparison_table(*paths), *response_tables(*paths, variants.repository_root())]


def response_tables(first: Path, second: Path, root: Path) -> list[Table]:
    """Table of the responses that run away in two quality records.

    Args:
        first, second: files of the two records.
        root: the repository, whose gates have the limits.

    Returns:
        A list with the table; empty if the gate sets no limit or nothing was generated.
    """
    limits = find_response_limits(store.read_record(first, Quality).suite, root)
    table = runaways.responses_table(first, second, limits) if limits else None
    return [table] if table else []


def changed_items(first: Path, second: Path) -> Table | None:
    """Table of the items that changed between two variants, worst first; None if none did.

    Args:
        first, second: the variants' folders of records.

    Raises:
        MissingRecordError: a variant has no quality record.
        NotComparableError: records exist but cannot be paired.
    """
    return changed_items_table(*quality_comparison.pair_quality_records(first, second))


def _newest_by_workload(folder: Path) -> list[Path]:
    """The newest latency record of each workload; the workload `classes` is first."""
    newest: dict[str, Path] = {}
    for path in store.records(folder, Latency):
        newest.setdefault(store.read_record(path, Latency).workload, path)
    return [newest[name] for name in sorted(newest, key=lambda name: (name != "classes", name))]


def _latest_quality(folder: Path) -> str:
    scored = quality_comparison.largest_record(quality_comparison.current_records(folder))
    if scored is None:
        return "-"
    record = scored.record
    return ", ".join(
        f"{task.removeprefix(f'{record.suite}_')} {score.value:.3f}±{score.standard_error:.3f}"
        for task, score in record.tasks.items()
    )


def _latest_latency(folder: Path) -> str:
    newest = _newest_by_workload(folder)
    if not newest:
        return "-"
    record = store.read_record(newest[0], Latency)
    medians = ", ".join(f"{name} {figures.e2el_ms.median:,.0f}" for name, figures in record.classes.items())
    return f"{medians} ({provenance.hardware_name(record.provenance.hardware)})"


def _speed_rows(
    folders: tuple[Path, Path], checkpoints: Sequence[MeasuredCheckpoint], sources: Sources
) -> Iterator[tuple[str, ...]]:
    """Rows of TTFT and TPOT for each prompt class and of the time of all requests, from records timed in turns."""
    try:
        paths = speedups.latency_pair(*folders, "classes")
    except (store.MissingRecordError, pairing.NotComparableError):
        return
    records = [store.read_record(path, Latency) for path in paths]
    timed = [record.provenance.checkpoint for record in records]
    if not all(one.has_recipe_of(scored) for one, scored in zip(timed, checkpoints, strict=True)):
        return
    sources += zip(records, paths, strict=True)
    forms = {
        "ttft_ms": ("TTFT of class {}, ms", ",.1f"),
        "tpot_ms": ("TPOT of class {}, ms", ",.2f"),
        "wall_ms": ("time of {}, ms", ",.0f"),
    }
    for row in speedups.compare_latency(*paths):
        if row.measure in forms and row.rounds and row.speedup and row.interval:
            name, form = forms[row.measure]
            times = f"{row.first:{form}}", f"{row.second:{form}}"
            sample = f"{row.rounds} rounds in turns"
            yield name.format(row.prompt_class), *times, f"{row.ratio} as fast", "", sample


def _acceptance_rows(
    folders: tuple[Path, Path], checkpoints: Sequence[MeasuredCheckpoint], sources: Sources
) -> Iterator[tuple[str, ...]]:
    """Row of both acceptance lengths at the gate's K."""
    try:
        paths = acceptance_share.pair_acceptance_records(*folders, checkpoints)
    except (store.MissingRecordError, pairing.NotComparableError):
        return
    share = acceptance_share.compare_acceptance(*paths)
    records = [store.read_record(path, Acceptance) for path in paths]
    sources += zip(records, paths, strict=True)
    yield (
        f"acceptance length, K={share.depth}",
        f"{share.first:.3f}",
        f"{share.second:.3f}",
        f"{share.ratio.value:.1%} [{share.ratio.low:.1%}, {share.ratio.high:.1%}]",
        f"{share.verdict} (at least {records[1].least_share:.0%})",
        f"{share.groups} groups of prompts",
    )


def _fidelity_rows(
    folder: Path, baseline: str, scored: MeasuredCheckpoint, sources: Sources
) -> Iterator[tuple[str, ...]]:
    """Row of the largest KL divergence over the modes, with the verdict on all fidelity figures."""

    def fits(record: Fidelity) -> bool:
        return record.baseline == baseline and record.provenance.checkpoint.has_recipe_of(scored)

    try:
        path = store.latest(folder, Fidelity, fits)
    except store.MissingRecordError:
        return
    record = store.read_record(path, Fidelity)
    measured = [(each.kl_nats.value, each) for each in record.modes.values() if each.kl_nats]
    if not measured:  # a single text gives no estimate
        return
    sources.append((record, path))
    _, worst = max(measured, key=lambda pair: pair[0])
    limit = f"{record.verdict} (limit {record.limits.kl_nats:g})"
    sample = f"{worst.positions_compared:,} positions"
    yield "KL from the baseline, nats a token", "", f"{worst.kl_nats:.5f}", "", limit, sample


def _start_up_rows(folder: Path, scored: MeasuredCheckpoint, sources: Sources) -> Iterator[tuple[str, ...]]:
    """Row of cold starts and starts from the baked compile cache."""

    def fits(record: StartUp) -> bool:
        started = record.provenance.checkpoint
        is_same = started is not None and started.has_recipe_of(scored)
        return is_same and record.ready_cold_over_baked is not None

    try:
        path = store.latest(folder, StartUp, fits)
    except store.MissingRecordError:
        return
    record = store.read_record(path, StartUp)
    sources.append((record, path))
    cold, baked = record.starts["cold"], record.starts["baked"]
    ratio = record.ready_cold_over_baked
    assert ratio is not None
    yield (
        f"start-up of {folder.name}, s: cold and baked compile cache",
        f"{median(start.ready_seconds for start in cold):.1f}",
        f"{median(start.ready_seconds for start in baked):.1f}",
        f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]",
        "",
        f"{len(baked)} starts each, medians",
    )


def patches_table() -> Table:
    """Table of every patch of vLLM: what goes wrong without it, and its upstream issue or pull request."""
    rows = (
        (
            patch.name,
            ", ".join(patch.devices) + (f", before {patch.fixed_in}" if patch.fixed_in else ""),
            patch.why,
            patch.upstream,
            ", ".join(f"`{place}`" for place in patch.places) or "what vLLM offers to plugins",
            f"`{patch.module.replace('.', '/')}.py`",
        )
        for patch in PATCHES.values()
    )
    columns = (
        "patch",
        "devices",
        "without it",
        "upstream",
        "changes or relies on",
        "file of slimqwen/vllm_plugin",
    )
    versions = (f"{' and '.join(known)} ({device})" for device, known in KNOWN_VERSIONS.items())
    title = f"Patches of vLLM {', '.join(versions)}"
    return Table(title, columns, tuple(rows), text_columns=len(columns))
