"""Tables generated from records: for the terminal, and for Markdown files that are checked against the records.

A Markdown file asks for one with a pair of comments, and everything between them is generated:

    <!-- table:comparison tiny tiny-awq -->
    <!-- end -->
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import rich.box
import rich.table

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import comparison
from slimqwen.evaluation.verdict import Judgement
from slimqwen.records import results, store

_BLOCK = re.compile(
    r"(?P<open><!-- table:(?P<name>[\w-]+)(?P<words>[^\n]*?) -->\n).*?(?P<close><!-- end -->)", re.DOTALL
)
_OPENINGS = re.compile(r"<!-- table:")
_SIGNS = "SE: standard error. Bits per byte: less is better."
_VERDICTS = (
    "Verdict: pass where the interval (an exact one for right and wrong answers) rules out a loss beyond the margin, "
    "which was written down before; an inconclusive one would need the items in brackets."
)
_CPU_NOTE = "Measured on a CPU: no CPU figure is evidence about a GPU."
_MEASURE_NAMES = MappingProxyType(
    {
        "exact_match": "exact match",
        "answer_margin_nats": "margin, nats",
        "bits_per_byte": "bits per byte",
        "ttft_ms": "TTFT",
        "tpot_ms": "TPOT",
        "itl_ms": "ITL",
        "e2el_ms": "E2EL",
    }
)


_FIDELITY_NAMES = MappingProxyType(
    {
        "kl_nats": "KL, nats a token",
        "top1_disagreement": "top-1 disagreement",
        "regret_nats": "regret, nats a token",
        "head_delta_mean": "|Δ log p| of head tokens, mean",
        "head_delta_p99": "|Δ log p| of head tokens, p99",
        "bits_per_byte": "growth of bits per byte",
    }
)


class TableError(SlimqwenError):
    """A Markdown file asks for a table that does not exist, or does not close its block."""


@dataclass(frozen=True)
class Table:
    """Cells ready to be shown; the first `text_columns` columns are text, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: int = 1

    def as_rich(self) -> rich.table.Table:
        """For a terminal."""
        shown = rich.table.Table(
            title=self.title,
            title_justify="left",
            caption="\n".join(self.notes) or None,
            box=rich.box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        shown.caption_justify = "left"
        for number, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if number >= self.text_columns else "left")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def as_markdown(self) -> str:
        """For a README."""
        lines = [
            f"**{self.title}**",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|"
            + "|".join(
                "---:" if number >= self.text_columns else "---" for number in range(len(self.columns))
            )
            + "|",
            *("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in self.rows),
        ]
        return "\n".join([*lines, *(["", *(f"{note}  " for note in self.notes)] if self.notes else []), ""])


def comparison_tables(first: Path, second: Path) -> list[Table]:
    """Two variants' folders -> quality, latency and size, paired.

    Where only one kind has been measured for both, the other is left out with a note.

    Raises:
        MissingRecordError: neither kind has been measured for both.
        NotComparableError: records exist but do not fit.
    """
    tables: list[Table] = []
    missing: list[store.MissingRecordError] = []
    for build in (_quality_comparison, _latency_comparison):
        try:
            tables += build(first, second)
        except store.MissingRecordError as error:
            missing.append(error)
    if not tables:
        raise missing[0]
    if missing:
        notes = (*tables[-1].notes, *(f"Not shown: {error}." for error in missing))
        tables[-1] = replace(tables[-1], notes=notes)
    return tables


def results_table(path: Path) -> Table:
    """The figures of one record, each with its standard error.

    Raises:
        RecordError: the record cannot be read.
    """
    build = {"quality": _quality_results, "latency": _latency_results}[path.name.partition("_")[0]]
    return build(path)


def results_tables(folder: Path) -> list[Table]:
    """The latest figures of the variant whose records lie in the folder.

    Raises:
        MissingRecordError: nothing has been measured.
    """
    newest = [next(store.records(folder, kind), None) for kind in ("quality", "latency")]
    if not any(newest):
        store.latest(folder, "quality")  # raises, and names the command
    return [results_table(path) for path in newest if path]


def variants_table(root: Path, *, experiments: Path | None = None, with_weights: bool = False) -> Table:
    """Every variant: hypothesis, baseline, where it stands, its latest figures.

    Args:
        root: the repository.
        experiments: where the records lie, instead of experiments/.
        with_weights: adds whether the checkpoint is on this machine: not for files that are committed.

    Raises:
        SlimqwenError: a variant or a record cannot be read.
    """
    rows = []
    for name in variants.names(root):
        variant = variants.load(name, root)
        stands = store.read_measurements(variant.folder)
        folder = (experiments or root / "experiments") / name
        rows.append(
            (
                name,
                variant.hypothesis,
                variant.baseline or "-",
                stands["verdict"] or stands["status"],
                _latest_quality(folder),
                _latest_latency(folder),
                *(("yes" if variant.weights.is_dir() else "no",) if with_weights else ()),
            )
        )
    columns: tuple[str, ...] = ("variant", "hypothesis", "baseline", "verdict", "quality", "median E2EL, ms")
    columns = (*columns, "weights here") if with_weights else columns
    return Table("Variants", columns, tuple(rows), text_columns=len(columns))


def summary_table(root: Path, baseline: str, name: str) -> Table:
    """What a variant came to against its baseline, a line a measure: size, quality, acceptance length, start-up.

    Acceptance is that of `results/draft_depth_*.json`, start-up that of `results/start_up_<name>.json`; where there
    is no such record of the checkpoint that was scored, there is no such line.

    Raises:
        MissingRecordError: no quality record of one of the two.
        NotComparableError: quality records exist but do not fit.
    """
    paths = comparison.quality_pair(root / "experiments" / baseline, root / "experiments" / name)
    records = [store.read(path) for path in paths]
    first, second = (record["provenance"]["checkpoint"]["size_bytes"] / 1e6 for record in records)
    rows: list[tuple[str, ...]] = [
        ("size on disk, MB", f"{first:.2f}", f"{second:.2f}", f"{first / second:.2f}x smaller", "", "")
    ]
    prefix = f"{records[0]['suite']}_"
    for row in comparison.compare_quality(*paths):
        rows.append(
            (
                f"{row.task.removeprefix(prefix)}, {_MEASURE_NAMES.get(row.measure, row.measure)}",
                f"{row.first:.3f}",
                f"{row.second:.3f}",
                f"{row.difference.value:+.3f} ± {row.difference.standard_error:.3f}",
                f"{row.judgement.verdict} (margin {row.judgement.margin:g})",
                f"{row.difference.count} items{_needed(row.judgement)}",
            )
        )
    sources = [_source(path) for path in paths]
    scored = {record["variant"]: record["provenance"]["checkpoint"]["digest"] for record in records}
    for more_rows, more_sources in (_acceptance_rows(root, scored), _start_up_rows(root, name, scored[name])):
        rows += more_rows
        sources += more_sources
    on_cpu = any(not record["provenance"]["hardware"]["gpus"] for record in records)
    notes = (_SIGNS, _VERDICTS, *((_CPU_NOTE,) if on_cpu else ()), *sources)
    columns = ("measure", baseline, name, "change ± SE, or ratio", "verdict", "of (needed)")
    return Table(f"{name} and its baseline {baseline}", columns, tuple(rows), notes)


def rewrite(text: str, build: Callable[[str, list[str]], str]) -> str:
    """The same Markdown with every table block filled by `build(name, words)`.

    Raises:
        TableError: a block is not closed by `<!-- end -->`.
    """
    if len(_OPENINGS.findall(text)) != len(_BLOCK.findall(text)):
        raise TableError("a <!-- table:… --> comment lacks its <!-- end -->")
    return _BLOCK.sub(lambda m: m["open"] + build(m["name"], m["words"].split()) + m["close"], text)


def build_markdown(root: Path, name: str, words: list[str]) -> str:
    """One block's content.

    Raises:
        TableError: no table of that name takes these words.
        SlimqwenError: a record that it needs is missing or damaged.
    """
    builders: Mapping[tuple[str, int], Callable[..., Iterable[Table]]] = {
        ("variants", 0): lambda: [variants_table(root)],
        ("results", 1): lambda name: results_tables(root / "experiments" / name),
        ("fidelity", 1): lambda name: fidelity_tables(store.latest(root / "experiments" / name, "fidelity")),
        ("summary", 2): lambda baseline, name: [summary_table(root, baseline, name)],
        ("comparison", 2): lambda a, b: comparison_tables(root / "experiments" / a, root / "experiments" / b),
    }
    build = builders.get((name, len(words)))
    if build is None:
        raise TableError(
            f"no table {' '.join([name, *words])!r}; there is: variants, results VARIANT, comparison A B, "
            "summary BASELINE VARIANT, fidelity VARIANT"
        )
    return "\n".join(table.as_markdown() for table in build(*words))


def markdown_files(root: Path) -> list[Path]:
    """The files whose table blocks are generated."""
    return [
        file
        for pattern in ("README.md", "docs/**/*.md", "experiments/*/README.md")
        for file in sorted(root.glob(pattern))
    ]


def outdated(root: Path) -> dict[Path, str]:
    """Files whose tables differ from what the records generate -> what they should contain.

    Raises:
        TableError: names the file with a bad block.
        SlimqwenError: a record is missing or damaged.
    """
    wrong = {}
    for file in markdown_files(root):
        text = file.read_text(encoding="utf-8")
        try:
            fresh = rewrite(text, lambda name, words: build_markdown(root, name, words))
        except TableError as error:
            raise TableError(f"{file.relative_to(root)}: {error}") from error
        if fresh != text:
            wrong[file] = fresh
    return wrong


def fidelity_tables(path: Path) -> list[Table]:
    """A fidelity record: each figure beside the noise of the baseline against itself, then what each stage added.

    Raises:
        RecordError: the record cannot be read.
    """
    record = store.read(path)
    floor_path = next(store.records(path.parent.parent / record["baseline"], "fidelity"), None)
    floor = store.read(floor_path)["modes"] if floor_path else None
    rows = [
        (
            _FIDELITY_NAMES[name],
            mode,
            _estimate(figures[name]),
            _estimate(floor[mode][name]) if floor else "-",
            f"{record['limits'][name]:g}",
            record["verdicts"][mode][name],
        )
        for name in _FIDELITY_NAMES
        for mode, figures in record["modes"].items()
    ]
    rows += [
        (
            "KL of the texts joined, nats a token",
            mode,
            f"{figures['joined_kl_nats']:.5f}",
            f"{floor[mode]['joined_kl_nats']:.5f}"
            if floor and floor[mode]["joined_kl_nats"] is not None
            else "-",
            f"{record['limits']['kl_nats']:g}",
            record["verdicts"][mode]["joined_kl_nats"],
        )
        for mode, figures in record["modes"].items()
        if figures["joined_kl_nats"] is not None
    ]
    single = next(iter(record["modes"].values()))
    compared = (
        f"{single['positions_compared']:,} positions of {single['texts_compared']} of {single['texts']} texts; "
        "bits per byte of all texts. Noise: the baseline's weights in vLLM against themselves in transformers."
    )
    tables = [
        Table(
            f"Fidelity of {record['variant']} to {record['baseline']}: {record['verdict']}",
            ("figure", "read", "value ± SE", "noise ± SE", "limit", "verdict"),
            tuple(rows),
            (compared, *dict.fromkeys(_source(one) for one in (path, floor_path) if one)),
            text_columns=2,
        )
    ]
    if record["stages"]:
        names = tuple(_FIDELITY_NAMES)
        tables.append(
            Table(
                f"Fidelity of {record['variant']} after each stage of its recipe",
                ("stage", *(_FIDELITY_NAMES[name] for name in names)),
                tuple((row["stage"], *(_estimate(row[name]) for name in names)) for row in record["stages"]),
                (_source(path),),
            )
        )
    return tables


def _quality_comparison(first: Path, second: Path) -> list[Table]:
    paths = comparison.quality_pair(first, second)
    a, b = (store.read(path) for path in paths)
    rows = [
        (
            row.task.removeprefix(f"{a['suite']}_"),
            _MEASURE_NAMES.get(row.measure, row.measure),
            f"{row.first:.3f}",
            f"{row.second:.3f}",
            f"{row.difference.value:+.3f} ± {row.difference.standard_error:.3f}",
            _interval(row),
            _p_value(row.discordance.p_value) if row.discordance else "-",
            f"{row.judgement.margin:g}",
            str(row.judgement.verdict),
            f"{row.difference.count}{_needed(row.judgement)}",
        )
        for row in comparison.compare_quality(*paths)
    ]
    columns = (
        "task", "measure", a["variant"], b["variant"],
        "change ± SE", "95 % interval", "p", "margin", "verdict", "items (need)",
    )  # fmt: skip
    sizes = [record["provenance"]["checkpoint"]["size_bytes"] for record in (a, b)]
    size = f"Checkpoints on disk: {sizes[0] / 1e6:,.1f} MB and {sizes[1] / 1e6:,.1f} MB, {sizes[0] / sizes[1]:.2f}x."
    title = f"Quality: {a['variant']} and {b['variant']}, paired by item"
    return [
        Table(
            title,
            columns,
            tuple(rows),
            (size, f"{_SIGNS} p: McNemar's, exact.", _VERDICTS, *(_source(path) for path in paths)),
            text_columns=2,
        )
    ]


def _latency_comparison(first: Path, second: Path) -> list[Table]:
    paths = comparison.latency_pair(first, second)
    a, b = (store.read(path) for path in paths)
    rows = [
        (
            f"{row.prompt_class} {row.prompt_tokens} -> {row.output_tokens}",
            _MEASURE_NAMES[row.measure],
            f"{row.first_ms:,.1f}",
            f"{row.second_ms:,.1f}",
            f"{row.speedup.value:.2f}x",
            f"{row.speedup.low:.2f} to {row.speedup.high:.2f}",
            str(min(r["classes"][row.prompt_class]["request_count"] for r in (a, b))),
        )
        for row in comparison.compare_latency(*paths)
    ]
    columns = (
        "class, tokens", "median", f"{a['variant']}, ms", f"{b['variant']}, ms",
        f"speed-up of {b['variant']}", "95 % interval", "requests",
    )  # fmt: skip
    paired = "in turns" if a["run"] == b["run"] else "one after the other, not in turns"
    notes = [f"On {_hardware(a)}, {paired}; intervals by bootstrap over requests."]
    if not a["provenance"]["hardware"]["gpus"]:
        notes.append(_CPU_NOTE)
    title = f"Latency: {a['variant']} and {b['variant']}"
    return [Table(title, columns, tuple(rows), (*notes, *(_source(path) for path in paths)), text_columns=2)]


def _quality_results(path: Path) -> Table:
    record = store.read(path)
    rows = [
        (
            task.removeprefix(f"{record['suite']}_"),
            _MEASURE_NAMES.get(row["measure"], row["measure"]),
            f"{row['value']:.3f} ± {row['standard_error']:.3f}",
            f"{row['item_count']} of {row['available_count']}",
            "-" if row["truncated_count"] is None else str(row["truncated_count"]),
            "-" if row["empty_count"] is None else str(row["empty_count"]),
        )
        for task, row in record["tasks"].items()
    ]
    columns = ("task", "measure", "score ± SE", "items", "cut short", "empty")
    return Table(
        f"Quality of {record['variant']}", columns, tuple(rows), (_SIGNS, _source(path)), text_columns=2
    )


def _latency_results(path: Path) -> Table:
    record = store.read(path)
    measures = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    rows = [
        (
            f"{name} {row['prompt_tokens']} -> {row['output_tokens']}",
            *(f"{row[m]['mean']:,.1f} ± {row[m]['standard_error']:,.1f}" for m in measures),
            f"{row['output_throughput_tokens_per_s']:,.0f}",
            f"{row['acceptance']['length']:.2f}" if row["acceptance"] else "-",
            f"{row['request_count']} ({row['failure_count']} failed)",
        )
        for name, row in record["classes"].items()
    ]
    columns = (
        "class, tokens", *(f"{_MEASURE_NAMES[m]}, ms" for m in measures),
        "output tokens/s", "acceptance length", "requests",
    )  # fmt: skip
    notes = [f"Means ± standard errors, on {_hardware(record)}."]
    if not record["provenance"]["hardware"]["gpus"]:
        notes.append(_CPU_NOTE)
    return Table(f"Latency of {record['variant']}", columns, tuple(rows), (*notes, _source(path)))


def _latest_quality(folder: Path) -> str:
    path = next(store.records(folder, "quality"), None)
    if path is None:
        return "-"
    record = store.read(path)
    prefix = f"{record['suite']}_"
    return ", ".join(
        f"{task.removeprefix(prefix)} {row['value']:.3f}±{row['standard_error']:.3f}"
        for task, row in record["tasks"].items()
    )


def _latest_latency(folder: Path) -> str:
    path = next(store.records(folder, "latency"), None)
    if path is None:
        return "-"
    record = store.read(path)
    figures = ", ".join(f"{name} {row['e2el_ms']['median']:,.0f}" for name, row in record["classes"].items())
    return f"{figures} ({_hardware(record)})"


def _hardware(record: store.Record) -> str:
    hardware = record["provenance"]["hardware"]
    if hardware["gpus"]:
        return ", ".join(gpu["name"] for gpu in hardware["gpus"])
    return f"{hardware['cpu_count']} CPUs of {hardware['cpu_model']}"


def _source(path: Path) -> str:
    record = store.read(path)
    vllm = record["provenance"]["packages"].get("vllm", "?")
    return (
        f"{record['variant']}/{path.name}: {_command_and_commit(record)}, vLLM {vllm}, {_hardware(record)}."
    )


def _command_and_commit(record: store.Record) -> str:
    known = record["provenance"]
    commit = (known["git"]["commit"] or "none")[:10] + ("+changes" if known["git"]["dirty"] else "")
    return f"`{known['command']}`, commit {commit}"


def _acceptance_rows(root: Path, scored: Mapping[str, str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The deepest K at which both checkpoints, given by variant and digest, were counted, and where that is from."""
    first, second = (_of_checkpoint(root, "draft_depth", name, digest) for name, digest in scored.items())
    if first is None or second is None:
        return [], []
    a, b = ({row["depth"]: row for row in record["depths"]} for record in (first, second))
    both = sorted(a.keys() & b.keys())
    if not both:
        return [], []
    before, after = a[both[-1]], b[both[-1]]
    lengths = before["acceptance_length"], after["acceptance_length"]
    row = (
        f"acceptance length, K={both[-1]}",
        *(f"{length:.3f}" for length in lengths),
        f"{lengths[1] / lengths[0]:.1%}",
        "",
        f"{before['drafts']} and {after['drafts']} drafts",
    )
    return [row], [_result_source("draft_depth", record) for record in (first, second)]


def _start_up_rows(root: Path, name: str, digest: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """Cold starts against starts from the baked compile cache, and where that is from."""
    record = _of_checkpoint(root, "start_up", name, digest)
    if record is None:
        return [], []
    cold, baked = (median(start["ready_seconds"] for start in record[kind]) for kind in ("cold", "baked"))
    ratio = record["ready_cold_over_baked"]
    row = (
        f"start-up of {name}, s: cold and baked compile cache",
        f"{cold:.1f}",
        f"{baked:.1f}",
        f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]",
        "",
        f"{len(record['baked'])} starts each, medians",
    )
    return [row], [_result_source("start_up", record)]


def _estimate(found: Mapping[str, Any] | None) -> str:
    return f"{found['value']:.5f} ± {found['standard_error']:.5f}" if found else "-"


def _of_checkpoint(root: Path, exploration: str, name: str, digest: str) -> dict[str, Any] | None:
    """The record of an exploration, if it is of this very checkpoint."""
    record = results.read(root, exploration, name)
    return record if record is not None and record["provenance"]["checkpoint"] == digest else None


def _result_source(name: str, record: dict[str, Any]) -> str:
    return f"results/{name}_{record['variant']}.json: {_command_and_commit(record)}, {_hardware(record)}."


def _interval(row: comparison.QualityRow) -> str:
    """The interval that the verdict rests on, of the difference and not of the gain."""
    low, high = row.judgement.low, row.judgement.high
    if not row.higher_is_better:
        low, high = -high, -low
    return f"{low:+.3f} to {high:+.3f}"


def _needed(judgement: Judgement) -> str:
    """The items that an inconclusive verdict lacks."""
    return f" ({judgement.items_needed:,})" if judgement.items_needed else ""


def _p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"
