"""The arithmetic of modulo8 and modulo4 on the processor, one pass over memory each, compiled as it is first used.

The rule: a line does what modulo.py, base.py and step.py do in several, in float32 and in their order. Sums of products are
rounded twice, everywhere: what a node reads back is what it sent. Arrays have a row for each block: float32, but for `kept`
(uint16: bfloat16), `records` (uint8, with the values from `ALIGN` on, a byte each) and `high` (int16). Numbers are float32 too,
but for what bounds are made of. A record of four bits a value is packed after it was made, and unpacked before it is read.
"""

# numba has no types
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import math

import numpy as np
from numba import njit

from nolocod.outer.codec.base import ALIGN
from nolocod.outer.codec.modulo import EXACT, FINER, SMALLEST_BOUND

_ABS, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_exactly = njit(cache=True, nogil=True, error_model="numpy")
_about = njit(cache=True, nogil=True, error_model="numpy", fastmath=True)
"""For sums of squares, which may be taken in any order."""


@_exactly
def _wide(kept):
    """bfloat16 as float32."""
    return np.int32(np.int32(kept) << np.int32(16)).view(np.float32)


@_exactly
def _size(value):
    """The bits of its absolute value, which are in the order of what they mean."""
    return np.int32(np.float32(value).view(np.int32) & _ABS)


@_exactly
def _exact(phi, kept, beta, gamma):
    """Our message, before any rounding to the wire."""
    return beta * _wide(kept) + gamma * phi


@_exactly
def pack(low, records):
    """Put values in a byte each into `records` of four bits a value."""
    for row in range(len(low)):
        ours, record = low[row], records[row]
        for i in range((ours.size - ALIGN) // 2):
            record[ALIGN + i] = ours[ALIGN + 2 * i] | ours[ALIGN + 2 * i + 1] << np.uint8(4)
        if ours.size & 1:
            record[(ours.size + ALIGN) // 2] = ours[ours.size - 1]


@_exactly
def unpack(records, low):
    """And back."""
    for row in range(len(low)):
        theirs, record = low[row], records[row]
        for i in range((theirs.size - ALIGN) // 2):
            theirs[ALIGN + 2 * i] = record[ALIGN + i] & np.uint8(15)
            theirs[ALIGN + 2 * i + 1] = record[ALIGN + i] >> np.uint8(4)
        if theirs.size & 1:
            theirs[theirs.size - 1] = record[(theirs.size + ALIGN) // 2] & np.uint8(15)


@_exactly
def encode(phi, kept, known, beta, gamma, own, bits, records, high, bounds, s):
    """Put our message in whole steps, less what is left out of it, into `records`, and that into `high`. False where a block is
    to travel as bfloat16; `bounds` are those before it then: what is `known` of the distance, and `own` times our largest
    change (float64). `s` is scratch, of one block."""
    steps, mask = np.int32(1 << bits - 1), np.int32((1 << bits) - 1)
    for row in range(len(phi)):
        most = most_change = np.int32(0)
        for i in range(s.size):
            s[i] = _exact(phi[row, i], kept[row, i], beta, gamma)
            most = max(most, _size(s[i]))
            most_change = max(most_change, _size(_wide(kept[row, i])))
        change, least = np.int32(most_change).view(np.float32), np.int32(most).view(np.float32) * steps / EXACT
        bound = max(known[row] + own * change, least, SMALLEST_BOUND)
        if not known[row] >= 0 or bound > FINER * math.sqrt(_squares(s) / s.size):
            return False
        bounds[row] = np.float32(bound)
        scale, low = np.float32(steps / np.float64(bounds[row])), records[row]
        for i in range(s.size):
            whole = np.int32(np.rint(s[i] * scale))
            low[ALIGN + i] = np.uint8(whole & mask)
            high[row, i] = np.int16(whole >> np.int32(bits))
    return True


@_about
def _squares(values):
    total = np.float32(0)
    for i in range(values.size):
        total += values[i] * values[i]
    return np.float64(total)


@_about
def _kept_squares(values):
    total = np.float32(0)
    for i in range(values.size):
        value = _wide(values[i])
        total += value * value
    return np.float64(total)


@_exactly
def _own(s, scale, step):
    """Our message, as both read it."""
    return np.rint(s * scale) * step


@_exactly
def _left_out(s, part, half):
    """Of the partner's message, by our own: `part` is what came, over 256 or 16, and `half` a half over the bound."""
    return np.rint(s * half - part)


@_exactly
def compare(phi, kept, records, beta, gamma, share, numbers, high, found, difference):
    """Put what is left out of the partner's message into `high`; and into `found` the norms of our message less the partner's,
    and of our change, and the largest of the first. `numbers`: of each row, as Fused has them; `share`: of 1 that is
    one of what came. `difference` is scratch, of one block."""
    for row in range(len(phi)):
        scale, step, half, twice = numbers[row]
        low, most = records[row], np.int32(0)
        for i in range(difference.size):
            s = _exact(phi[row, i], kept[row, i], beta, gamma)
            part = np.float32(low[ALIGN + i]) * share
            whole = _left_out(s, part, half)
            high[row, i] = np.int16(np.int32(whole))
            difference[i] = _own(s, scale, step) - (whole + part) * twice
            most = max(most, _size(difference[i]))
        found[row, 0], found[row, 1] = math.sqrt(_squares(difference)), math.sqrt(_kept_squares(kept[row]))
        found[row, 2] = np.int32(most).view(np.float32)


@_exactly
def take_step(phi, delta, kept, records, beta, gamma, alpha, share, numbers, weight):
    """The paired outer step on `phi` and `delta`; `kept` becomes what theta is still to get. `weight`: what the partner's
    difference counts for."""
    two, mean = np.float32(2), np.float32(0.5)
    for row in range(len(phi)):
        scale, step, half, twice = numbers[row]
        low = records[row]
        for i in range(phi.shape[1]):
            s = _exact(phi[row, i], kept[row, i], beta, gamma)
            part = np.float32(low[ALIGN + i]) * share
            other = (_left_out(s, part, half) + part) * twice
            total = (two - weight) * _own(s, scale, step) + weight * other
            late = np.float32(mean * total - s).view(np.int32)
            delta[row, i] = alpha * delta[row, i] + mean * total - gamma * phi[row, i]
            phi[row, i] += delta[row, i]
            kept[row, i] = np.uint16((late + np.int32(0x7FFF) + ((late >> np.int32(16)) & np.int32(1))) >> np.int32(16))


@_exactly
def keep(theta, phi, noise, kept):
    """Put theta - phi of a block into `kept`, rounded with `noise` (int32, base.py). False if it is not finite."""
    most = np.int32(0)
    for i in range(theta.size):
        change = theta[i] - phi[i]
        most = max(most, _size(change))
        kept[i] = np.uint16((np.float32(change).view(np.int32) + noise[i]) >> np.int32(16))
    return most < _INFINITE


@_exactly
def add(theta, kept):
    """Add what is kept of a block to theta."""
    for i in range(theta.size):
        theta[i] += _wide(kept[i])
