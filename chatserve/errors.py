"""Every error that a caller can cause or must react to, by name.

A request's error (`ChatError`) carries the code of the wire protocol and a sentence for a person that says what was
given and what is allowed. A start-up error carries one line that says what to do. Our own bugs are `assert`s.
"""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar

_SHORT = reprlib.Repr()
"""Shows what anyone may have given: a value as deep or as long as a frame allows costs and breaks nothing."""
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class ChatError(Exception):
    """A request that cannot be done. `fields` travel beside `code` and `detail` on the wire."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, detail: str, **fields: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields


class BadFrameError(ChatError):
    code = "bad_frame"
    http_status = 400


class UnknownTypeError(ChatError):
    code = "unknown_type"
    http_status = 400


class BadParamsError(ChatError):
    code = "bad_params"
    http_status = 400

    @classmethod
    def of(cls, field: str, given: object, allowed: str) -> BadParamsError:
        shown = _SHORT.repr(given)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{field} must be {allowed}, not {shown}", field=field)


class TooLargeError(ChatError):
    code = "too_large"
    http_status = 413

    @classmethod
    def of(cls, field: str, num_bytes: int, max_bytes: int) -> TooLargeError:
        return cls(f"{field} is {num_bytes} bytes of UTF-8; at most {max_bytes} are allowed", field=field)


class NotFoundError(ChatError):
    """Also for what exists but belongs to another user."""

    code = "not_found"
    http_status = 404


class ConflictError(ChatError):
    code = "conflict"
    http_status = 409


class BusyError(ChatError):
    """The message (or parent) named is itself being generated."""

    code = "busy"
    http_status = 409


class ContextOverflowError(ChatError):
    code = "context_overflow"
    http_status = 400

    @classmethod
    def of(cls, prompt_tokens: int, context_tokens: int) -> ContextOverflowError:
        return cls(
            f"the conversation is {prompt_tokens} tokens long and leaves no room for an answer: "
            f"the model reads at most {context_tokens}",
            prompt_tokens=prompt_tokens,
            context_tokens=context_tokens,
        )


class OverloadedError(ChatError):
    """The queue is full; `retry_after_s` says when to come back."""

    code = "overloaded"
    retryable = True
    http_status = 503


class RateLimitedError(ChatError):
    code = "rate_limited"
    retryable = True
    http_status = 429

    @classmethod
    def of(cls, running: int, most: int, retry_after_s: float) -> RateLimitedError:
        """So many answers of one user are being generated."""
        detail = f"{running} answers of yours are being generated; at most {most} at once"
        return cls(detail, retry_after_s=retry_after_s)


class QuotaExceededError(ChatError):
    """A user has as much as one may have; `quota` says of what, `used` and `limit` how much."""

    code = "quota_exceeded"
    http_status = 403

    @classmethod
    def of(cls, quota: str, used: int, limit: int) -> QuotaExceededError:
        told = {
            "sessions": f"you have {used} conversations, and at most {limit} are allowed: delete some",
            "bytes": f"your conversations take {used} bytes, and with this they would take more than the {limit} that "
            "are allowed: delete some",
        }
        return cls(told[quota], quota=quota, used=used, limit=limit)


class StoreUnavailableError(ChatError):
    code = "store_unavailable"
    retryable = True
    http_status = 503


class EngineUnavailableError(ChatError):
    code = "engine_unavailable"
    retryable = True
    http_status = 503


class InternalError(ChatError):
    code = "internal"


class StartupError(Exception):
    """The program cannot start. The message is one line: what is wrong, then what to do."""
