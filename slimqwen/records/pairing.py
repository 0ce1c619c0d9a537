"""Finds records of two variants that can be compared, or states what differs if none can."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.identity import changed_names
from slimqwen.records import store
from slimqwen.records.record import Record
from slimqwen.records.store import AnyRecord


class NotComparableError(SlimqwenError):
    """Both variants have records, but none can be compared; the message names what differs and the command to run."""


def newest_pair(
    first: Path,
    second: Path,
    kind: type[AnyRecord],
    command: Callable[[str, AnyRecord], str],
    condition: Callable[[AnyRecord], bool] = lambda record: True,
) -> tuple[Path, Path]:
    """Find the newest records of two variants that can be compared; records measured in turns take precedence.

    Two records can be compared if they have the same `basis`: the properties that their kind requires to be equal, such
    as the digests of the data files.

    Args:
        first: folder of the first variant's records, experiments/<variant>.
        second: folder of the second variant's records.
        kind: the record kind.
        command: function from a variant and a record to the command that measures the variant in the same way, for the
            error message.
        condition: whether a record may be used.

    Returns:
        The files of the first and of the second variant's record.

    Raises:
        MissingRecordError: a variant has no record of the kind that meets the condition.
        NotComparableError: no two records can be compared.
    """
    newest = store.latest(first, kind, condition), store.latest(second, kind, condition)
    candidates, others = (
        list(store.comparable(store.records(folder, kind), kind, condition)) for folder in (first, second)
    )
    fitting = [
        (_run(record) != _run(other), path, other_path)
        for path, record in candidates
        for other_path, other in others
        if record.basis == other.basis
    ]
    if fitting:
        # A pair that was measured in turns is preferred to a newer pair.
        _, path, other_path = min(fitting, key=lambda pair: pair[0])
        return path, other_path
    a, b = candidates[0][1], others[0][1]
    require_same(*newest, a.basis, b.basis, command(b.variant, a))
    raise AssertionError("no pair fits, so the newest records differ")


def require_quiet(*records: Record) -> None:
    """Check that records were not measured on a busy host.

    Raises:
        NotComparableError: a record was measured on a busy host, with --even-if-busy.
    """
    for record in records:
        if record.provenance.host_was_busy:
            raise NotComparableError(
                f"the {record.kind} record of {record.variant} of {record.provenance.ended} was measured on a busy "
                "host; measure again without --even-if-busy"
            )


def require_same(
    first: Path, second: Path, first_basis: Mapping[str, Any], second_basis: Mapping[str, Any], cure: str
) -> None:
    """Check that two records can be compared.

    Args:
        first, second: files of the records, for the message.
        first_basis: properties of the first record, by name, that the second record must share.
        second_basis: the same properties of the second record.
        cure: command that makes a comparable record; empty if both must be measured again.

    Raises:
        NotComparableError: a property differs; the message names the differences and the command.
    """
    shown = []
    for name in changed_names(first_basis, second_basis):
        a, b = first_basis.get(name), second_basis.get(name)
        shown.append(f"{name} ({a} and {b})" if isinstance(a, str | int) else name)
    if shown:
        raise NotComparableError(
            f"{first.parent.name}/{first.name} and {second.parent.name}/{second.name} differ in {', '.join(shown)}; "
            + (f"run `{cure}` for a record that fits" if cure else "measure both again")
        )


def _run(record: Record) -> str | None:
    """Id of the run that made a record; None for a kind that is not measured in turns."""
    return getattr(record, "run", None)
