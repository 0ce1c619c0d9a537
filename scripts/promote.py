"""Promote a variant whose gate passed on its present checkpoint: status, and a model card in the checkpoint."""

import argparse

from _console import console, run
from _readmes import bring_up_to_date

from slimqwen import promotion, variant


def main() -> int:
    """Parse, promote, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    one = variant.load(parser.parse_args().variant)
    promoted = promotion.promote(one)
    gate = promoted.gate.relative_to(one.root)
    if not promoted.changed:
        console.print(f"{one.name} is promoted already, by {gate}; nothing changed", soft_wrap=True)
        return 0
    console.print(f"{one.name} is promoted, by {gate}", soft_wrap=True)
    if promoted.card:
        console.print(f"model card: {promoted.card.relative_to(one.root)}", soft_wrap=True)
    else:
        console.print(f"no model card: no recipe made {one.weights.relative_to(one.root)}", soft_wrap=True)
    bring_up_to_date(one.root)
    return 0


if __name__ == "__main__":
    run(main)
