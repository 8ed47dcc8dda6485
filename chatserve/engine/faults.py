"""What may be wrong with a submit: a client's mistake must not reach the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from chatserve.errors import BadParamsError
from chatserve.types import validate_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.engine.messages import Hint, Submit


def fault_of(submit: Submit, num_tokens: int, vocab_size: int) -> str | None:
    """A sentence that says what was given and what is allowed; None: nothing is wrong.

    `num_tokens` are the base's and the new ones together; those of the base were checked when they were new.
    """
    fault = _fault_of_ids(submit.token_ids, vocab_size)
    if fault is not None:
        return fault
    if not 0 < submit.num_prompt_tokens <= num_tokens:
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


def fault_of_hint(hint: Hint, num_tokens: int, vocab_size: int) -> str | None:
    """As `fault_of`."""
    fault = _fault_of_ids(hint.token_ids, vocab_size)
    if fault is None and not 0 <= hint.num_shared_tokens <= num_tokens:
        fault = f"num_shared_tokens must be from 0 to {num_tokens}, not {hint.num_shared_tokens}"
    if fault is None and not 0 <= hint.num_draft_tokens <= num_tokens:
        fault = f"num_draft_tokens must be from 0 to {num_tokens}, not {hint.num_draft_tokens}"
    return fault


def _fault_of_ids(token_ids: Sequence[int], vocab_size: int) -> str | None:
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return None
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    return f"token id {bad} is outside the vocabulary of {vocab_size}"
