"""The interface between the library and a transport: exchange messages between ranks, sum, duplicate, close.

Every message has a tag made of its place in the sequence, the operation, the line of the program that asked for it, and
its size. Ranks that take different paths through the program wait for tags that no other rank sends: values are never
mixed up, and where two such messages meet, both ranks raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._torch_private import count_in_checkpoint
from ..errors import MeshError
from .caller import LauncherCalls, call_path, describe_path
from .capabilities import Capabilities
from .events import Begun, Event, EventStream, Label, Redistributed, Summed, Traffic, Waited
from .pending import DONE, PendingExchange, PendingSum
from .tags import counted_tag, size_bits, sum_tag


class Send(NamedTuple):
    """A message to a rank. It must not change before the exchange has been waited for."""

    peer: int
    message: Tensor


class Receive(NamedTuple):
    """A message of so many elements that a rank will send; its dtype and device are those of ``like``."""

    peer: int
    elements: int


Outgoing = tuple[int, Tensor, int]  # peer, message, tag
Incoming = tuple[int, Tensor, int]  # peer, buffer, tag
Combine = Callable[[Tensor, Tensor], Tensor]
CHANNELS = ("moves", "control", "gradients")

FEW = 8  # ranks among which a message from each to each other takes less time than rounds of messages
_LARGE = 1 << 18  # bytes from which the transport's own sum beats recursive doubling


class Tape(Protocol):
    """Replaces a world's ``begin``, ``sum`` and ``maximum``: records their results, or plays them back.

    Recomputation of a checkpointed part of a model uses it, so that nothing is sent twice.
    """

    def begin(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        like: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        path: int | None = None,
    ) -> PendingExchange:
        """As :meth:`World.begin`."""

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """As :meth:`World.sum`."""

    def maximum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """As :meth:`World.maximum`."""


class World(ABC):
    """The ranks of a run as one rank sees them.

    A transport implements ``post``, ``complete`` and ``_duplicate``; ``post_sum`` and ``complete_sum`` if it can sum
    faster than by messages, and ``close`` if it has something to release. The other methods that do nothing here are
    optional. ``halocline.testing.WorldTests`` checks an implementation.

    Only one thread at a time may use a world; another thread makes a duplicate. All ranks of an exchange or a sum call
    the same methods in the same order.
    """

    capabilities: Capabilities

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.traffic = Traffic()
        self.share_events(EventStream())
        self.overlap = True  # False: every exchange is waited for as soon as it has begun
        self.engines = 0  # gradient averages made so far, in the same order on every rank
        self.samples: Counter[tuple[int, ...]] = Counter()  # calls of ``hc.shard`` so far, by group of ranks
        self.launcher_calls: LauncherCalls | None = None  # the outermost calls of the stack, if ranks differ in them
        self.tape: Tape | None = None
        self._turns: Counter[tuple[int, ...]] = Counter()
        self._sums: Counter[tuple[str, tuple[int, ...]]] = Counter()

    # What a transport implements ------------------------------------------------------------------------------------

    @abstractmethod
    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        """Start the sends and receives, and return what ``complete`` needs. Does not wait for other ranks.

        Messages have any dtype, size (0 included) and device. They may be changed once ``complete`` has returned.
        """

    @abstractmethod
    def complete(self, posted: Any, label: Label) -> None:
        """Wait until the sends are taken and the buffers are filled; RankFailure at the deadline."""

    @abstractmethod
    def _duplicate(self, wide: bool) -> World:
        """A world of the same ranks with connections of its own. Called by all ranks together."""

    def _duplicate_among(self, members: tuple[int, ...], wide: bool) -> World:
        """As ``_duplicate``, called by ``members`` alone. Optional."""
        if len(members) == self.size:
            return self._duplicate(wide)
        told = f"{len(members)} of {self.size} ranks: run with transport='torch', or let them use the whole mesh"
        raise MeshError(f"{type(self).__name__} makes second worlds for all ranks only, and these are {told}")

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
        """Start to sum ``tensor`` over ``ranks`` in place, with the same bits on each; returns what ``complete_sum``
        needs.

        This default sends from all to all, and each rank adds in the order of ranks.
        """
        self._sums[label.channel, ranks] += 1
        tag = sum_tag(self._sums[label.channel, ranks], ranks, label.operation, label.channel, tensor)
        parts = {peer: torch.empty_like(tensor) for peer in ranks if peer != self.rank}
        sends = [(peer, tensor, tag) for peer in parts]
        return tensor, ranks, parts, self.post(sends, [(peer, part, tag) for peer, part in parts.items()], label)

    def complete_sum(self, posted: Any, label: Label) -> None:
        """Wait until the posted tensor holds the sum; RankFailure at the deadline."""
        tensor, ranks, parts, messages = posted
        self.complete(messages, label)
        parts[self.rank] = tensor
        total = parts[ranks[0]].clone()
        for rank in ranks[1:]:
            total += parts[rank]
        tensor.copy_(total)

    def set_deadline(self, seconds: float) -> None:
        """Set the seconds that any wait for another rank may take."""
        self.deadline = seconds

    def close(self) -> None:  # noqa: B027
        """Release process groups, threads and sockets. By all ranks together, with nothing under way."""

    def leave(self) -> None:  # noqa: B027
        """After an error: let ranks that wait for this one fail now, and not at their deadline."""

    def wait_any(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        """Wait until one of these is done and return its index; None after :meth:`wake`. RankFailure at ``end``."""
        under_way[0].wait()
        return 0

    def wake(self) -> None:  # noqa: B027
        """From another thread: end the wait of a thread in :meth:`wait_any`."""

    def connect(self, peers: Sequence[int]) -> None:  # noqa: B027
        """Connect with ``peers`` before the first message. By all ranks together."""

    def limit_unsent(self, size: int) -> None:  # noqa: B027
        """Keep at most about ``size`` unsent bytes in buffers without priorities, such as the kernel's."""

    # Exchanges ------------------------------------------------------------------------------------------------------

    def begin(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        like: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        path: int | None = None,
    ) -> PendingExchange:
        """Start an exchange among ``ranks``, the same tuple on each of them: their exchanges are counted by it.

        ``like`` gives dtype and device of the messages. ``path`` is the caller's :meth:`path`, if it is known already.
        """
        if self.tape is not None:
            return self.tape.begin(sends, receives, like, ranks, label, path)
        self._turns[ranks] += 1
        path = self.path(label) if path is None else path
        tag, dtype = counted_tag(self._turns[ranks], ranks, label.operation, path), like.dtype
        outgoing = [(peer, message, tag | size_bits(message.numel(), dtype)) for peer, message in sends]
        incoming = [
            (peer, torch.empty(elements, dtype=dtype, device=like.device), tag | size_bits(elements, dtype))
            for peer, elements in receives
        ]
        return self.begin_tagged(outgoing, incoming, label)

    def next_crossing(self, old: tuple[int, ...], new: tuple[int, ...]) -> str:
        """A key for a movement from some ranks to others, who count those between the same two sets alike."""
        ranks = (-3, *old, -3, *new)
        self._turns[ranks] += 1
        return f"{self._turns[ranks]} {old} {new}"

    def begin_tagged(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], label: Label) -> PendingExchange:
        """Start an exchange into existing buffers. The caller makes sure that no other messages have its tags."""
        number, dtype = next(self.events.numbers), (incoming or outgoing or _NOTHING)[0][1].dtype
        sizes = _sizes(outgoing), _sizes(incoming)
        self.emit(Begun(number, self.number, self.events.clock(), label, *sizes, dtype))
        buffers = [buffer for _, buffer, _ in incoming]
        return PendingExchange(self, self.post(outgoing, incoming, label), buffers, label, number)

    def path(self, label: Label) -> int:
        """A hash of the user's calls that led here; 0 for communication that the library does by itself."""
        return call_path(self.launcher_calls) if label.channel == "moves" else 0

    def called(self, label: Label) -> str:
        """For errors: the operation, and the line of the user's program that called it."""
        text = describe_path(call_path(self.launcher_calls))
        return f"{label}, called at {text}" if text else str(label)

    # Sums and other reductions --------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The sum over ``ranks`` as a new tensor, with the same bits on each of them."""
        if self.tape is not None:
            return self.tape.sum(tensor, ranks, label)
        if len(ranks) == 1:
            return tensor
        if tensor.nbytes < _LARGE:
            result = self._double(tensor, ranks, torch.add, label)
        else:
            meeting = self.begin_meeting(ranks, label, str(tuple(tensor.shape)), tensor.device)
            result = tensor.clone(memory_format=torch.contiguous_format)
            meeting.wait()
            self.begin_sum(result, ranks, label).wait()
        count_in_checkpoint()
        return result

    def begin_meeting(self, ranks: tuple[int, ...], label: Label, detail: str, device: torch.device) -> PendingExchange:
        """Begin to check, by small messages that have tags, that all ranks mean the large sums that follow.

        Wait for it before the first of these sums begins. No rank's wait ends well unless all ranks mean the same.
        """
        message, label = torch.ones(1, device=device), label._replace(operation=f"{label.operation}{detail}")
        if len(ranks) <= FEW:
            return self.begin_telling(message, ranks, label)
        self._double(message, ranks, torch.add, label)
        return PendingExchange(self, DONE, [], label, 0)

    def begin_telling(self, message: Tensor, ranks: tuple[int, ...], label: Label) -> PendingExchange:
        """Begin to send a small message to all other ranks, in one round; its wait returns theirs, in their order."""
        others = [rank for rank in ranks if rank != self.rank]
        sends, receives = [Send(rank, message) for rank in others], [Receive(rank, message.numel()) for rank in others]
        return self.begin(sends, receives, message, (*ranks, -1), _reduction(label), self.path(label))

    def begin_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> PendingSum:
        """Begin to sum ``tensor`` in place. All ranks must begin the sums of a channel in the same order."""
        number, size = next(self.events.numbers), tensor.nbytes
        self.emit(Summed(number, self.number, self.events.clock(), label, ranks, size, tensor.dtype))
        return PendingSum(self, DONE if len(ranks) == 1 else self.post_sum(tensor, ranks, label), label, number)

    def maximum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The maximum over ``ranks``, element by element."""
        if self.tape is not None:
            return self.tape.maximum(tensor, ranks, label)
        return self.combined(tensor, ranks, torch.maximum, label)

    def combined(self, tensor: Tensor, ranks: tuple[int, ...], combine: Combine, label: Label) -> Tensor:
        """Combine the tensors of ``ranks`` by a function that is associative, commutative and elementwise."""
        result = self._double(tensor, ranks, combine, label)
        count_in_checkpoint()
        return result

    def broadcast(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The tensor of ``ranks[0]`` on all ``ranks``, sent along a binomial tree."""
        me, step = ranks.index(self.rank), 1
        value = tensor.reshape(-1)
        while step < len(ranks):
            if step <= me < 2 * step:
                value = self._swap(value, ranks, receive_from=me - step, label=label)
            elif me < step and me + step < len(ranks):
                self._swap(value, ranks, send_to=me + step, label=label)
            step *= 2
        return value.view(tensor.shape)

    def _double(self, tensor: Tensor, ranks: tuple[int, ...], combine: Combine, label: Label) -> Tensor:
        """Recursive doubling in ceil(log2 P) rounds. Both partners compute the same a + b, so all ranks get equal
        bits."""
        me, count = ranks.index(self.rank), len(ranks)
        if count == 1:
            return tensor
        path = self.path(label)
        label = _reduction(label)
        shape, value = tensor.shape, tensor.reshape(-1)
        power = 1 << (count.bit_length() - 1)
        extra = count - power
        if me >= power:  # give the value to a partner inside the power of two, and get its result at the end
            self._swap(value, ranks, send_to=me - power, label=label, path=path)
            return self._swap(value, ranks, receive_from=me - power, label=label, path=path).view(shape)
        if me < extra:
            value = combine(value, self._swap(value, ranks, receive_from=me + power, label=label, path=path))
        step = 1
        while step < power:
            partner = me ^ step
            other = self._swap(value, ranks, send_to=partner, receive_from=partner, label=label, path=path)
            value = combine(value, other) if me < partner else combine(other, value)
            step *= 2
        if me < extra:
            self._swap(value, ranks, send_to=me + power, label=label, path=path)
        return value.view(shape)

    def _swap(
        self,
        value: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        send_to: int | None = None,
        receive_from: int | None = None,
        path: int | None = None,
    ) -> Tensor:
        """Send a value to, or receive one from, places among ``ranks``; returns the received value, else the own."""
        sends = [] if send_to is None else [Send(ranks[send_to], value)]
        receives = [] if receive_from is None else [Receive(ranks[receive_from], value.numel())]
        # Exchanges are counted by pair here, since partners differ from round to round.
        pair = tuple(sorted((self.rank, ranks[send_to if send_to is not None else receive_from or 0])))
        received = self.begin(sends, receives, value, (*pair, -1), label, path).wait()
        # Where nothing moves, as if the partner held the same value: flags and shapes, which are no meta tensors, then
        # stay meaningful.
        return received[0] if received and self.capabilities.moves_data else value

    # Other worlds, and events ---------------------------------------------------------------------------------------

    def duplicate(self, wide: bool = False, members: tuple[int, ...] | None = None) -> World:
        """A second world of the same ranks, for another thread; messages of the two never mix. Made by all together,
        or by ``members`` alone, who keep their numbers.

        ``wide``: that thread does nothing but communicate, many messages at a time and of any size; their tags spread
        them over all network cards.
        """
        made = self._duplicate(wide) if members is None else self._duplicate_among(members, wide)
        made.launcher_calls = self.launcher_calls
        made.share_events(self.events)
        return made

    def share_events(self, events: EventStream) -> None:
        """Emit into ``events``, and take the next number among the worlds that do."""
        self.events, self.number = events, next(events.worlds)

    @property
    def outermost(self) -> World:
        """Of a part of a world, the world whose connections it uses."""
        return self

    def numbers_outside(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of these ranks there."""
        return ranks

    def emit(self, event: Event) -> None:
        """Count an event, and call the listeners of ``events`` with it, in this thread."""
        self.traffic.count(event)
        for listener in self.events.listeners:
            listener(event)

    def redistributed(self, kind: str, label: Label, size: int = 0) -> int:
        """Emit a :class:`Redistributed` of ``size`` bytes; returns how often that kind happened with this label."""
        number = next(self.events.numbers)
        self.emit(Redistributed(number, self.number, self.events.clock(), label, kind, size))
        return self.traffic.times(kind, label)

    def waited(self, label: Label, event: int, began: float) -> float:
        """Emit that a wait for an event, which began at ``began``, was successful; returns its seconds."""
        seconds = self.events.clock() - began
        self.emit(Waited(next(self.events.numbers), self.number, began, label, event, seconds))
        return seconds


_NOTHING = ((0, torch.empty(0), 0),)


def _reduction(label: Label) -> Label:
    """The label of the messages that a sum or another reduction with this label sends."""
    channel = "control" if label.channel == "moves" else label.channel
    return Label(f"{label.operation} reduction", label.place, channel)


def _sizes(messages: Sequence[Outgoing | Incoming]) -> tuple[tuple[int, int], ...]:
    return tuple([(peer, tensor.nbytes) for peer, tensor, _ in messages])
