"""What a hint is worth, and what it costs others: the first token of a turn that was typed, and the steps of those who
run meanwhile.

Drives the engine in this process, without sockets. The history is random token ids, on the host when the turn comes;
the message is text, of which the engine was hinted what the page would have hinted: the words before the last. The time
between the hint and the turn is not counted, as nobody waits in it. For the cost, sessions decode with and without
drafts beside them, in turns; on a CPU their steps are measured in processor time, which other programs do not change.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatserve.bench.turn import USER, Driver
from chatserve.chat.prompt import PromptEncoder
from chatserve.config import EngineSettings
from chatserve.engine.build import build_engine
from chatserve.engine.messages import Hint, Inspect, PathRef, Submit
from chatserve.model.catalog import pull, resolve
from chatserve.model.runner import build_runner
from chatserve.supervisor.paths import default_cache_dir
from chatserve.types import RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.engine.engine import Engine

_SENTENCE = (
    "could you please tell me how the harbour changed after the new lighthouse was built and which of the families "
    "that had lived near the old pier moved away because of the storms in that winter"
)
_STEPS = 40


def hint(path: PathRef | None, draft: Sequence[int], user: UserId = USER) -> Hint:
    return Hint(user=user, key="chat", base=path, token_ids=tuple(draft), num_draft_tokens=len(draft))


def message_of(encoder: PromptEncoder, num_tokens: int) -> str:
    """Words that make a turn of about so many tokens."""
    words = itertools.cycle(_SENTENCE.split())
    text = next(words)
    while len(encoder.encode_turn(text)) < num_tokens:
        text += " " + next(words)
    return text


def run(
    history: int = 2_000, draft: int = 120, sessions: int = 4, repeats: int = 5, model: str = "smollm2-135m"
) -> dict[str, Any]:
    """Median seconds to the first token with and without a hint; mean seconds of a step with and without drafts."""
    cache_dir = default_cache_dir()
    model_dir = Path(resolve(model, cache_dir) or pull(model, cache_dir, lambda *_: None))
    blocks = -(-(history + 4 * draft) // 16) + 2
    settings = EngineSettings(
        model_dir=model_dir,
        model_name=model,
        kv_cache_memory=f"{2 * blocks}blocks",
        host_cache_memory=f"{8 * blocks}blocks",
    )
    runner = build_runner(settings)
    engine = build_engine(settings, runner)
    driver = Driver(engine)
    encoder = PromptEncoder(model_dir)
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1_000, runner.vocab_size) for _ in range(count)]

    text = message_of(encoder, draft)
    hinted, sent = encoder.encode_turn_draft(text), encoder.encode_turn(text)
    times: dict[str, list[float]] = {"hinted": [], "not hinted": []}
    driver.first_token(None, tokens(draft))
    for _ in range(repeats):
        for case, seconds in times.items():
            _, end = driver.first_token(None, tokens(history))
            for _ in range(2):  # push it out to the host
                driver.first_token(None, tokens(history))
            if case == "hinted":
                engine.handle(hint(end.path, hinted))
                _run_dry(engine)
            seconds.append(driver.first_token(end.path, sent)[0])
    return {
        "model": model,
        "device": str(runner.device),
        "history": history,
        "sent": len(sent),
        "hinted": len(hinted),
        "seconds": {case: statistics.median(seconds) for case, seconds in times.items()},
        "all": times,
        "sessions": sessions,
        "step": _beside(engine, sessions, repeats, tokens),
    }


def _beside(engine: Engine, sessions: int, repeats: int, tokens: Any) -> dict[str, float]:
    """Mean seconds of a step in which `sessions` decode, alone and with drafts that never end beside them."""
    steps: dict[str, list[float]] = {"alone": [], "beside drafts": []}
    clock = time.process_time if engine.info.device == "cpu" else time.perf_counter
    typist = UserId("typist")
    for number in range(repeats):
        for case, seconds in steps.items():
            for session in range(sessions):
                engine.handle(_decode(f"{case} {number} {session}", tokens(128)))
            while engine.report(Inspect(0)).counters["output_tokens"] < 1 or engine.report(Inspect(0)).waiting:
                engine.step()
            for _ in range(4):  # all are past their prompts
                engine.step()
            if case == "beside drafts":
                engine.handle(hint(None, tokens(16 * (_STEPS + 8)), typist))
            for _ in range(_STEPS):
                start = clock()
                engine.step()
                seconds.append(clock() - start)
            engine.handle(hint(None, (), typist))
            _run_dry(engine)
    return {case: statistics.mean(seconds) for case, seconds in steps.items()}


def _decode(name: str, prompt: Sequence[int]) -> Submit:
    return Submit(
        request_id=RequestId(name),
        user=USER,
        base=None,
        token_ids=tuple(prompt),
        num_shared_tokens=0,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=_STEPS + 10, seed=0),
        stop_token_ids=(),
    )


def _run_dry(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="chatserve bench typing", description=__doc__)
    parser.add_argument("--history", type=int, default=2_000, help="tokens before the turn")
    parser.add_argument("--draft", type=int, default=120, help="tokens of the message, about")
    parser.add_argument("--sessions", type=int, default=4, help="sessions that decode beside drafts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args(argv)
    results = run(options.history, options.draft, options.sessions, options.repeats, options.model)
    seconds, step = results["seconds"], results["step"]
    print(
        f"{results['model']} on {results['device']}: {results['sent']} new tokens on {results['history']:,} that are "
        f"on the host, {results['hinted']} of them hinted"
    )
    sooner = seconds["not hinted"] / seconds["hinted"]
    for case, value in seconds.items():
        print(f"  {case:10}: first token after {value * 1e3:8.1f} ms")
    print(f"  {sooner:.1f} times sooner with a hint")
    slower = step["beside drafts"] / step["alone"] - 1
    print(
        f"a step of {results['sessions']} who decode: {step['alone'] * 1e3:.1f} ms alone, {slower:+.0%} beside drafts"
    )
