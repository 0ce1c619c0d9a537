"""`python -m slimqwen.cli` is `slimqwen`."""

from slimqwen.cli.app import main

main()
