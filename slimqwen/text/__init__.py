"""Text that slimqwen reads: corpora, the calibration mix, prompts of exact length."""
