"""A variant as it is served."""

from tests.serving.conftest import servable  # noqa: F401  (a fixture)
