"""What may be wrong with a submit: a client's mistake must not reach the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from chatserve.errors import BadParamsError
from chatserve.types import validate_params

if TYPE_CHECKING:
    from chatserve.engine.messages import Submit


def fault_of(submit: Submit, num_tokens: int, vocab_size: int) -> str | None:
    """A sentence that says what was given and what is allowed; None: nothing is wrong.

    `num_tokens` are the base's and the new ones together; those of the base were checked when they were new.
    """
    ids = submit.token_ids
    fault = None
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        fault = f"token id {bad} is outside the vocabulary of {vocab_size}"
    elif not 0 < submit.num_prompt_tokens <= num_tokens:
        fault = f"num_prompt_tokens must be from 1 to {num_tokens}, not {submit.num_prompt_tokens}"
    elif not 0 <= submit.num_shared_tokens <= num_tokens:
        fault = f"num_shared_tokens must be from 0 to {num_tokens}, not {submit.num_shared_tokens}"
    elif submit.sampling.seed is None:
        fault = "sampling.seed must be set"
    else:
        try:
            validate_params(msgspec.structs.asdict(submit.sampling))
        except BadParamsError as error:
            fault = error.detail
    return fault
