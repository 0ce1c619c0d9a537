"""Field reports: this machine's timings as a file that its owner may send; and the check of files that were sent.

A report has the newest timing of each variant and shipped workload on this machine's card. Its texts
are only names that this project ships, and versions; the names of own variants are replaced by digests.
"""

import contextlib
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from slimqwen import variant as variants
from slimqwen.bench.latency import Latency
from slimqwen.errors import SlimqwenError
from slimqwen.evals.gate import Gate
from slimqwen.identity import digest_of
from slimqwen.identity.effects import decisive_flags
from slimqwen.plan import devices
from slimqwen.records import collection, provenance, store
from slimqwen.records.collection import Collection, Problem, StoredRecord
from slimqwen.records.field_report import FieldCard, FieldReport, FieldRow, FieldStart
from slimqwen.records.git import tracked_files
from slimqwen.records.record import Hardware
from slimqwen.vllm_plugin import engine_facts
from slimqwen.workspace import list_files

FOLDER = Path("eval") / "field"
"""Relative to the repository."""

Device = tuple[str, int]
"""Name of a card, and how many of them; for CPUs cpu with its kind, and how many the engine may use."""


class NothingMeasuredError(SlimqwenError):
    """No timing on this machine's card has been recorded, so there is nothing to report."""


def write_report(root: Path) -> tuple[Path, FieldReport, list[Problem]]:
    """Write the field report of this machine into eval/field/, named after its card and digest.

    Returns:
        The file, its content, and the timings that were left out because their figures contradict each other.

    Raises:
        NothingMeasuredError: nothing was timed on this card.
    """
    card = describe_card(provenance.hardware(), root)
    left_out: list[Problem] = []
    timed = list_rows(collection.collect(root), left_out)
    rows = tuple(row for (name, count), row in timed if (name, count) == (card.name, card.count))
    if not rows:
        raise NothingMeasuredError(
            f"nothing was timed on {card.name} yet; `slimqwen bench latency --variant NAME --baseline` times a variant"
        )
    report = FieldReport(card=card, rows=rows)
    fields = report.as_json()
    file = root / FOLDER / f"{re.sub('[^a-z0-9]+', '-', card.name.lower())}-{digest_of(fields)[:8]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    return file, report, left_out


def list_rows(records: Collection, left_out: list[Problem]) -> Iterator[tuple[Device, FieldRow]]:
    """Yield the rows of a field report, each with its device: one for each class of requests of a timing.

    Of the timings of a variant, workload and device only the newest is taken; own workloads are left out.

    Args:
        records: the records of the repository.
        left_out: list to which this adds each row whose figures contradict each other.
    """
    seen: set[tuple[str, str, Device]] = set()
    workloads = _shipped_workloads(records.root)
    for entry in records.select(Latency):
        device = name_device(entry.record.provenance.hardware, records.root)
        key = entry.variant, entry.record.workload, device
        if key in seen or entry.record.workload not in workloads:
            continue
        seen.add(key)
        for prompt_class in entry.record.classes:
            try:
                yield device, _row(records, entry, prompt_class, device)
            except ValidationError as error:
                left_out.append(Problem(entry.location, f"{prompt_class}: {error.errors()[0]['msg']}"))


def name_device(hardware: Hardware, root: Path) -> Device:
    """Return name and number of a machine's GPUs; without a GPU, of the CPUs that the engine may use.

    A GPU has its short name in eval/devices.yaml, else the driver's name; CPUs are named by their best instruction set.
    """
    if not hardware.gpus:
        return " ".join(("cpu", *hardware.cpu_flags[-1:])), hardware.cpu_count
    first = hardware.gpus[0]
    listed = devices.find_gpu(first.name, root, first.memory_bytes / 2**30)
    return listed.name if listed else first.name, len(hardware.gpus)


def describe_card(hardware: Hardware, root: Path) -> FieldCard:
    """Describe this machine's GPUs or CPUs for a field report."""
    first = hardware.gpus[0] if hardware.gpus else None
    limit = provenance.ask_driver("--query-gpu=power.limit", "--format=csv,noheader,nounits") if first else ""
    system = {"ID": platform.system()}
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()
    kernel = ".".join(re.findall(r"\d+", platform.release())[:2])
    name, count = name_device(hardware, root)
    return FieldCard(
        name=name,
        count=count,
        memory_gib=round((first.memory_bytes if first else hardware.memory_bytes) / 2**30, 1),
        power_limit_w=float(found[0]) if (found := re.match(r"\d+(\.\d+)?", limit)) else None,
        driver=first.driver if first else None,
        system=" ".join(filter(None, (system["ID"], system.get("VERSION_ID"), "kernel", kernel))),
    )


def _row(records: Collection, entry: StoredRecord[Latency], name: str, device: Device) -> FieldRow:
    """The row of one class of a timing; a ValidationError where its figures contradict each other."""
    record, figures = entry.record, entry.record.classes[name]
    block, checkpoint = record.provenance, record.provenance.checkpoint
    shipped = provenance.shipped_variants(records.root)
    claims = records.measurements.get(entry.variant)
    digest = digest_of([decisive_flags(block.flags), checkpoint.recipe_key or checkpoint.digest])[:12]
    gates = (each.record for each in records.select(Gate, entry.variant))
    of_checkpoint = (each for each in gates if each.provenance.checkpoint.has_recipe_of(checkpoint))
    drafts = figures.acceptance
    return FieldRow(
        variant=entry.variant if entry.variant in shipped else f"own-{digest}",
        baseline=claims.baseline if claims and claims.baseline in shipped else None,
        checkpoint=checkpoint.recipe_key or checkpoint.digest,
        measured=entry.ended[:10],
        commit=block.git.commit and block.git.commit[:10],
        changed=block.git.dirty,
        vllm=block.packages.get("vllm"),
        torch=block.packages.get("torch"),
        workload=record.workload,
        prompt_class=name,
        **{name: getattr(figures, name) for name in ("concurrency", "prompt_tokens", "output_tokens")},
        rounds=record.rounds,
        requests=figures.request_count,
        failures=figures.failure_count,
        ttft_ms=round(figures.ttft_ms.median, 2),
        tpot_ms=round(figures.tpot_ms.mean, 3),
        tokens_per_s=round(figures.output_throughput_tokens_per_s, 2),
        tokens_per_step=round(drafts.length, 3) if drafts else 1.0,
        drafted_per_step=round(drafts.draft_tokens / drafts.drafts, 3) if drafts else 0.0,
        steps_per_s=round(drafts.drafts / figures.duration_s, 3) if drafts else None,
        start=_last_start(variants.load(entry.variant, records.root), device[0]),
        gate=next((each.verdict for each in of_checkpoint), None),
    )


def _shipped_workloads(root: Path) -> set[str]:
    tracked = tracked_files(root, "eval/workloads/*.yaml")
    files = list_files("eval/workloads/*.yaml", root)
    return {file.stem for file in files if tracked is None or f"eval/workloads/{file.name}" in tracked}


def _last_start(variant: variants.Variant, card: str) -> FieldStart | None:
    """The last start of a variant on a card, compared with its plan; None where none was compared."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        file = variant.root / engine_facts.COMPARISONS / f"{variant.name}.json"
        compared = json.loads(file.read_bytes())
        if compared.pop("plan").rpartition(" on ")[2] == card.partition(" ")[0]:
            return FieldStart(**compared)
    return None


def read_reports(root: Path) -> tuple[list[FieldReport], list[Problem]]:
    """Read the field reports in eval/field/.

    Returns:
        The valid reports, and a problem for each faulty file.
    """
    reports, faults = [], []
    known = {*provenance.shipped_variants(root), *_shipped_workloads(root)}
    for file in sorted((root / FOLDER).glob("*")):
        location = file.relative_to(root).as_posix()
        try:
            report = store.validate(store.parse(file), location)
            if not isinstance(report, FieldReport):
                raise store.RecordError("no field report; `slimqwen report --field` writes one")
            for row in report.rows:
                for name in filter(None, (row.variant, row.baseline, row.workload)):
                    if name not in known and not name.startswith("own-"):
                        raise store.RecordError(
                            f"{name} is not shipped here; run `slimqwen report --field`, which writes a digest for it"
                        )
            reports.append(report)
        except SlimqwenError as error:
            faults.append(Problem(location, str(error).removeprefix(f"{location}: ")))
    return reports, faults
