"""What the warps of `attend_hopper_kernel` agree on: whose turn a stage of a ring is, and what an item says."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The place in a ring after this one: a barrier's phase is the parity of the round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def read_item(items, item, last_item):
    """An item's fields, or zeros past the last one: each is read while the one before it is worked on."""
    is_there = item < last_item
    fields = items + item * 5
    return (
        gl.load(fields, mask=is_there, other=0),
        gl.load(fields + 1, mask=is_there, other=0),
        gl.load(fields + 2, mask=is_there, other=0),
        gl.load(fields + 3, mask=is_there, other=0),
        gl.load(fields + 4, mask=is_there, other=0),
    )
