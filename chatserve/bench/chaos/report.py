"""The figures of a chaos run, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.bench.chaos.tally import quantile

if TYPE_CHECKING:
    from chatserve.bench.chaos.run import Outcome


def show(outcome: Outcome) -> None:
    """Print them."""
    tally = outcome.tally
    print(f"{outcome.seconds:.0f} s, {tally.faults.total()} faults, {tally.kills} processes killed")
    print(f"{'fault':18} {'times':>6} {'back after, s: p50':>19} {'p99':>7} {'most':>7}")
    for kind, times in sorted(tally.faults.items()):
        took = tally.recoveries_s.get(kind, [])
        most = max(took, default=float("nan"))
        print(f"{kind:18} {times:6} {quantile(took, 0.5):19.2f} {quantile(took, 0.99):7.2f} {most:7.2f}")
    answers = tally.answers_s
    print(
        f"{len(answers)} requests answered (p50 {quantile(answers, 0.5):.3f} s, p99 {quantile(answers, 0.99):.2f} s, "
        f"most {max(answers, default=0):.1f} s), {tally.resent} sent again; refused and retried: {dict(tally.refusals)}"
    )
    back = tally.reconnects_s
    print(
        f"{len(back)} reconnects (p50 {quantile(back, 0.5):.3f} s, p99 {quantile(back, 0.99):.2f} s), closes by code: "
        f"{dict(tally.closes)}, {tally.snapshots} snapshots"
    )
    print(
        f"{tally.events} events seen, {tally.messages} messages with {tally.characters} characters stored, "
        f"answers by status: {dict(tally.ends)}"
    )
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    print("clean: nothing lost, doubled, out of order or left over" if not outcome.problems else "NOT clean")
