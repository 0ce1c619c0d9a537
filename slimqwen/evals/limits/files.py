"""The files of eval/ with limits: reading them, and writing those that are missing or came from a record."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine.length_sweep import LengthSweepSettings
from slimqwen.evals.engine.scenarios import EngineSettings
from slimqwen.evals.fidelity_figures import FIGURE_NAMES, FidelitySettings
from slimqwen.evals.gate import CHECKS, GateSettings
from slimqwen.evals.limits.record import LimitsRecord
from slimqwen.evals.limits.settings import LimitsSettings
from slimqwen.records import store
from slimqwen.records.settings import LimitSettings

_WIDTH = 120


class FileChanges(NamedTuple):
    """The files that a record wrote, and those that it left unchanged because their limits were written by hand."""

    written: list[Path]
    kept: list[Path]


def committed(evaluation: str, root: Path) -> dict[str, float]:
    """The limits that eval/ holds for an evaluation, by name; those of missing files are left out.

    Raises:
        SettingsError: a file cannot be used.
    """
    limits: dict[str, float] = {}
    if _file(FidelitySettings, evaluation, root).is_file():
        fidelity = FidelitySettings.load(evaluation, root)
        for change, values in fidelity.limits:
            limits |= {f"{change}.{figure}": limit for figure, limit in values}
    if _file(AcceptanceSettings, evaluation, root).is_file():
        limits["least_share"] = AcceptanceSettings.load(evaluation, root).least_share
    if _file(EngineSettings, evaluation, root).is_file():
        limits["near_tie_nats"] = EngineSettings.load(evaluation, root).near_tie_nats
    return limits


def write(settings: LimitsSettings, record: LimitsRecord, path: Path, root: Path) -> FileChanges:
    """Write the files of an evaluation from a record; those with limits written by hand stay as they are.

    Raises:
        SettingsError: an existing file cannot be used.
    """
    contents = _contents(settings, record, root)
    files = {kind: _file(kind, settings.name, root) for kind in contents}
    # Every existing file is read before the first is written.
    kept = [
        file for kind, file in files.items() if file.is_file() and not kind.load(settings.name, root).record
    ]
    written = [file for file in files.values() if file not in kept]
    header = f"# Written by `slimqwen limits --variant {record.variant}`, which measures the limits again.\n"
    for kind, content in contents.items():
        if files[kind] in written:
            body = {"record": path.relative_to(root).as_posix(), **content}
            text = header + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=_WIDTH)
            files[kind].parent.mkdir(parents=True, exist_ok=True)
            store.publish(files[kind], text.encode(), replace=True)
    return FileChanges(written, kept)


def _contents(
    settings: LimitsSettings, record: LimitsRecord, root: Path
) -> dict[type[LimitSettings], dict[str, Any]]:
    """The fields of each file."""
    values = {each.figure: each.limit for each in record.limits}
    near_tie = {"near_tie_nats": values["near_tie_nats"]}
    limits: dict[type[LimitSettings], dict[str, Any]] = {
        FidelitySettings: {
            "limits": {
                change: {figure: values[f"{change}.{figure}"] for figure in FIGURE_NAMES}
                for change in ("same_weights", "changed_weights")
            }
        },
        AcceptanceSettings: {"least_share": values["least_share"]},
        EngineSettings: near_tie,
        LengthSweepSettings: near_tie,
    }
    contents = {
        kind: {**settings.of_check(kind, root).model_dump(mode="json", exclude={"name", "record"}), **own}
        for kind, own in limits.items()
    }
    return {**contents, GateSettings: dict.fromkeys(CHECKS, settings.name)}


def _file(kind: type[LimitSettings], evaluation: str, root: Path) -> Path:
    return root / "eval" / kind.folder / f"{evaluation}.yaml"
