"""What is known before a server starts: its recorded plan, known trouble with it, and the facts to compare later.

Making a plan takes twenty seconds, so a start makes none: it looks in the newest record for a plan for this device,
this version of vLLM and these flags.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from slimqwen.errors import SlimqwenError
from slimqwen.identity import changed_names
from slimqwen.plan import devices, rehearsal, resolution, trouble
from slimqwen.plan.facts import Plan
from slimqwen.plan.record import is_current, list_recorded_plans, vllm_on
from slimqwen.serving import checks, cuda_toolkit, gpu
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.errors import ServingError
from slimqwen.vllm_plugin import engine_facts

_LISTED_NAMES = 4


class MissingPlanError(SlimqwenError):
    """No recorded plan fits the variant, device, flags and version of vLLM."""


@dataclass(frozen=True)
class StartTrouble:
    """Known trouble that a start will meet.

    Attributes:
        dies: trouble for which the start is refused, because the server would die or give wrong tokens.
        costs: trouble that only costs time or memory, a line each with what to do instead.
    """

    dies: tuple[checks.Trouble, ...]  # trouble that would end the server or change its tokens
    costs: tuple[str, ...]  # one line for each trouble with a cost: the effect, then the cure


def name_gpu_here(command: ServerCommand) -> str:
    """Short name of the device on this host on which the command would serve; cpu for a CPU.

    Raises:
        MissingPlanError: this host has no GPU, or one that is not listed.
    """
    if command.platform == "cpu":
        return devices.CPU
    device = gpu.first_gpu()
    if device is None:
        raise MissingPlanError(
            "this machine has no GPU, so no plan is looked up; serve on a GPU host, or with --platform cpu"
        )
    if listed := devices.find_gpu(device.name, command.variant.root, device.memory_gib):
        return listed.name
    raise MissingPlanError(
        f"no plan for {device.name}: {devices.FILE} does not list this GPU; add its data there"
    )


def compiles_here(command: ServerCommand) -> bool:
    """Whether the command's server finds nvcc, ninja and a C++ compiler on this host or in this Python environment."""
    return command.platform == "cuda" and not cuda_toolkit.missing(command.process_environment())


def find_plan(command: ServerCommand, gpu_name: str) -> Plan:
    """The recorded plan of a command on a device, for the installed version of vLLM and the command's flags.

    Args:
        gpu_name: short name of the GPU model, or cpu.

    Raises:
        MissingPlanError: there is no such plan; the message says how a recorded plan differs, and how to make one.
    """
    name, reason = command.variant.name, ""
    for plan in list_recorded_plans(command.variant.root, name):
        if plan.gpu == gpu_name:
            gpu_here = devices.read_gpus(command.variant.root).get(gpu_name)
            present = rehearsal.digest_inputs(command.variant, gpu_here)
            misfit = _misfit(plan, rehearsal.decisive_flags(command), present)
            if misfit is None:
                return plan
            reason = f" that fits: {misfit}"
    raise MissingPlanError(
        f"no plan of {name} on {gpu_name}{reason}; run `slimqwen plan --variant {name} --gpu {gpu_name} --record`"
    )


def find_recorded_plan(
    server: ServerCommand, warn: Callable[[str], None]
) -> tuple[Plan | None, Sequence[checks.Trouble]]:
    """Look up the recorded plan of a start on this machine.

    Args:
        warn: called with a line for each known trouble that only costs time or memory, and if a GPU has no plan that
            fits.

    Returns:
        The plan (None without one), and the known trouble for which the start is refused; without a plan only trouble
        that follows from the flags.

    Raises:
        ServingError: there is no plan, and REQUIRE_PLAN=1.
    """
    try:
        found = find_plan(server, name_gpu_here(server))
    except MissingPlanError as error:
        if server.variant.require_plan:
            raise ServingError(f"REQUIRE_PLAN=1, but {error}") from None
        # Known trouble on a CPU follows from the flags, so a start there needs no plan.
        if server.platform != "cpu":
            warn(f"{error}.")
        return None, match_flag_trouble(server).dies
    met = match_start_trouble(found, server, compiles=compiles_here(server))
    for line in met.costs:
        warn(f"Known trouble: {line}.")
    return found, met.dies


def match_flag_trouble(command: ServerCommand) -> StartTrouble:
    """Find the known trouble of a start that has no plan, from its flags and this host's GPU alone."""
    device = None if command.platform == "cpu" else gpu.first_gpu()
    plan = Plan(
        variant=command.variant.name,
        gpu=devices.CPU if command.platform == "cpu" else device.name if device else "",
        compute_capability=device.capability if device else None,
        planned="",
        vllm=version("vllm"),
        checkpoint="",
        flags=rehearsal.decisive_flags(command),
        weight_bytes={},
        failed_at=None,
    )
    return match_start_trouble(plan, command, compiles=True)


def match_start_trouble(plan: Plan, command: ServerCommand, *, compiles: bool) -> StartTrouble:
    """Find the known trouble of a start by its plan.

    Args:
        command: the server's command; if it has a baked compile cache that it may load, it needs no compiler.
        compiles: whether the host of the start has nvcc, ninja and a C++ compiler.
    """
    # FlashInfer compiles with nvcc, Humming with the NVRTC of the lock. A cache is baked only after a start from it in
    # which FlashInfer could not compile.
    compiles = compiles or bool(command.cache and command.cache.usable)
    modules = [
        module.model_copy(update={"possible": compiles or not module.module.startswith("FlashInfer")})
        for module in plan.jit
    ]
    plan = plan.model_copy(update={"jit": modules})
    error = f" ({plan.error})" if plan.error else ""
    dies: list[checks.Trouble] = []
    costs: list[str] = []
    for entry in trouble.match_trouble(plan, trouble.read_known_trouble(command.variant.root)):
        fact = f"{plan.gpu}: {entry.description.rstrip('.')}"
        if entry.prevents_start:
            effect = "die" if entry.effect == "dies" else "give other tokens"
            dies.append(checks.Trouble(f"would {effect} on {fact}{error}", entry.instead, entry.evidence))
        elif entry.effect == "costs":
            costs.append(f"{fact}; {entry.instead}")
    return StartTrouble(tuple(dies), tuple(costs))


def expect_facts(plan: Plan, *, required: bool) -> engine_facts.PlanExpectation:
    """Collect the facts of a plan with which a server compares its engine when it starts.

    Facts of a step that the plan did not reach are left out.

    Args:
        required: whether a difference ends the server; otherwise it is logged.
    """
    facts: dict[str, object] = {}
    tolerances: dict[str, float] = {}
    if plan.engine is not None:
        facts |= plan.engine.model_dump()
    if plan.attention:
        facts |= engine_facts.backend_facts(plan.attention)
    if plan.graphs is not None:
        facts["graph_mode"] = plan.graphs.mode
        if plan.engine is not None and plan.engine.model_runner == "V2":
            facts["captured_graphs"] = plan.graphs.captured
    if plan.kv_cache is not None:
        cache = plan.kv_cache
        cache_facts = {
            "kv_blocks": cache.blocks,
            "kv_tokens": cache.tokens,
            "sequences_at_max_model_len": cache.sequences_at_max_model_len,
        }
        facts |= {"block_size": cache.block_size, **cache_facts}
        if plan.gpu != devices.CPU and "kv-cache-memory-bytes" not in plan.flags:
            # The plan assumes the memory beside weights and cache; the start may measure none, or twice as much.
            share = resolution.OVERHEAD_GIB * 2**30 / cache.available_bytes
            tolerances = dict.fromkeys(cache_facts, share)
    return engine_facts.PlanExpectation(
        plan=f"vLLM {plan.vllm} on {plan.gpu}",
        facts=facts,
        tolerances=tolerances,
        required=required,
    )


def _misfit(plan: Plan, flags: Mapping[str, str], inputs: Mapping[str, str]) -> str | None:
    """Why a plan does not fit a start with these decisive flags and inputs; None if it fits."""
    if not is_current(plan):
        return f"the recorded one is for vLLM {plan.vllm}, {plan.gpu} is served by {vllm_on(plan.gpu)}"
    edited = [name for name, digest in plan.inputs.items() if inputs.get(name, digest) != digest]
    if edited:
        return f"the recorded one is of another {' and another '.join(edited)}"
    changed = changed_names(plan.flags, flags)
    if not changed:
        return None
    others = f" and {len(changed) - _LISTED_NAMES} more" if len(changed) > _LISTED_NAMES else ""
    return f"the recorded one has other values of {', '.join(changed[:_LISTED_NAMES])}{others}"
