"""Intervals and non-inferiority verdicts; nothing here knows what was measured."""
