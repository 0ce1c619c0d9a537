"""List the variants: hypothesis, baseline, whether the weights are there, latest figures."""

from _console import console, run

from slimqwen import variant
from slimqwen.report import tables


def main() -> int:
    """Print the table that the README carries, with the state of this checkout's weights."""
    console.print(tables.variants_table(variant.repository_root(), with_weights=True).as_rich())
    return 0


if __name__ == "__main__":
    run(main)
