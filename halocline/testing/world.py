"""The tests that every world passes. A new transport inherits them (``docs/adding-a-world.md``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import SkipTest

import torch

from ..world import Capabilities
from . import world_bodies as bodies

T = TypeVar("T")


class WorldTests(ABC):
    """Tests for any world. A subclass whose name begins with ``Test`` says how its ranks run, and inherits the
    tests.

    Tests that need a capability which the world does not claim are skipped; :class:`Capabilities` says what there is to
    claim.
    """

    #: Where tensors lie: "cpu", "cuda", or "meta" for a world that moves nothing.
    device = "cpu"
    #: At least three.
    size = 3
    #: Dtypes that the world can sum.
    sum_dtypes: tuple[torch.dtype, ...] = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
        torch.uint8,
    )  # fmt: skip
    #: Seconds within which ranks hear of one that has left or taken another path.
    soon = 10.0

    @abstractmethod
    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        """``body(world, *arguments)`` on ``size`` ranks, each with its rank of a world that is used for nothing else
        and has this deadline; the results in the order of ranks. ``body`` can be pickled. Raises the error of a rank.
        """

    def run_while_one_dies(self, body: Callable[..., T], *arguments: Any, deadline: float) -> list[T]:
        """The same where ``body`` ends the process of rank 1: the results of the others."""
        raise SkipTest("ranks of this world do not die alone")

    def capabilities(self) -> Capabilities:
        """What the world says of itself."""
        return self.run(bodies.process_and_capabilities, self.device)[0][1]  # type: ignore[return-value]

    def _holds(self, body: Callable[..., list[str]], *arguments: Any) -> None:
        """Run a body on all ranks; none may complain."""
        for rank, complaints in enumerate(self.run(body, self.device, *arguments)):
            assert not complaints, f"rank {rank}: {complaints}"

    def _needs(self, **wanted: object) -> None:
        """Skip the test in a world without these capabilities."""
        has = self.capabilities()
        if any(getattr(has, name) != value for name, value in wanted.items()):
            raise SkipTest(f"a world with {has}")

    # Messages

    def test_every_dtype_and_size_arrives(self) -> None:
        """A message of any dtype and size comes as it was sent, empty ones too."""
        self._holds(bodies.every_dtype)

    def test_every_layout_arrives(self) -> None:
        """A message may be strided, or lazily conjugated."""
        self._holds(bodies.every_layout)

    def test_several_exchanges_at_once_are_waited_for_in_any_order(self) -> None:
        """Exchanges may be under way together; waiting twice gives the same."""
        self._holds(bodies.several_at_once)

    def test_messages_are_known_by_their_tags(self) -> None:
        """Receivers may ask in another order than senders send."""
        self._needs(matches_tags=True)
        self._holds(bodies.by_tag)

    def test_messages_may_come_before_they_are_asked_for(self) -> None:
        """Early messages wait at the receiver."""
        self._needs(matches_tags=True)
        self._holds(bodies.before_it_is_asked_for)

    def test_messages_may_be_written_to_after_the_wait(self) -> None:
        """After a wait the sender may reuse its memory."""
        self._holds(bodies.written_after_the_wait)

    # Sums

    def test_sums_of_every_dtype_and_size(self) -> None:
        """Sums are exact in every dtype that the world names, blocking or not."""
        self._holds(bodies.sums, self.sum_dtypes)

    def test_sums_have_the_same_bits_on_every_rank_and_each_time(self) -> None:
        """Replicas of a model stay equal only if sums round alike everywhere."""
        first, *others = self.run(bodies.bits_of_sums, self.device)
        assert all(other == first for other in others)
        assert first[: len(first) // 2] == first[len(first) // 2 :]

    def test_reductions_among_some_ranks_and_all(self) -> None:
        """Sums, reductions and broadcasts among any ranks."""
        self._holds(bodies.among_some)

    # Duplicates and events

    def test_duplicates_are_independent(self) -> None:
        """Messages of a duplicate never mix with those of the original, even from two threads."""
        self._holds(bodies.duplicates, False)

    def test_wide_duplicates_are_independent(self) -> None:
        """The same for duplicates with more channels."""
        self._holds(bodies.duplicates, True)

    def test_events_tell_what_happened(self) -> None:
        """Each exchange, sum and wait emits its event, with bytes and peers."""
        self._holds(bodies.events)

    # Ranks that fail

    def test_a_silent_rank_is_named_at_the_deadline(self) -> None:
        """A wait ends at the deadline with an error that names rank, operation and module."""
        self._needs(moves_data=True)
        self._check_named(self.run(bodies.while_one_is_silent, self.device, deadline=0.5))

    def test_a_rank_that_leaves_is_noticed_at_once(self) -> None:
        """A rank that says that it leaves ends the others' waits long before the deadline."""
        self._needs(moves_data=True)
        self._check_named(self.run(bodies.while_one_has_left, self.device, deadline=120.0))

    def test_a_rank_that_dies_is_named(self) -> None:
        """The others raise, and name the dead rank."""
        self._check_named(self.run_while_one_dies(bodies.while_one_dies, self.device, deadline=3.0))

    def _check_named(self, told: list[tuple[str, float]]) -> None:
        """All ranks but rank 1 have raised in time, and said who failed and where."""
        said = [(text, seconds) for text, seconds in told if text]
        assert len(said) == self.size - 1, told
        for text, seconds in said:
            assert "fetch in encoder.conv" in text
            assert "rank 1" in text
            assert seconds < self.soon

    def test_ranks_on_different_paths_raise_at_once(self) -> None:
        """Two ranks that wait at different operations raise, and name both."""
        self._needs(moves_data=True, detects_divergence=True)
        told = self.run(bodies.on_different_paths, self.device, deadline=120.0)
        for rank, (text, seconds) in enumerate(told[:2]):
            assert f"rank {1 - rank}" in text
            assert f"operation {rank}" in text
            assert seconds < self.soon

    # Capabilities

    def test_it_waits_for_whichever_comes_first(self) -> None:
        """``wait_any`` returns the exchange that is done, and ``wake`` interrupts it."""
        complaints = self.run(bodies.the_first_to_come, self.device)
        if complaints[0] is None:
            raise SkipTest("the world cannot tell which exchange is done first")
        assert not any(complaints), complaints

    def test_ranks_are_processes_if_it_says_so(self) -> None:
        """The capabilities are the same on all ranks, and true."""
        told = self.run(bodies.process_and_capabilities, self.device)
        assert all(capabilities == told[0][1] for _, capabilities in told)
        processes = len({process for process, _ in told})
        has = self.capabilities()
        assert processes == (self.size if has.moves_data and has.separate_processes else 1)


class CudaWorldTests(WorldTests):
    """The same with tensors on a GPU, and in the order of its streams."""

    device = "cuda"

    def test_messages_follow_the_work_of_the_stream(self) -> None:
        """What a kernel has yet to compute is sent after it is computed."""
        self._holds(bodies.behind_long_work, False)

    def test_messages_follow_the_work_of_a_side_stream(self) -> None:
        """The same on a stream that is not the default one."""
        self._holds(bodies.behind_long_work, True)
