"""What a config.env says about serving that no flag of vLLM says: from `launch` to what runs inside vLLM's process."""

import os

from pydantic import BaseModel, ConfigDict

from slimqwen.variant import Variant

VARIABLE = "SLIMQWEN_POLICY"


class Policy(BaseModel):
    """Decided by the variant, followed by what runs inside vLLM's process.

    Attributes:
        require_warmup: end the server where its warm-up fails, rather than serve cold.
        max_body_bytes: of a request.
        thinking_token_budget: of a request that names none; None for no end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    require_warmup: bool = False
    max_body_bytes: int = 16 << 20
    thinking_token_budget: int | None = None


def of(variant: Variant) -> Policy:
    """The policy that a variant's own keys say."""
    given = {key: setting.value for key, setting in variant.settings.items()}
    fields = {name: given[name.upper()] for name in Policy.model_fields if name.upper() in given}
    return Policy.model_validate(fields)


def read() -> Policy:
    """The policy of the server that this process is."""
    return Policy.model_validate_json(os.environ.get(VARIABLE, "{}"))
