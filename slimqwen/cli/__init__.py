"""The command `slimqwen`: a module per group of verbs; the only part of the library that prints."""
