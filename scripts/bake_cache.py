"""Run a variant's recipe up to and including the packing of its compile cache."""

import argparse

from _console import run
from run_recipe import bring_about


def main() -> int:
    """Parse the variant's name and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    return bring_about(parser.parse_args().variant, until="bake_cache")


if __name__ == "__main__":
    run(main)
