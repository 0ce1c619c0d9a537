"""The command `slimqwen`: one module for each verb or group of verbs; the only part of the library that prints."""

from slimqwen.cli.unexpected import install_hooks

install_hooks()  # before the imports of the other modules, which take a second and may fail
