"""Tables generated from records: for the terminal, and for Markdown files that are checked against the records.

A Markdown file asks for one with a pair of comments, and everything between them is generated:

    <!-- table:comparison tiny tiny-awq -->
    <!-- end -->
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import rich.box
import rich.table
from rich.markup import escape

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import acceptance_share, comparison, first_request, start_up
from slimqwen.evaluation.verdict import Judgement
from slimqwen.evaluation.workload import DEFAULT_COLUMNS
from slimqwen.records import provenance, results, store

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
        "wall_ms": "time of all requests",
        "output_throughput_tokens_per_s": "output tokens/s",
        "goodput_per_s": "good requests/s",
    }
)

_COLUMN_NAMES = MappingProxyType(
    {
        "request_throughput_per_s": "requests/s",
        "output_throughput_tokens_per_s": "output tokens/s",
        "total_throughput_tokens_per_s": "all tokens/s",
        "goodput_per_s": "good requests/s",
        "good_share": "good",
        "rate_per_s": "arrivals/s",
        "concurrency": "in flight",
        "acceptance_length": "acceptance length",
        "prefix_hits": "found in the cache",
        "repeat_speedup": "TTFT of the first time / of this [95 %]",
    }
)
"""The figures of a class that a workload may ask for beside `<measure>.<statistic>`."""

_WIDEST = 10
"""Columns of a table that a terminal of 120 characters has room for."""

_NO_FIGURE = "-: too few requests for it, or it does not apply."


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
            title=escape(self.title),
            title_justify="left",
            caption=escape("\n".join(self.notes)) or None,
            box=rich.box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        shown.caption_justify = "left"
        for number, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if number >= self.text_columns else "left")
        for row in self.rows:
            shown.add_row(*map(escape, row))
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
    for build in (_quality_comparison, _latency_comparisons):
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
    newest = [*filter(None, [_widest_quality(folder)]), *_newest_by_workload(folder)]
    if not newest:
        store.latest(folder, "quality")  # raises, and names the command
    return [results_table(path) for path in newest]


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
                stands["status"]
                if stands["status"] in ("promoted", "rejected")
                else stands["verdict"] or stands["status"],
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

    Acceptance and start-up are those of the newest such records of the checkpoints that were scored; where there are
    none, there is no such line.

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
    """One block's content; the command that makes what is missing, where there is no record yet.

    Raises:
        TableError: no table of that name takes these words.
        SlimqwenError: a record that it needs is damaged.
    """
    builders: Mapping[tuple[str, int], Callable[..., Iterable[Table]]] = {
        ("variants", 0): lambda: [variants_table(root)],
        ("results", 1): lambda name: results_tables(root / "experiments" / name),
        ("fidelity", 1): lambda name: fidelity_tables(store.latest(root / "experiments" / name, "fidelity")),
        ("gate", 1): lambda name: [gate_table(store.latest(root / "experiments" / name, "gate"))],
        ("acceptance", 1): lambda name: acceptance_tables(
            store.latest(root / "experiments" / name, "acceptance")
        ),
        ("start-up", 1): lambda name: [start_up_table(root, name)],
        ("first-request", 1): lambda name: [first_request_table(root, name)],
        ("soak", 1): lambda name: [soak_table(root, name)],
        ("summary", 2): lambda baseline, name: [summary_table(root, baseline, name)],
        ("comparison", 2): lambda a, b: comparison_tables(root / "experiments" / a, root / "experiments" / b),
    }
    build = builders.get((name, len(words)))
    if build is None:
        raise TableError(
            f"no table {' '.join([name, *words])!r}; there is: variants, results VARIANT, comparison A B, "
            "summary BASELINE VARIANT, fidelity VARIANT, acceptance VARIANT, start-up VARIANT, first-request VARIANT, "
            "soak VARIANT"
        )
    try:
        return "\n".join(table.as_markdown() for table in build(*words))
    except store.MissingRecordError as missing:
        return f"Not measured: {missing}.\n"


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
        SlimqwenError: a record is damaged.
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
    floor = store.read(floor_path)["modes"] if floor_path else {}
    rows = [
        (
            _FIDELITY_NAMES[name],
            mode,
            _estimate(figures[name]),
            _estimate(floor[mode][name]) if mode in floor else "-",
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
            if mode in floor and floor[mode]["joined_kl_nats"] is not None
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
    over_http = [
        f"{mode}: over HTTP; KL of the likeliest {figures['top_k']} tokens and of all others as one."
        for mode, figures in record["modes"].items()
        if "top_k" in figures
    ]
    tables = [
        Table(
            f"Fidelity of {record['variant']} to {record['baseline']}: {record['verdict']}",
            ("figure", "read", "value ± SE", "noise ± SE", "limit", "verdict"),
            tuple(rows),
            (compared, *over_http, *dict.fromkeys(_source(one) for one in (path, floor_path) if one)),
            text_columns=2,
        )
    ]
    if layers := record.get("layers"):
        tables.append(
            Table(
                f"Quantised layers of {record['variant']}: {layers['verdict']}",
                ("layer", "error", "plainly rounded", "ratio", "limit", "verdict"),
                tuple(
                    (
                        str(row["layer"]),
                        f"{row['error']:.4f}",
                        f"{row['rounded_error']:.4f}",
                        f"{row['ratio']:.2f}",
                        f"{layers['limit']:g}",
                        "pass" if row["ratio"] <= layers["limit"] else "fail",
                    )
                    for row in layers["rows"]
                ),
                (
                    "Error of a layer's output, given what the baseline's layer is given, as a share of what that one "
                    f"adds, over {layers['tokens']:,} tokens. Plainly rounded: the baseline's weights to nearest.",
                ),
            )
        )
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


def gate_table(path: Path) -> Table:
    """A gate record on one page: each witness, its figures, their verdicts.

    Raises:
        RecordError: the record or its items cannot be read.
    """
    record = store.read(path)
    rows = []
    for item in store.read_items(path):
        low, high = item["low"], item["high"]
        rows.append(
            (
                item["gate"],
                item["figure"],
                "-" if item["value"] is None else f"{item['value']:.5g}",
                "-" if low is None else f"{low:+.4f} to {high:+.4f}",
                f"{item['limit']:g}",
                item["verdict"],
            )
        )
    verdicts = ", ".join(f"{gate}: {verdict}" for gate, verdict in record["verdicts"].items())
    scored = [path.parent.parent / name for name in record["records"] if "/quality_" in name]
    further: tuple[str, ...] = ()
    if record["verdicts"].get("quality") == "inconclusive" and any(
        file.is_file() and store.read(file)["limit"] is not None for file in scored
    ):
        commands = " and ".join(
            f"`make eval-quality-full VARIANT={name}`" for name in (record["baseline"], record["variant"])
        )
        further = (f"Quality cannot tell on its sample: {commands} score all items; then gate again.",)
    return Table(
        f"Gate of {record['variant']} against {record['baseline']}: {record['verdict']}",
        ("gate", "figure", "value", "95 % interval", "limit", "verdict"),
        tuple(rows),
        (f"{verdicts}.", *further, f"Records: {', '.join(record['records'])}.", _source(path)),
        text_columns=2,
    )


def acceptance_tables(path: Path) -> list[Table]:
    """An acceptance record: the depths with what each would come to, then each depth's settings.

    Raises:
        RecordError: the record cannot be read.
    """
    record = store.read(path)
    choice = record["choice"]
    rows = []
    for row in record["depths"]:
        of = row["settings"]
        rows += [
            (
                str(row["depth"]),
                one["class"],
                f"{one['temperature']:g}",
                f"{one['length']['value']:.3f} ± {one['length']['standard_error']:.3f}",
                " ".join(f"{rate['value']:.2f}" for rate in one["rates"]),
                f"{max(rate['standard_error'] for rate in one['rates']):.2f}",
                str(one["drafts"]),
            )
            for one in of
        ]
    tables = [
        Table(
            f"Acceptance of {record['variant']}'s drafts",
            (
                "K",
                "class",
                "temperature",
                "acceptance length ± SE",
                "accepted up to each position",
                "SE ≤",
                "drafts",
            ),
            tuple(rows),
            (_source(path),),
            text_columns=2,
        )
    ]
    if choice:
        speeds = choice["tokens_per_second"]
        served = "measured in this process" if choice["by"] == "measured" else f"bound, {choice['by']}"
        tables.append(
            Table(
                f"Depth for one sequence: K = {choice['depth']}, by {choice['by']}",
                ("K", "acceptance length ± SE", f"tokens/s ({served})", "of the best"),
                tuple(
                    (
                        str(row["depth"]),
                        f"{row['length']['value']:.3f} ± {row['length']['standard_error']:.3f}"
                        if row["length"]
                        else "1",
                        f"{speeds[str(row['depth'])]:,.0f}",
                        f"{speeds[str(row['depth'])] / max(speeds.values()):.1%}",
                    )
                    for row in record["depths"]
                ),
                (_source(path),),
            )
        )
    return tables


def start_up_table(root: Path, name: str) -> Table:
    """The start-up ledger of a variant: seconds of each phase by kind of start.

    Raises:
        MissingRecordError: its starts have not been timed.
        RecordError: the record does not follow its schema.
    """
    record = results.latest(root, "start_up", name)
    if record is None:
        raise store.MissingRecordError(
            f"no start of {name} has been timed; `make eval-startup VARIANT={name}` makes a record"
        )
    means = {
        **record.get("phases", {}),
        "ready": "until the server answers: all but the first token",
        "total": "until the first token",
    }
    kinds = {kind: start_up.summary(record[kind]) for kind in start_up.KINDS if kind in record}
    rows = tuple(
        (
            phase.replace("_", " "),
            means[phase],
            *(
                f"{value:.1f} [{low:.1f}, {high:.1f}]"
                for value, low, high in (found[phase] for found in kinds.values())
            ),
        )
        for phase in next(iter(kinds.values()))
    )
    starts = min(len(record[kind]) for kind in kinds)
    notes = [
        f"Medians of {starts} starts of each kind in turns; in brackets the fastest and the slowest, a "
        f"{1 - 2 ** (1 - starts):.0%} interval of the median.",
    ]
    for kind in ("warm", "baked"):
        ratio = record.get(f"ready_cold_over_{kind}")
        if ratio:
            notes.append(
                f"Until ready, cold / {kind}: {ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]."
            )
    if not record["provenance"]["hardware"]["gpus"]:
        notes.append(_CPU_NOTE)
    headings = ("phase", "what it is", *(f"{kind}, s" for kind in kinds))
    return Table(f"Start-up of {name}", headings, rows, (*notes, _result_source(record)), text_columns=2)


def soak_table(root: Path, name: str) -> Table:
    """What a server held after minutes of mixed load, and how its requests ended.

    Raises:
        MissingRecordError: there was no soak.
        RecordError: a damaged record is in the way.
    """
    record = results.latest(root, "soak", name)
    if record is None:
        raise store.MissingRecordError(
            f"no record soak of {name} in results/; `make soak VARIANT={name}` makes it"
        )
    slope, limits, files = record["growth_mib_per_hour"], record["limits"], record["open_files"]
    rows = (
        *((f"requests {what}", f"{count:,}", "") for what, count in sorted(record["requests"].items())),
        ("streams left by their client", f"{record['streams_left']:,}", ""),
        ("resident after the first third, MiB", f"{record['resident_mib']['settled']:,.1f}", ""),
        ("resident at the end, MiB", f"{record['resident_mib']['end']:,.1f}", ""),
        (
            "growth, MiB an hour",
            f"{slope['value']:.2f} ({slope['low']:.2f} to {slope['high']:.2f})",
            f"{limits['growth_mib_per_hour']:g}",
        ),
        ("open files before, after", f"{files['before']}, {files['after']}", f"+{limits['new_files']}"),
        ("KV cache in use at rest", f"{record['kv_cache_used']:.1%}", "0"),
    )
    notes = [
        f"{record['seconds'] / 60:.0f} minutes, {record['clients']} clients and one that leaves its streams; growth of "
        "all processes after the first third, with Theil and Sen's 95 % interval.",
        *(f"Fault: {fault}." for fault in record["faults"]),
        _result_source(record),
    ]
    return Table(f"Soak of {name}: {record['verdict']}", ("what", "value", "limit"), rows, tuple(notes))


def first_request_table(root: Path, name: str) -> Table:
    """First requests after readiness against those that follow, warmed up and bare, and with rules before chats.

    Raises:
        MissingRecordError: they have not been timed.
        RecordError: a damaged record is in the way.
    """
    record = results.latest(root, "first_request", name)
    if record is None:
        raise store.MissingRecordError(
            f"no record first_request of {name} in results/; `make bench-first-request VARIANT={name}` makes it"
        )
    rows = tuple(
        (
            row.what,
            f"{row.ttft_ms:.1f}",
            f"{row.next_ttft_ms:.1f}",
            f"{row.ratio.value:.2f}",
            f"{row.ratio.low:.2f} to {row.ratio.high:.2f}",
            row.verdict or "",
        )
        for row in first_request.summary(record)
    )
    rules = record["rules"]
    notes = [
        f"Medians over {len(record['servers']['warmed'])} starts of each server in turns, the chat the very first in "
        "every other; ratios are geometric means over starts, intervals by Student's t over them."
        + (
            ""
            if isinstance(record["question_tokens"], int)
            else " No two questions of a kind have the same length."
        ),
        f"Rules: {rules['prefix_tokens']} tokens before every chat of a server of its own, with prefix caching and "
        f"without MTP; its first chat found {rules['rounds'][0]['first']['cached_tokens']} of them in the cache "
        f"(blocks of {rules['block_tokens']}).",
        *(f"{name} itself, its log: {line}." for line in record["chat_prefixes"]),
    ]
    if not record["provenance"]["hardware"]["gpus"]:
        notes.append(_CPU_NOTE)
    columns = ("TTFT of", "ms", "of the next, ms", "ratio", "95 % interval", f"within {record['limit']}")
    return Table(f"First requests of {name}", columns, rows, (*notes, _result_source(record)))


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


def _latency_comparisons(first: Path, second: Path) -> list[Table]:
    """A table for each workload that fits; what does not is named, unless nothing does."""
    tables: list[Table] = []
    unfit: list[comparison.NotComparableError] = []
    for workload in comparison.shared_workloads(first, second):
        try:
            tables.append(latency_comparison(*comparison.latency_pair(first, second, workload)))
        except comparison.NotComparableError as error:
            unfit.append(error)
    if not tables:
        raise unfit[0]
    if unfit:
        tables[-1] = replace(
            tables[-1], notes=(*tables[-1].notes, *(f"Not shown: {error}." for error in unfit))
        )
    return tables


def latency_comparison(first: Path, second: Path) -> Table:
    """Two latency records of one workload: both figures and their ratio, by class.

    Raises:
        NotComparableError: requests or hardware differ.
        RecordError: a record cannot be read.
    """
    paths = first, second
    a, b = (store.read(path) for path in paths)
    found = comparison.compare_latency(*paths)
    rows = [
        (
            row.prompt_class
            if row.prompt_tokens is None
            else f"{row.prompt_class} {row.prompt_tokens} -> {row.output_tokens}",
            _MEASURE_NAMES[row.measure],
            f"{row.first:,.1f}",
            f"{row.second:,.1f}",
            f"{row.speedup:.2f}x" if row.speedup is not None else "-",
            f"{row.interval[0]:.2f} to {row.interval[1]:.2f}" if row.interval else "-",
            str(_requests(row.prompt_class, a, b)),
        )
        for row in found
    ]
    in_ms = all(row.measure.endswith("_ms") for row in found)
    unit = ", ms" if in_ms else ""
    columns = (
        "class, tokens", "median", f"{a['variant']}{unit}", f"{b['variant']}{unit}",
        f"speed-up of {b['variant']}", "95 % interval", "requests",
    )  # fmt: skip
    paired = "in turns" if a["run"] == b["run"] else "one after the other, not in turns"
    notes = [f"On {_hardware(a)}, {paired}; {_latency_intervals(found)}."]
    if not in_ms:
        notes.append("Medians of TTFT, TPOT and E2EL in ms; rates over all rounds.")
    if any(row.interval is None for row in found):
        notes.append(
            "Requests that overlap depend on each other: a rate has an interval where there are several rounds, each "
            "with some."
        )
    notes += [note for record in (a, b) for note in _config_notes(record)]
    if not a["provenance"]["hardware"]["gpus"]:
        notes.append(_CPU_NOTE)
    title = f"Latency{_of_workload(a)}: {a['variant']} and {b['variant']}"
    return Table(title, columns, tuple(rows), (*notes, *(_source(path) for path in paths)), text_columns=2)


def _latency_intervals(rows: Sequence[comparison.LatencyRow]) -> str:
    numbers = sorted({row.rounds for row in rows if row.interval})
    if not any(numbers):
        return "intervals by bootstrap over requests: what a restart changes is not in them"
    told = " and ".join(f"{number} rounds" if number else "requests" for number in numbers)
    return f"intervals by Student's t over {told}, speed-ups their geometric mean"


def _quality_results(path: Path) -> Table:
    record = store.read(path)
    tasks = record["tasks"]
    # Records from before a figure was kept have no column for it.
    with_lengths = any(row.get("output_tokens") for row in tasks.values())
    with_floors = any("floor" in row for row in tasks.values())
    rows = [
        (
            task.removeprefix(f"{record['suite']}_"),
            _MEASURE_NAMES.get(row["measure"], row["measure"]),
            f"{row['value']:.3f} ± {row['standard_error']:.3f}",
            f"{row['item_count']} of {row['available_count']}",
            _of(row["truncated_count"], row.get("output_count")),
            _of(row["empty_count"], row.get("output_count")),
            *((_lengths(row.get("output_tokens")),) if with_lengths else ()),
            *((_floor(row),) if with_floors else ()),
        )
        for task, row in tasks.items()
    ]
    columns = (
        "task", "measure", "score ± SE", "items", "cut short", "empty",
        *(("output tokens: mean, p50, max",) if with_lengths else ()),
        *(("floor",) if with_floors else ()),
    )  # fmt: skip
    how = ", by chat" if record.get("endpoint") == "chat" else ""
    return Table(
        f"Quality of {record['variant']}{how}", columns, tuple(rows), (_SIGNS, _source(path)), text_columns=2
    )


def _of(count: int | None, answers: int | None) -> str:
    """A count, of how many answers where an item has several or the record says."""
    if count is None:
        return "-"
    return str(count) if answers is None else f"{count} of {answers}"


def _lengths(tokens: Mapping[str, float] | None) -> str:
    return f"{tokens['mean']:.0f}, {tokens['p50']:g}, {tokens['max']}" if tokens else "-"


def _floor(row: Mapping[str, Any]) -> str:
    return f"{row['floor']:g}: {row['floor_verdict']}" if "floor" in row else "-"


def _latency_results(path: Path) -> Table:
    record = store.read(path)
    wanted = record.get("columns", DEFAULT_COLUMNS)
    rows = [
        (
            f"{name} {row['prompt_tokens']} -> {row['output_tokens']}",
            *(_figure(row, column) for column in wanted),
            f"{row['request_count']} ({row['failure_count']} failed)",
        )
        for name, row in record["classes"].items()
    ]
    columns = ("class, tokens", *(_heading(column) for column in wanted), "requests")
    means = "Means ± standard errors, on" if any(c.endswith(".mean") for c in wanted) else "On"
    notes = [f"{means} {_hardware(record)}."]
    levels = [row["goodput"] for row in record["classes"].values() if row.get("goodput")]
    if levels:
        notes.append(
            f"Good: TTFT of {levels[0]['ttft_ms']:g} ms and TPOT of {levels[0]['tpot_ms']:g} ms at most."
        )
    spread = [row["spread"] for row in record["classes"].values() if row.get("spread")]
    if spread:
        notes.append("Lengths are means of log-normal ones in classes with a spread.")
    blocks = [row["prefix_cache"] for row in record["classes"].values() if row.get("prefix_cache")]
    if blocks:
        notes.append(
            f"Prefixes of {blocks[0]['prefix_tokens']} tokens, whole blocks of {blocks[0]['block_tokens']}; found: the "
            "share of all prompt tokens that the server's counters say its cache had."
        )
    notes += _config_notes(record)
    if any(cell == "-" for row in rows for cell in row) and "columns" in record:
        notes.append(_NO_FIGURE)
    if not record["provenance"]["hardware"]["gpus"]:
        notes.append(_CPU_NOTE)
    title = f"Latency of {record['variant']}{_of_workload(record)}"
    table = Table(title, columns, tuple(rows), (*notes, _source(path)))
    return table if len(columns) <= _WIDEST else _turned(table)


def _turned(table: Table) -> Table:
    """The same with a line for each column, where there are more of them than a terminal has room for."""
    columns, *rows = zip(table.columns, *table.rows, strict=True)
    return replace(table, columns=columns, rows=tuple(rows))


def _heading(column: str) -> str:
    measure, _, statistic = column.partition(".")
    if not statistic:
        return _COLUMN_NAMES[column]
    return f"{_MEASURE_NAMES[measure]}{'' if statistic == 'mean' else f' {statistic}'}, ms"


def _figure(row: Mapping[str, Any], column: str) -> str:
    """One cell; "-" where the class has no such figure."""
    measure, _, statistic = column.partition(".")
    if statistic == "mean":
        return f"{row[measure]['mean']:,.1f} ± {row[measure]['standard_error']:,.1f}"
    if statistic:
        return f"{row[measure][statistic]:,.1f}" if statistic in row[measure] else "-"
    prefix, goodput = row.get("prefix_cache"), row.get("goodput")
    if column in ("output_throughput_tokens_per_s", "total_throughput_tokens_per_s"):
        return f"{row[column]:,.0f}"
    if column == "request_throughput_per_s":
        return f"{row[column]:,.2f}"
    if column == "acceptance_length":
        return f"{row['acceptance']['length']:.2f}" if row["acceptance"] else "-"
    if column == "concurrency":
        return str(row["concurrency"] or "no limit")
    if column == "rate_per_s" and row["arrival"]:
        return f"{row['arrival']['rate_per_s']:,.2f}"
    if column == "goodput_per_s" and goodput:
        return f"{goodput['requests_per_s']:,.2f}"
    if column == "good_share" and goodput:
        return f"{goodput['good_count'] / row['request_count']:.0%}"
    if column == "prefix_hits" and prefix:
        return f"{prefix['hit_tokens'] / prefix['queried_tokens']:.0%}"
    if column == "repeat_speedup" and prefix and prefix["repeat_speedup"]:
        ratio = prefix["repeat_speedup"]
        return f"{ratio['value']:.1f}x [{ratio['low']:.1f}, {ratio['high']:.1f}]"
    return "-"


def _of_workload(record: store.Record) -> str:
    return "" if record["workload"] == "classes" else f", {record['workload']}"


def _config_notes(record: store.Record) -> list[str]:
    lines = record.get("config")
    if not lines:
        return []
    return [f"{record['variant']} served with {', '.join(f'{key}={value}' for key, value in lines.items())}."]


def _requests(name: str, *records: store.Record) -> int:
    """Requests of a class, or of all, in the record that has fewer."""
    counts: list[int] = [
        sum(
            row["request_count"]
            for key, row in record["classes"].items()
            if name in (key, comparison.ALL_CLASSES)
        )
        for record in records
    ]
    return min(counts)


def _newest_by_workload(folder: Path) -> list[Path]:
    """The newest latency record of each workload, the prompt classes first."""
    newest: dict[str, Path] = {}
    for path in store.records(folder, "latency"):
        newest.setdefault(store.read(path)["workload"], path)
    return [newest[name] for name in sorted(newest, key=lambda name: (name != "classes", name))]


def _widest_quality(folder: Path) -> Path | None:
    """Of the checkpoint scored last, the newest quality record on most items.

    A quick look or a chat does not hide the full one, but scores of weights that are gone are no scores.
    """
    records = {path: store.read(path) for path in store.records(folder, "quality")}
    if not records:
        return None
    last = records[max(records)]["provenance"]["checkpoint"]["digest"]

    of_last = [p for p, one in records.items() if one["provenance"]["checkpoint"]["digest"] == last]
    return max(of_last, key=lambda path: (comparison.coverage(records[path]), path.name))


def _latest_quality(folder: Path) -> str:
    path = _widest_quality(folder)
    if path is None:
        return "-"
    record = store.read(path)
    prefix = f"{record['suite']}_"
    return ", ".join(
        f"{task.removeprefix(prefix)} {row['value']:.3f}±{row['standard_error']:.3f}"
        for task, row in record["tasks"].items()
    )


def _latest_latency(folder: Path) -> str:
    newest = _newest_by_workload(folder)
    if not newest:
        return "-"
    record = store.read(newest[0])
    figures = ", ".join(f"{name} {row['e2el_ms']['median']:,.0f}" for name, row in record["classes"].items())
    return f"{figures} ({_hardware(record)})"


def _hardware(record: store.Record) -> str:
    return provenance.hardware_name(record["provenance"]["hardware"])


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
    """Both acceptance lengths at the gate's K, of the checkpoints given by variant and digest, and where from."""
    try:
        first, second = (root / "experiments" / name for name in scored)
        paths = acceptance_share.pair(first, second, list(scored.values()))
    except (store.MissingRecordError, comparison.NotComparableError):
        return [], []
    found = acceptance_share.compare(*paths)
    row = (
        f"acceptance length, K={found.depth}",
        f"{found.first:.3f}",
        f"{found.second:.3f}",
        f"{found.ratio.value:.1%} [{found.ratio.low:.1%}, {found.ratio.high:.1%}]",
        f"{found.verdict} (at least {store.read(paths[1])['least_share']:.0%})",
        f"{found.groups} groups of prompts",
    )
    return [row], [_source(path) for path in paths]


def _start_up_rows(root: Path, name: str, digest: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """Cold starts against starts from the baked compile cache, and where that is from."""

    def fits(record: store.Record) -> bool:
        return record["provenance"]["checkpoint"] == digest and "baked" in record

    record = results.latest(root, "start_up", name, fits)
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
    return [row], [_result_source(record)]


def _estimate(found: Mapping[str, Any] | None) -> str:
    return f"{found['value']:.5f} ± {found['standard_error']:.5f}" if found else "-"


def _result_source(record: store.Record) -> str:
    return f"results/{results.stem(record)}.json: {_command_and_commit(record)}, {_hardware(record)}."


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
