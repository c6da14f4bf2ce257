"""What the ranks run in :class:`WorldTests`. Each body returns complaints; an empty list means that the world kept
its word.

Bodies are plain functions of a module, so that worlds whose ranks are processes can pickle them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor

from ..errors import RankFailure
from ..world import Begun, Event, Label, PendingExchange, Receive, Redistributed, Send, Summed, Waited, World

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
SIZES = (0, 1, 33, 5_000, 70_001)  # elements: empty, small, and beyond what one packet or buffer holds
LABEL = Label("pass on", "a test")
SUM = Label("sum", "a test")
Complaints = list[str]


def values(rank: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Small whole numbers that differ by rank, and whose sums are exact in every dtype."""
    whole = (torch.arange(size, device="cpu") * 7 + 3 * rank) % 5
    made = torch.complex(whole.double(), whole.double() + 1).to(dtype) if dtype.is_complex else whole.to(dtype)
    return made.to(device)


def same(world: World, actual: Tensor, expected: Tensor) -> bool:
    """Alike in shape, dtype and device; and in values, where the world moves any."""
    alike = (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
    return alike and (not world.capabilities.moves_data or torch.equal(actual, expected))


def everyone(world: World) -> tuple[int, ...]:
    """All ranks."""
    return tuple(range(world.size))


def pass_on(world: World, message: Tensor, label: Label = LABEL) -> PendingExchange:
    """Send to the next rank, and ask for as much from the one before."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    return world.begin([Send(after, message)], [Receive(before, message.numel())], message, everyone(world), label)


def previous(world: World) -> int:
    """The rank before this one, round the ring."""
    return (world.rank - 1) % world.size


# ---- messages ----


def every_dtype(world: World, device: str) -> Complaints:
    """Pass messages of all dtypes and sizes round a ring."""
    complaints = []
    for dtype in DTYPES:
        for size in SIZES:
            (came,) = pass_on(world, values(world.rank, size, dtype, device)).wait()
            if not same(world, came, values(previous(world), size, dtype, device)):
                complaints.append(f"{size} elements of {dtype} came otherwise than they were sent")
    return complaints


def every_layout(world: World, device: str) -> Complaints:
    """Messages that do not lie in a row, or are lazily conjugated or negated."""
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "strided": lambda x: x.repeat_interleave(2)[::2],
        "conjugated": lambda x: x.conj(),
        "imaginary part": lambda x: x.conj().imag,
    }
    complaints = []
    for name, laid_out in layouts.items():
        for size in (1, 1000):
            mine, theirs = (laid_out(values(r, size, torch.complex64, device)) for r in (world.rank, previous(world)))
            (came,) = pass_on(world, mine).wait()
            if not same(world, came, theirs.clone()):
                complaints.append(f"a {name} message of {size} elements came otherwise than it was sent")
    return complaints


def several_at_once(world: World, device: str) -> Complaints:
    """Begun in one order, waited for in another; with each rank, and in both directions at once."""
    peers = [rank for rank in everyone(world) if rank != world.rank]
    pending = []
    for turn in range(12):
        mine = torch.full((1 + 4000 * (turn % 4),), float(100 * turn + world.rank), device=device)
        sends = [Send(peer, mine) for peer in peers]
        receives = [Receive(peer, mine.numel()) for peer in peers]
        pending.append((turn, mine.numel(), world.begin(sends, receives, mine, everyone(world), LABEL)))
    Random(world.rank).shuffle(pending)
    complaints = []
    for turn, size, exchange in pending:
        for peer, came in zip(peers, exchange.wait(), strict=True):
            if not same(world, came, torch.full((size,), float(100 * turn + peer), device=device)):
                complaints.append(f"exchange {turn}: what came from rank {peer} is not what it sent")
        if exchange.wait()[0] is not exchange.wait()[0]:
            complaints.append("waiting again gives something else")
    return complaints


def by_tag(world: World, device: str) -> Complaints:
    """Two messages for one rank, asked for in the other order; two of one tag come in the order in which they went."""
    after, before = (world.rank + 1) % world.size, previous(world)
    first = [(tag, turn) for tag in (5, 7) for turn in (0, 1)]
    other = [(tag, turn) for tag in (7, 5) for turn in (0, 1)]

    def message(rank: int, tag: int, turn: int) -> Tensor:
        return torch.full((9,), 100.0 * rank + 10 * tag + turn, device=device)

    rooms = [torch.empty(9, device=device) for _ in other]
    sends = [(after, message(world.rank, tag, turn), tag) for tag, turn in first]
    world.begin_tagged(sends, [(before, room, tag) for room, (tag, _) in zip(rooms, other, strict=True)], LABEL).wait()
    came = zip(rooms, other, strict=True)
    wrong = [place for room, place in came if not same(world, room, message(before, *place))]
    return [f"another message came than number {turn} of tag {tag}" for tag, turn in wrong]


def before_it_is_asked_for(world: World, device: str) -> Complaints:
    """Messages sent well before their receiver asks for them, beside other traffic."""
    after, before, sizes = (world.rank + 1) % world.size, previous(world), (0, 10, 3_000, 50_000)
    sends = [
        world.begin_tagged([(after, torch.full((size,), float(world.rank), device=device), tag)], [], LABEL)
        for tag, size in enumerate(sizes)
    ]
    world.sum(torch.ones(3, device=device), everyone(world), SUM)
    complaints = []
    for tag, size in reversed(list(enumerate(sizes))):
        room = torch.full((size,), -1.0, device=device)
        world.begin_tagged([], [(before, room, tag)], LABEL).wait()
        if not same(world, room, torch.full((size,), float(before), device=device)):
            complaints.append(f"{size} elements that were sent early came otherwise")
    for send in sends:
        send.wait()
    return complaints


def written_after_the_wait(world: World, device: str) -> Complaints:
    """Once an exchange is waited for, its messages belong to the caller again."""
    complaints = []
    for size in (10, 40_000):
        message = torch.full((size,), float(world.rank), device=device)
        exchange = pass_on(world, message)
        (came,) = exchange.wait()
        message.fill_(-1)
        world.sum(torch.ones(1, device=device), everyone(world), SUM)
        if not same(world, came, torch.full((size,), float(previous(world)), device=device)):
            complaints.append(f"{size} elements changed after the wait")
    if world.begin([], [], torch.ones(1, device=device), everyone(world), LABEL).wait():
        complaints.append("an exchange of nothing brought something")
    return complaints


# ---- sums and other reductions ----


def sums(world: World, device: str, dtypes: tuple[torch.dtype, ...]) -> Complaints:
    """Sum small whole numbers, blocking and not, in all dtypes."""
    complaints = []
    for dtype in dtypes:
        for size in SIZES:
            mine = values(world.rank, size, dtype, device)
            true = sum((values(r, size, dtype, device) for r in everyone(world)[1:]), values(0, size, dtype, device))
            strided = mine.repeat_interleave(2)[::2].clone(memory_format=torch.preserve_format)
            world.begin_sum(strided, everyone(world), SUM).wait()
            for how, total in {"sum": world.sum(mine, everyone(world), SUM), "begin_sum": strided}.items():
                if not same(world, total, true):
                    complaints.append(f"{how} of {size} elements of {dtype} is wrong")
    return complaints


def bits_of_sums(world: World, device: str) -> list[str]:
    """Digests of sums that round, of two runs; each begun before the ones before are waited for."""
    digests = []
    for _ in range(2):
        generator = torch.Generator("cpu").manual_seed(world.rank)
        parts = [torch.randn(size, generator=generator).to(device) * 3.0**world.rank for size in (7, 900, 100_000)]
        digests += [_digest(world.sum(part, everyone(world), SUM)) for part in parts]
        pending = [world.begin_sum(part, everyone(world), Label("gradients", "a test", "gradients")) for part in parts]
        for each in reversed(pending):
            each.wait()
        digests += [_digest(part) for part in parts]
    return digests


def _digest(tensor: Tensor) -> str:
    return "" if tensor.is_meta else hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def among_some(world: World, device: str) -> Complaints:
    """Sums of the first and last rank alone; reductions; a broadcast from the last."""
    complaints = []
    some = (0, world.size - 1)
    if world.rank in some:
        for size in (3, 100_000):
            total = torch.full((size,), float(1 + world.rank), device=device)
            world.begin_sum(total, some, SUM).wait()
            total = world.sum(total, some, SUM)
            if not same(world, total, torch.full((size,), 2.0 * (1 + world.size), device=device)):
                complaints.append(f"a sum of {size} elements over two of the ranks is wrong")
    ones = torch.tensor([1 << world.rank, 7], device=device)
    common = world.combined(~ones, everyone(world), torch.bitwise_and, SUM)
    if not same(world, common, torch.tensor([~((1 << world.size) - 1), ~7], device=device)):
        complaints.append("a reduction by bitwise_and is wrong")
    highest = torch.tensor([1 << (world.size - 1), 7], device=device)
    if not same(world, world.maximum(ones, everyone(world), SUM), highest):
        complaints.append("a maximum is wrong")
    if not same(world, world.broadcast(ones, tuple(reversed(everyone(world))), SUM), highest):
        complaints.append("a broadcast from the last rank is wrong")
    return complaints


# ---- duplicates and events ----


def duplicates(world: World, device: str, wide: bool) -> Complaints:
    """The same tags in both, in the other order; then a thread in each; then one closes."""
    twin, complaints = world.duplicate(wide), []
    theirs = torch.full((50,), 1000.0, device=device)
    in_twin, in_world = pass_on(twin, theirs), pass_on(world, values(world.rank, 50, torch.float32, device))
    if not same(world, in_world.wait()[0], values(previous(world), 50, torch.float32, device)):
        complaints.append("a message of the duplicate came in the original")
    if not same(world, in_twin.wait()[0], theirs):
        complaints.append("a message of the original came in the duplicate")

    def talk(which: World, number: float) -> None:
        """Sums in one of the worlds, beside those of the other thread."""
        for size in (1, 400, 70_000) * 4:
            total = which.sum(torch.full((size,), number, device=device), everyone(world), SUM)
            if not same(world, total, torch.full((size,), number * world.size, device=device)):
                complaints.append(f"two threads, each in a world of its own: a sum of {size} elements is wrong")

    thread = threading.Thread(target=talk, args=(twin, 2.0), daemon=True)
    thread.start()
    talk(world, 1.0)
    thread.join(max(10.0, world.deadline))
    complaints += ["the thread in the duplicate did not end"] * thread.is_alive()
    twin.close()
    talk(world, 3.0)
    return complaints


def events(world: World, device: str) -> Complaints:
    """Each exchange and sum is told with its bytes, and each wait names what it waits for."""
    seen: list[Event] = []
    twin = world.duplicate()
    with world.events.listening(seen.append):
        message = torch.ones(10, dtype=torch.float64, device=device)
        pass_on(world, message).wait()
        twin.begin_sum(message, everyone(world), SUM).wait()
        world.redistributed("gather", LABEL, 80)
    pass_on(world, message).wait()
    twin.close()
    sizes = (((world.rank + 1) % world.size, 80),), ((previous(world), 80),)
    number, moment = [event.number for event in seen], [event.time for event in seen]
    seconds = [getattr(event, "seconds", 0.0) for event in seen]
    if len(seen) == 5 and moment == sorted(moment) and twin.number != world.number:
        expected = [
            Begun(number[0], world.number, moment[0], LABEL, *sizes, torch.float64),
            Waited(number[1], world.number, moment[1], LABEL, number[0], seconds[1]),
            Summed(number[2], twin.number, moment[2], SUM, everyone(world), 80, torch.float64),
            Waited(number[3], twin.number, moment[3], SUM, number[2], seconds[3]),
            Redistributed(number[4], world.number, moment[4], LABEL, "gather", 80),
        ]
        if seen == expected and min(seconds) >= 0:
            return []
    return [f"the events are {seen}"]


# ---- ranks that fail ----


def failure_of(call: Callable[[], object]) -> tuple[str, float]:
    """What the RankFailure of a call says ("" where there is none), and how long it took."""
    began = time.monotonic()
    try:
        call()
    except RankFailure as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def while_one_is_silent(world: World, device: str) -> tuple[str, float]:
    """Rank 1 sleeps past the deadline."""
    return _while_rank_1(lambda: time.sleep(4 * world.deadline), world, device)


def while_one_has_left(world: World, device: str) -> tuple[str, float]:
    """Rank 1 says that it leaves."""
    return _while_rank_1(world.leave, world, device)


def while_one_dies(world: World, device: str) -> tuple[str, float]:
    """Rank 1 ends its process."""
    return _while_rank_1(lambda: os._exit(9), world, device)


def _while_rank_1(fails: Callable[[], object], world: World, device: str) -> tuple[str, float]:
    """The others wait for a message of it."""
    if world.rank == 1:
        fails()
        return "", 0.0
    label, like = Label("fetch", "encoder.conv"), torch.ones(5, device=device)
    return failure_of(lambda: world.begin([], [Receive(1, 5)], like, everyone(world), label).wait())


def on_different_paths(world: World, device: str) -> tuple[str, float]:
    """Ranks 0 and 1 wait for each other at different operations."""
    if world.rank > 1:
        return "", 0.0
    peer, message = 1 - world.rank, torch.ones(5, device=device)
    label, sends, receives = Label(f"operation {world.rank}", "encoder"), [Send(peer, message)], [Receive(peer, 5)]
    return failure_of(lambda: world.begin(sends, receives, message, (0, 1), label).wait())


def the_first_to_come(world: World, device: str) -> Complaints | None:
    """In a wide duplicate. Of two exchanges the second is done first; None where the world cannot tell."""
    twin, like = world.duplicate(wide=True), torch.ones(4, device=device)
    if not twin.capabilities.waits_for_any:
        twin.close()
        return None
    complaints: Complaints = []
    if world.rank == 0:
        slow, fast = (twin.begin_tagged([], [(peer, torch.empty_like(like), 3)], LABEL) for peer in (1, 2))
        end = time.monotonic() + world.deadline
        which = [twin.wait_any([slow, fast], end)]
        fast.wait()
        timer = threading.Timer(0.2, twin.wake)
        timer.start()
        which.append(twin.wait_any([slow], end))
        timer.join()
        twin.begin_tagged([(1, like, 4)], [], LABEL).wait()
        which.append(twin.wait_any([slow], end))
        slow.wait()
        complaints += [] if which == [1, None, 0] else [f"wait_any said {which}, and should have said [1, None, 0]"]
    elif world.rank == 1:
        twin.begin_tagged([], [(0, torch.empty_like(like), 4)], LABEL).wait()
        twin.begin_tagged([(0, like, 3)], [], LABEL).wait()
    elif world.rank == 2:
        twin.begin_tagged([(0, like, 3)], [], LABEL).wait()
    twin.close()
    return complaints


def process_and_capabilities(world: World, device: str) -> tuple[int, object]:
    """This rank's process number, and what its world says of itself."""
    return os.getpid(), world.capabilities


# ---- streams of a GPU ----


def behind_long_work(world: World, device: str, side_stream: bool) -> Complaints:
    """Messages and sums of tensors that the device has yet to compute, and whose memory it has just used otherwise."""
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    complaints = []
    with torch.cuda.stream(stream):
        for turn, late in enumerate(_late_values(world, device)):
            (came,) = pass_on(world, late).wait()
            doubled = came * 2
            total = world.sum(late, everyone(world), SUM)
            summed = late.clone()
            world.begin_sum(summed, everyone(world), SUM).wait()
            true = float(sum(turn + rank for rank in everyone(world)))
            if not bool((doubled == 2 * (turn + previous(world))).all()):
                complaints.append(f"turn {turn}: a message went before its values were computed, or was read too early")
            if not bool((total == true).all() and (summed == true).all()):
                complaints.append(f"turn {turn}: a sum began before its values were computed, or was read too early")
    return complaints


def _late_values(world: World, device: str) -> Iterator[Tensor]:
    """Each is there some milliseconds after it is asked for."""
    square = torch.eye(2048, device=device)
    for turn in range(6):
        product = square
        for _ in range(40):
            product = product @ square
        size = (1000, 200_000)[turn % 2]
        yield torch.full((size,), float(turn + world.rank), device=device) * product[0, 0]
