"""Words in memory that ranks share, by which one program tells another how far it is.

A release is seen after all that its program wrote before; who acquires it may read that. Moves are
counted in 32 bits and may wrap around: a flag has come if it is at the number awaited or less than
AHEAD beyond it, for a peer is never further ahead than one move.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.language.target_info import is_cuda

GROUPS = tl.constexpr(4)  # steps that a move can be told of
AHEAD = tl.constexpr(8)  # two moves of them


@triton.jit
def words(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def release(address, value):
    """After all that this program has written, to be seen by every GPU. One thread waits for that;
    the others go on."""
    tl.debug_barrier()
    if is_cuda():
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred first;
                .reg .u32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first st.release.sys.global.u32 [$1], $2;
                mov.u32 $0, $2;
            }
            """,
            "=r,l,r",
            [address, value],
            tl.int32,
            False,
            1,
        )
    else:
        tl.atomic_xchg(words(address), value, sem="release", scope="sys")


@triton.jit
def wait(flags, value, wanted, peer, now, patience, failure, seen, WHAT: tl.constexpr):
    """Until the flags at these addresses (M,N) that are wanted have come, or for `patience` ns. ->
    whether they have. If not, says what of which peer is late, and in which move, in `failure` and
    where the host looks."""
    spins = tl.cast(0, tl.int32)
    began = _now(spins)
    late = _late(flags, value, wanted)
    state = _agreed(tl.max(late))
    while state == 1:  # late, and there is time
        late = _late(flags, value, wanted)
        spins += 1
        in_time = _now(spins) - began < patience
        state = _agreed(tl.max(late) * tl.where(in_time, 1, 2))
    if (patience > 0) & (state > 0):
        _blame(failure, words(seen), tl.max(tl.where(late > 0, peer, 0)), now, WHAT)
    tl.debug_barrier()
    return state == 0


@triton.jit
def _agreed(state):
    """The largest that a thread of the program has: each reads flags and clock for itself, and they
    must leave a wait together. A block of as many numbers is spread over all threads."""
    return tl.max(state + tl.zeros([512], tl.int32))


@triton.jit
def _blame(failure, seen, who, now, WHAT: tl.constexpr):
    """The first of all programs to wait in vain says so, in the same words in both places."""
    if tl.atomic_cas(failure + 3, 0, 1) == 0:
        tl.store(seen + 1, who)
        tl.store(seen + 2, now)
        release(seen.to(tl.int64), WHAT)
        tl.store(failure + 1, who)
        tl.store(failure + 2, now)
        release(failure.to(tl.int64), WHAT)


@triton.jit
def _late(flags, value, wanted):
    ahead = _acquire(flags) - value
    return (((ahead < 0) | (ahead >= AHEAD)) & wanted).to(tl.int32)


@triton.jit
def _acquire(addresses):
    if is_cuda():
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [addresses], tl.int32, False, 1
        )
    else:
        return tl.atomic_add(words(addresses), 0, sem="acquire", scope="sys")


@triton.jit
def _now(spins):
    """Nanoseconds; a guess where there is no clock."""
    if is_cuda():
        return globaltimer().to(tl.int64)
    else:
        return spins.to(tl.int64) * 1000
