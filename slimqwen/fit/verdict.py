"""The verdict of `slimqwen fit` in one line: whether a checkpoint fits on a GPU, and if not, what would make it fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from slimqwen.fit.memory import Fit, ServerSettings, fit_checkpoint, size_checkpoint
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import Subject
from slimqwen.models.families import unshared_heads
from slimqwen.plan.devices import Gpu

_GB = 1e9
_LEAST_CONTEXT_LEN = 1024
"""Shortest context that is worth a suggestion, tokens."""

_NUMBERS_OF_GPUS = (2, 4, 8)


def fit_on_gpus(subject: Subject, settings: ServerSettings, gpus: Iterable[Gpu]) -> dict[str, list[Fit]]:
    """Compute how a checkpoint fits on GPUs: name of the GPU -> as stored, then after each optimisation.

    Raises:
        FamilyError: the model is of no supported family.
        FitError: config.json is unusable, or a packing or dtype is unknown.
    """
    length = subject.family.acceptance_lengths.get(settings.depth)
    sized = [size_checkpoint(step, settings) for step in list_optimised(subject)]
    return {gpu.name: [fit_checkpoint(each, settings, gpu, length) for each in sized] for gpu in gpus}


def give_verdict(subject: Subject, settings: ServerSettings, gpu: Gpu, fits: Sequence[Fit]) -> str:
    """Say in one line whether a checkpoint fits as stored, by how much, and else which recipe or load would.

    Args:
        subject: the checkpoint.
        settings: context and number of sequences that have to fit.
        gpu: data sheet of the GPU.
        fits: how the checkpoint fits as stored, then after each optimisation (`fit_on_gpus`).
    """
    requests = f"{settings.sequences} x {settings.context_len:,} tokens"
    where = f"{subject.name} with {requests} on {settings.gpus if settings.gpus > 1 else 'one'} {gpu.name}"
    first = fits[0]
    if first.fits:
        return f"{where}: fits, {-first.missing_bytes / _GB:.1f} GB left"
    if first.missing_bytes <= 0:
        return (
            f"{where}: fits, but vLLM would take {first.captured_sequences} sequences, which need a state block each, "
            f"and {first.blocks} blocks fit; set VLLM_MAX_NUM_SEQS to at most {first.blocks}"
        )
    needed = next((row for row, fit in enumerate(fits) if fit.fits), None)
    ways = [f"fits {_name_form(fits, needed)}" if needed else "no recipe makes it fit"]
    ways += _suggest_smaller(settings, fits)
    if len(ways) == 1 and not needed:
        ways += _suggest_more_gpus(subject, settings, gpu)
    starts = f" (vLLM starts, with {int(first.full_sequences)} of them at a time)" if first.starts else ""
    return f"{where}: does not fit as stored, {first.missing_bytes / _GB:.1f} GB too much{starts}; {'; '.join(ways)}"


def _name_form(fits: Sequence[Fit], row: int) -> str:
    return f"with {', '.join(fit.optimisation for fit in fits[1 : row + 1])}" if row else "as stored"


def _suggest_smaller(settings: ServerSettings, fits: Sequence[Fit]) -> Iterator[str]:
    """The load that fits as stored; and, where no form takes the whole load, the load of the smallest form."""
    rows = [row for row, fit in enumerate(fits) if list(_smaller_loads(settings, fit))]
    smallest = [] if any(fit.fits for fit in fits) else rows[-1:]
    for row in dict.fromkeys([*(row for row in rows if row == 0), *smallest]):
        yield f"{_name_form(fits, row)} it fits with {' or '.join(_smaller_loads(settings, fits[row]))}"


def _smaller_loads(settings: ServerSettings, fit: Fit) -> Iterator[str]:
    """Options of `slimqwen fit` for fewer sequences, and for a shorter context, with which a form fits."""
    if fit.full_sequences >= 1 and settings.sequences > 1:
        yield f"--sequences {int(fit.full_sequences)}"
    if (length := fit.longest_context(settings.sequences)) >= _LEAST_CONTEXT_LEN:
        yield f"--context {length}"


def _suggest_more_gpus(subject: Subject, settings: ServerSettings, gpu: Gpu) -> Iterator[str]:
    """The least number of these GPUs on which a form fits."""
    for gpus in _NUMBERS_OF_GPUS:
        if gpus > settings.gpus and not unshared_heads(subject.text, gpus):
            fits = fit_on_gpus(subject, replace(settings, gpus=gpus), [gpu])[gpu.name]
            row = next((row for row, fit in enumerate(fits) if fit.fits), None)
            if row is not None:
                yield f"{_name_form(fits, row)} it fits on {gpus} of them with --gpus {gpus}"
                return
