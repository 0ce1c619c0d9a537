"""Run a variant's recipe and keep how its MTP head learned: a record redistill_mtp and its plot in results/."""

import argparse
import json
import sys

from _console import console, run
from run_recipe import bring_about

from slimqwen import variant
from slimqwen.errors import SlimqwenError
from slimqwen.recipe.redistill_mtp import CURVE
from slimqwen.records import provenance, results
from slimqwen.report import plots


def main() -> int:
    """Run, write the record and its plot, say what was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    one, started = variant.load(parser.parse_args().variant), provenance.utc_now()
    bring_about(one.name)
    file = one.weights / CURVE
    if not file.is_file():
        raise SlimqwenError(f"the recipe of {one.name} has no stage redistill_mtp; choose another variant")
    found = json.loads(file.read_text(encoding="utf-8"))
    del found["schema"]
    record = results.write("redistill_mtp", one, found, command=sys.argv, started=started)
    plots.beside(record)
    before, after = (found[f"acceptance_length_{when}"] for when in ("before", "after"))
    console.print(
        f"acceptance length {before:.3f} -> {after:.3f}; kept: the {found['kept']} head", markup=False
    )
    console.print(f"record: {record.relative_to(one.root)}", markup=False)
    return 0


if __name__ == "__main__":
    run(main)
