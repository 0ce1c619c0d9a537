"""The check engine: whether the served flags give the same greedy tokens as the reference engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimqwen.evals import engine
from slimqwen.evals.checks.check import Check
from slimqwen.evals.engine import Engine
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.records import store
from slimqwen.records.record import Finding
from slimqwen.text.prompts import documents
from slimqwen.variant import Variant


@dataclass(frozen=True)
class EngineCheck(Check[EngineSettings]):
    """The check that detects wrong tokens which come from the engine and its flags, not from the weights."""

    name = "engine"
    kind = Engine
    measures_baseline = False
    settings_type = EngineSettings
    takes_minutes = True

    @staticmethod
    def input_readers(settings: EngineSettings, variant: Variant) -> Sequence[Callable[[], object]]:
        """A function that reads the text of the prompts."""
        return [lambda: list(documents(settings.text, settings.seed, variant.root))]

    def measure(self, side: Variant) -> Path:
        """Compare the variant's engines with the reference engine, and write the record."""
        return engine.measure_engine(side, self.settings, self.pair.invocation)

    def findings(self, paths: Sequence[Path]) -> Iterator[Finding]:
        """Yield one figure with its verdict: the wrong responses of the served engine, or its breakdown.

        Engines with drafts or prefix cache switched are measured too, but no server runs with their flags, so they
        decide nothing.
        """
        record = store.read_record(paths[0], Engine)
        served = record.served
        figure = (
            "breakdown of the served engine"
            if served.failure
            else f"wrong responses of the served engine, of {served.responses}"
        )
        value = 1 if served.failure else served.wrong_responses
        yield Finding(gate=self.name, figure=figure, value=value, limit=0, verdict=record.verdict)
