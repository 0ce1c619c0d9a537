"""Make every recorded plan of a GPU anew, as after an upgrade of vLLM; needs the environment of PLATFORM=cuda.

One process a GPU imports vLLM and forks for each variant. Plans that are made lie in .cache/renewed-plans, so that a
second run goes on; the records are written when all are there.
"""

import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.identity import source
from slimqwen.plan import record, rehearsal
from slimqwen.plan.devices import CPU, read_gpus
from slimqwen.plan.facts import Plan
from slimqwen.records import provenance


def main(*wanted: str) -> None:
    """Make the plans for the named GPUs, or for all."""
    root, started = variants.repository_root(), provenance.utc_now()
    planned = {
        name: [plan.gpu for plan in record.list_recorded_plans(root, name) if plan.gpu != CPU]
        for name in variants.names(root)
    }
    code = source.reach("slimqwen.plan.rehearsal.main").digest[:12]
    folder = root / ".cache" / "renewed-plans" / f"{version('vllm')}-{code}"
    by_gpu: dict[str, list[str]] = defaultdict(list)
    for name, gpus in planned.items():
        for gpu in gpus:
            if not _kept(folder, name, gpu).is_file() and (not wanted or gpu in wanted):
                by_gpu[gpu].append(name)
    for gpu, names in by_gpu.items():
        log = root / "logs" / f"renew-plans-{gpu}.log"
        subjects = [variants.load(name, root) for name in names]
        for plan in rehearsal.rehearse_variants(subjects, read_gpus(root)[gpu], log=log):
            file = _kept(folder, plan.variant, gpu)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(plan.model_dump_json())
            print(f"{gpu}: {plan.variant}: {plan.error or 'planned'}", flush=True)
    missing = [
        gpu for name, gpus in planned.items() for gpu in gpus if not _kept(folder, name, gpu).is_file()
    ]
    if missing:
        print(f"to go: {len(missing)} plans, on {', '.join(sorted(set(missing)))}")
        return
    for name, gpus in planned.items():
        plans = [Plan.model_validate_json(_kept(folder, name, gpu).read_bytes()) for gpu in gpus]
        if plans:
            subject = variants.load(name, root)
            print(record.write_plans(subject, plans, command=sys.argv, started=started))


def _kept(folder: Path, name: str, gpu: str) -> Path:
    return folder / gpu / f"{name}.json"


if __name__ == "__main__":
    main(*sys.argv[1:])
