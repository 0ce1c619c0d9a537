"""The checks of the gate, one module each: `CHECKS` is their table, and the only place that names them all.

`check.py` says what a check is. Gate, demo, proof, promotion and the check of own evaluations iterate over the table.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, create_model

from slimqwen.evals.checks.acceptance import AcceptanceCheck
from slimqwen.evals.checks.check import Check as Check
from slimqwen.evals.checks.check import Pair as Pair
from slimqwen.evals.checks.check import Section
from slimqwen.evals.checks.engine import EngineCheck
from slimqwen.evals.checks.fidelity import FidelityCheck
from slimqwen.evals.checks.quality import QualityCheck, QualitySettings
from slimqwen.evals.suites.suite import Suite
from slimqwen.records.settings import Settings
from slimqwen.records.split import Side, Split
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlText

CHECKS: tuple[type[Check[Any]], ...] = (FidelityCheck, AcceptanceCheck, QualityCheck, EngineCheck)
"""The checks, in the order in which the gate measures them."""


class GateSettings(Settings):
    """eval/gates/<name>.yaml: what each check measures and allows.

    Attributes:
        sections: the settings of the checks, in the order of `CHECKS`.
    """

    folder: ClassVar[str] = "gates"
    own_file: ClassVar[str] = "gate"

    sections: tuple[Settings, ...]

    @classmethod
    def _from_text(cls, text: YamlText, name: str) -> Self:
        keys = {key: form for check in CHECKS for key, form in check.settings_type.top_keys().items()}
        # All faults at once, and keys that no check reads.
        text.validate(create_model("Gate", __config__=ConfigDict(extra="forbid"), **keys), text.content)
        return cls(name=name, sections=tuple(check.settings_type._from_text(text, name) for check in CHECKS))

    def of(self, kind: type[Section]) -> Section:
        """The settings of one check, selected by their class."""
        return next(each for each in self.sections if isinstance(each, kind))

    def suite(self, root: Path) -> Suite:
        """The suite on which the check quality scores."""
        return Suite.load(self.of(QualitySettings).suite, root)

    def split(self, side: Side | None, root: Path) -> Split | None:
        """The named side of the split between search and proof; None, which means all items, for no side."""
        return self.suite(root).split(side) if side else None

    def input_readers(self, variant: Variant) -> list[Callable[[], object]]:
        """Functions that read the input texts of all checks; each raises a SlimqwenError that names the faults."""
        each = zip(CHECKS, self.sections, strict=True)
        return [reader for check, own in each for reader in check.input_readers(own, variant)]

    def checks(self, pair: Pair) -> Mapping[str, Check[Any]]:
        """The checks of a variant and its baseline, by name, in the order of `CHECKS`."""
        return {check.name: check(pair, own) for check, own in zip(CHECKS, self.sections, strict=True)}
