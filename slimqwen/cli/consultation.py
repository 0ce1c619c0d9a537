"""What `serve`, `gate check` and `image build` say and refuse by the recorded plans of a variant."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimqwen.cli.console import errors

if TYPE_CHECKING:
    from slimqwen.plan.facts import Plan
    from slimqwen.serving.checks import Trouble
    from slimqwen.serving.command import ServerCommand


def consult(server: "ServerCommand") -> "tuple[Plan | None, Sequence[Trouble]]":
    """Look up the plan of a start on this machine.

    Prints one line for each known cost of the start, or one line where no plan fits a start on a GPU.

    Returns:
        The plan, and what the start would die of by it.

    Raises:
        ServingError: there is no plan, and REQUIRE_PLAN=1; or the plan names a module of FlashInfer that the compile
            cache lacks, and REQUIRE_BAKED=1.
    """
    from slimqwen.analysis import start_plan
    from slimqwen.analysis.plan import MissingPlanError
    from slimqwen.serving.errors import ServingError

    try:
        plan = start_plan.find(
            server, start_plan.gpu_here(server), toolkit=start_plan.has_toolkit_here(server)
        )
    except MissingPlanError as error:
        if server.require_plan:
            raise ServingError(f"REQUIRE_PLAN=1, and {error}") from None
        # All known trouble is a GPU's: a plan would change nothing of a start on a CPU.
        if server.platform != "cpu":
            errors.print(f"{error}.", markup=False)
        return None, ()
    start_plan.require_libraries(plan, server)
    trouble = start_plan.start_trouble(plan, server)
    for line in trouble.costs:
        errors.print(f"Known trouble: {line}.", markup=False)
    return plan, trouble.dies


def consult_target(server: "ServerCommand") -> None:
    """Look up the plans of an image's server, on every device that has one.

    Prints one line for each known trouble.

    Raises:
        ServingError: by its plans the server would die on every one of them.
    """
    from slimqwen.analysis import start_plan
    from slimqwen.serving import checks

    # A CUDA image holds a C++ compiler, nvcc and ninja.
    plans = start_plan.find_all(server, toolkit=server.platform == "cuda")
    trouble = [start_plan.start_trouble(plan, server) for plan in plans.values()]
    for start in trouble:
        for line in (*start.costs, *(f"{death.description}; {death.instead}" for death in start.dies)):
            errors.print(f"Known trouble: {line}.", markup=False)
    if trouble and all(start.dies for start in trouble):
        checks.refuse_trouble(server, trouble[0].dies)
