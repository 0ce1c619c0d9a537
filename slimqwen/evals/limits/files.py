"""The files of eval/ with limits: reading them, and writing those that are missing or came from a record."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine.length_sweep import LengthSweepSettings
from slimqwen.evals.engine.scenarios import EngineSettings
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.gate import GateSettings
from slimqwen.evals.limits.record import LimitsRecord
from slimqwen.evals.limits.settings import LimitsSettings
from slimqwen.records.settings import LimitSettings

_KINDS: tuple[type[LimitSettings], ...] = (
    FidelitySettings,
    AcceptanceSettings,
    EngineSettings,
    LengthSweepSettings,
    GateSettings,
)
_WIDTH = 120


class FileChanges(NamedTuple):
    """The files that a record wrote, and those that it left unchanged.

    Attributes:
        written: files with the record's limits.
        kept: files with limits written by hand.
    """

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

    Args:
        settings: sizes, seeds and texts.
        record: the limits.

    Raises:
        SettingsError: an existing file cannot be used.
    """
    source = path.relative_to(root).as_posix()
    by_hand = [
        kind
        for kind in _KINDS
        if _file(kind, settings.name, root).is_file() and not kind.load(settings.name, root).record
    ]
    result = FileChanges([], [_file(kind, settings.name, root) for kind in by_hand])
    for kind, content in _contents(settings, record, root).items():
        if kind in by_hand:
            continue
        file = _file(kind, settings.name, root)
        header = (
            f"# Written by `slimqwen limits --variant {record.variant}`, which measures the limits again.\n"
        )
        body = {"record": source, **{name: value for name, value in content.items() if name != "name"}}
        text = header + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=_WIDTH)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.new")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
        result.written.append(file)
    return result


def _contents(
    settings: LimitsSettings, record: LimitsRecord, root: Path
) -> dict[type[LimitSettings], dict[str, Any]]:
    """The fields of each file."""
    values = {each.figure: each.limit for each in record.limits}
    limits: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        change, _, figure = name.partition(".")
        if figure:
            limits.setdefault(change, {})[figure] = value
    near_tie = {"near_tie_nats": values["near_tie_nats"]}
    changes: list[tuple[LimitSettings, dict[str, Any]]] = [
        (settings.fidelity(root), {"limits": limits}),
        (settings.acceptance(root), {"least_share": values["least_share"]}),
        (settings.engine(root), near_tie),
        (settings.length_sweep(root), near_tie),
    ]
    contents = {
        type(each): {**each.model_dump(mode="json", exclude={"record"}), **new_limits}
        for each, new_limits in changes
    }
    checks = ("fidelity", "acceptance", "quality", "engine")
    return {**contents, GateSettings: dict.fromkeys(checks, settings.name)}


def _file(kind: type[LimitSettings], evaluation: str, root: Path) -> Path:
    return root / "eval" / kind.folder / f"{evaluation}.yaml"
