"""The subject of `slimqwen tune`: a variant, the requests, the loads, and the config.env lines of each arm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimqwen.bench import BenchError
from slimqwen.bench.latency.measured_variant import own_prompts
from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.search.tune.arms import Arm
from slimqwen.search.tune.responses import SETTINGS
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlPart

SESSIONS = "sessions"
"""The load of an agent's sessions, which a prefix cache is for."""

SESSION_TOKENS = 8192
"""Longest context of the sessions, tokens: all turns of an arm are to take a minute."""

_AGENT = "agent"
_LOADS = (1, 4, 16)


@dataclass(frozen=True)
class TuneSubject:
    """The variant that is tuned, and how it is measured.

    Attributes:
        variant: the variant.
        served: the variant's own command.
        workload: the requests; each prompt class occurs once for every load.
        loads: numbers of concurrent requests.
        sequences: max_num_seqs of every arm; None if the variant's own is large enough for every load.
        port: TCP port of every arm's server; None for the variant's own.
        sessions: workload of an agent's sessions, for serving flags; None if flags are not timed over sessions.
    """

    variant: Variant
    served: ServerCommand
    workload: Workload
    loads: Sequence[int]
    sequences: int | None
    port: int | None
    sessions: Workload | None = None

    @classmethod
    def of_variant(
        cls,
        variant: Variant,
        workload: Workload,
        loads: Sequence[int] | None,
        port: int | None,
        *,
        sessions: bool,
    ) -> "TuneSubject":
        """Prepare a variant for tuning: repeat the workload's prompt classes at each load.

        Args:
            workload: the requests; for an own evaluation its prompts are read and tokenized.
            loads: numbers of concurrent requests; None for 1, 4, 16 and max_num_seqs, up to max_num_seqs.
            port: TCP port of every arm's server; None for the variant's own.
            sessions: whether flags are timed over sessions of an agent, too.
        """
        served = ServerCommand.resolve(variant, port=port)
        limit = served.flags.get("max-num-seqs")
        most = limit or max(_LOADS)
        if workload.prompts:
            prompts, output_tokens = zip(*own_prompts(workload, variant), strict=True)
            workload = workload.of_own_prompts(prompts, output_tokens)
            most = min(most, len(prompts))
        chosen = sorted(set(loads or [load for load in (*_LOADS, most) if load <= most]))
        workload = _spread_over_loads(workload, chosen)
        sequences = max(chosen) if limit and limit < max(chosen) else None
        agent = Workload.load(_AGENT, variant.root) if sessions else None
        if agent:  # as a load, not as the measurement of a prefix cache that has to be there
            most = min(agent.concurrency, max(chosen))
            agent = agent.model_copy(update={"config": {}, "concurrency": most})
        return cls(variant, served, workload, chosen, sequences, port, agent)

    @property
    def inputs(self) -> Sequence[Path | YamlPart]:
        """Files on which the requests depend: the timed ones, and those whose responses are compared."""
        root = self.variant.root
        timed = [path for each in (self.workload, self.sessions) if each for path in each.inputs(root)]
        return [*timed, *EngineSettings.load(SETTINGS, root).inputs(root)]

    def for_flags(self) -> "TuneSubject":
        """The subject for timing flags: own prompts are sent at the largest load only.

        At a second load the prefix cache would already have the prompts. Other workloads stay as they are.
        """
        if not self.workload.prompts:
            return self
        classes = tuple(c for c in self.workload.classes if c.concurrency == max(self.loads))
        workload = self.workload.model_copy(update={"classes": classes})
        return replace(self, workload=workload, loads=[max(self.loads)])

    def with_arm(self, arm: Arm) -> Variant:
        """The variant with the config.env lines of an arm."""
        return self.variant.with_lines(arm.list_lines(self.served, self.sequences))

    def resolve(self, arm: Arm) -> ServerCommand:
        """The server command of an arm.

        Raises:
            ConfigError: vLLM would refuse a line of the arm.
        """
        return ServerCommand.resolve(self.with_arm(arm), port=self.port)


def _spread_over_loads(workload: Workload, loads: Sequence[int]) -> Workload:
    """The workload with each of its classes at every load, one load after the other.

    Raises:
        BenchError: there are fewer own prompts than a load has requests in flight.
    """
    if workload.prompts and workload.classes[0].requests < max(loads):
        raise BenchError(
            f"{workload.prompts}: {workload.classes[0].requests} prompts are too few for a load of {max(loads)}; write "
            f"{max(loads)} or more, or lower --load"
        )
    classes = [
        PromptClass(
            name=f"{c.name} at {load}",
            prompt_tokens=c.prompt_tokens,
            output_tokens=c.output_tokens,
            requests=c.requests if workload.prompts else max(c.requests, 2 * load),
            spread=c.spread,
            concurrency=load,
        )
        for load in loads
        for c in (workload.classes[:1] if workload.shape == "prefixes" else workload.classes)
    ]
    return workload.model_copy(update={"classes": tuple(classes), "shape": "new_text"})
