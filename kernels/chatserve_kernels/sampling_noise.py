"""The random numbers of `chatserve.model.sampler`, on the device: Gumbel noise by (seed, position, token id)."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix_most(x):
    x = (x ^ (x >> 30)) * MIX_1
    return (x ^ (x >> 27)) * MIX_2


@triton.jit
def _mix(x):
    x = _mix_most(x)
    return x ^ (x >> 31)


@triton.jit
def draw_key(words, position):
    """uint64, as `chatserve.model.sampler.draw_keys`."""
    low = tl.load(words + 8).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + 9).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (high << 32) | low
    return _mix(_mix(seed) + (position + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def unfinished_bits(key, ids):
    """64 bits a token of SplitMix64 (Steele, Lea and Flood 2014), counting from the key, but for the last step."""
    return _mix_most(key + (ids + 1).to(tl.uint32, bitcast=True).to(tl.uint64) * GOLDEN)


@triton.jit
def least_complement(unfinished):
    """2^32 (1 - u), as far down as float32 and the unfinished bits put it, for the u that `gumbel_noise` takes."""
    # The last step changes the lowest of the upper 32 bits and none above it.
    return (~(unfinished >> 32).to(tl.uint32) & 0xFFFFFFFE).to(tl.float32)


@triton.jit
def _unit(bits):
    """(the upper 52 bits + 1/2) / 2^52, to float32's relative precision however small."""
    high = (bits >> 32).to(tl.uint32).to(tl.float32)
    low = ((bits >> 12) & 0xFFFFF).to(tl.uint32).to(tl.float32)
    return high * 2.0**-32 + (low + 0.5) * 2.0**-52


@triton.jit
def gumbel_noise(unfinished):
    """-log(-log(u)) for u of the upper 52 bits.

    Near u = 1, where draws are won, log(u) is a series in v = 1 - u, which the complement of the bits gives exactly:
    -log(1 - v) = 2 artanh(v / (2 - v)).
    """
    bits = unfinished ^ (unfinished >> 31)
    v = _unit(~bits)
    s = v / (2.0 - v)
    q = s * s
    series = 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    series = series * q + 1.0
    return -tl.log(tl.where(v < 0.5, 2.0 * s * series, -tl.log(_unit(bits))))
