"""Figures computed, or measured in process, without an HTTP server; also the plan that a start is compared with."""
