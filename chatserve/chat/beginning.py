"""From a stored message to a run at the engine: its prompt, what it has already, and how its tokens become text."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from chatserve.chat.detokenizer import Detokenizer, OutputText
from chatserve.chat.generation import Generation
from chatserve.chat.run import Run
from chatserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.chat.live_session import LiveSession
    from chatserve.chat.prompt import PromptEncoder
    from chatserve.chat.store import MessageRecord


def make_generation(
    live: LiveSession,
    record: MessageRecord,
    encoder: PromptEncoder,
    *,
    on_change: Callable[[Generation], None],
    monotonic: Callable[[], float],
) -> Generation:
    """A generation of a message that is in the tree with status generating, and whose path is encoded; its run is not
    submitted yet. Where the message has tokens of this attempt already, it goes on after them: seed and position decide
    each token, so it is the same text.
    """
    path = live.tree.path(record.message)
    *before, _ = path
    prompt_ids = (
        *chain.from_iterable(message.token_ids for message in before),
        *record.token_ids[: record.num_kept_tokens],
    )
    sampling = SamplingParams.merge(record.params, {"seed": record.seed})
    detokenizer = Detokenizer(encoder.tokenizer.bytes_of, skip_prefix="" if record.token_ids else encoder.answer_prefix)
    detokenizer.resume(record.token_ids)
    generation = Generation(
        user=live.user,
        session=live.session,
        fence=live.fence,
        record=record,
        output=OutputText(detokenizer, (*sampling.stop, *encoder.stop_strings), encoder.encode_continuation),
        on_change=on_change,
        monotonic=monotonic,
    )
    generation.run = Run(
        # The fence: an earlier owner's request may still be with the same engine.
        name=f"{record.message}.{record.attempt}.{live.fence}",
        user=live.user,
        prompt_ids=prompt_ids,
        num_shared_tokens=encoder.num_shared_tokens(live.record.system, path[0].token_ids),
        sampling=sampling,
        stop_token_ids=encoder.stop_token_ids,
        base=next((live.paths[m.message] for m in reversed(path) if m.message in live.paths), None),
        listener=generation,
        output_ids=record.token_ids[record.num_kept_tokens :],
        has_started=generation.has_started,
        is_promised=True,
    )
    return generation
