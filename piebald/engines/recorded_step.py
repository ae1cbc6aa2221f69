"""Steps that are recorded once and then replayed, and activation checkpointing.

For a step that is replayed the host starts one graph in place of hundreds of kernels.  It takes nothing and returns
nothing: whatever goes in or out lies in buffers that stay where they are (`static_buffers`), and what differs from step
to step it reads from tables, by a counter on the device.

Checkpointing computes an engine's module anew with the dropout masks of the first pass.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piebald.core.errors import SettingError
from piebald.engines.batched_layers import KeyedDropout
from piebald.methods.training.checkpointing import AUTO, checkpointed_layers, enable_own

Step = Callable[[], None]
BY_HAND = "carried out step by step"
WARM_UP = 2  # steps of a form that are carried out before it is recorded: they let libraries choose and allocate
WORTH = 5  # steps of a form that pay for recording it: on an H100 it takes as long as five steps by hand
_NEAR = 0.1  # of a step's length: how far a replay may be from it whose convolutions do not repeat their bits
_MOST = 32  # recorded forms of a lane: the last batch of an epoch may have any length
_MOST_COUNTED = 4 * _MOST  # forms of a lane that are counted


class StepForm(NamedTuple):
    """The properties that all steps share which one recording can stand for.

    Attributes:
        rows: rows of the batch, [b], or of a stack [c, b].
        config: the settings of SGD, without what lies in tables.
        prox: the weight of the proximal term.
        loss: what evaluates a loss of the clients' own.
        addresses: where the buffers are, and their shapes.
        masked: whether some rows do not count.
    """

    rows: tuple[int, ...]
    config: str
    prox: float
    loss: object
    addresses: tuple[tuple[int, tuple[int, ...]], ...]
    masked: bool = False

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.rows))} rows"


class Recorder:
    """A way to record steps on a device, all of them in the order of one stream.  This one carries every step out.

    Attributes:
        records: whether it can record at all.
    """

    records: ClassVar[bool] = False

    def record(self, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Step:
        """Return what carries the step out again, with the buffers as they were before.

        Args:
            step: the step.
            reads, writes: all memory that it reads and that it writes to, besides its own.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        return step

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """The context of everything that is carried out in the order of the recorded steps."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Begin after all that was asked of the device outside of `stream`."""

    def lead(self) -> None:
        """Have all that is asked of the device outside of `stream` begin after the recorded steps."""

    def close(self) -> None:
        """Free all that was recorded."""


class CudaRecorder(Recorder):
    """Records steps as CUDA graphs, on a stream and in a memory pool of their own.

    Graphs share the pool since no step reads what another left there.  They are freed together with the recorder: a
    library's workspace belongs to the stream, and must not go with one of its graphs.
    """

    records: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Step:
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            torch.cuda.synchronize(self.device)
        collects = gc.isenabled()
        gc.disable()  # an old graph that is freed meanwhile would spoil this one
        try:
            # another thread may fetch rows meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._graphs.append(graph)
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed, so that the device computes again."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        self._graphs.append(graph)  # its memory stays with the others'

    def stream(self) -> contextlib.AbstractContextManager[object]:
        context: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def close(self) -> None:
        self._stream.synchronize()  # none may be under way
        self._graphs.clear()
        torch.cuda.empty_cache()  # what their pool held
        self._pool = torch.cuda.graph_pool_handle()


MakesRecorder = Callable[[torch.device], Recorder]


def recorder_for(device: torch.device, recorded: bool) -> MakesRecorder | None:
    """Return the maker of a device's recorders; None where steps read numbers of the host, as they do on a CPU.

    On an NVIDIA GPU steps read tables whether they are recorded or not, so that both have the same bits.
    """
    if device.type != "cuda":
        return None
    return CudaRecorder if recorded else lambda device: Recorder()


class Lane:
    """The steps of one resident model or stack: what is recorded of them.

    Which steps are recorded is decided by counting, never by time, or a busy machine would decide the bits.

    Args:
        make: makes its recorder.
        device: where it computes.
        notes: to which it adds.

    Attributes:
        number: the row of the tables that the next step reads; each step adds 1.
        notes: for each form of steps, "recorded" or why it is not.
    """

    def __init__(self, make: MakesRecorder, device: torch.device, notes: dict[str, str]) -> None:
        self.device, self.notes, self.recorder = device, notes, make(device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self._replays: dict[StepForm, Step] = {}
        self._times_taken = Counter[StepForm]()
        self._refused = set[StepForm]()

    def step(
        self,
        form: StepForm,
        step: Step,
        planned: int,
        buffers: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        """Carry out or replay one step.

        Args:
            form: what is the same for all steps that one recording can stand for.
            step: the step.
            planned: how many steps of this form come after it in the same run.
            buffers: what it reads and what it writes to.
        """
        if (replay := self._replays.get(form)) is not None:
            replay()
            return
        if form not in self._times_taken and len(self._times_taken) == _MOST_COUNTED:
            self.forget()  # a form holds what its steps need
        self._times_taken[form] += 1
        count = self._times_taken[form]
        if not self.recorder.records or count <= WARM_UP or count + planned < WORTH or form in self._refused:
            step()
        else:
            # the counter with them: a step that is repeated has to read the same row of the tables again
            self._record(form, step, buffers[0], [*buffers[1], self.number])

    def _record(self, form: StepForm, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Carry out a step, and record it: if its first replay has other bits, nothing but the step remains.

        Bits are compared with convolutions that repeat theirs.  Where the run takes others, which are faster, and they
        have other bits, the same step is recorded once more with them.
        """
        if len(self._replays) >= _MOST:  # together, see `CudaRecorder`
            self.forget()
        # the step is carried out several times from here on, each time from the same numbers
        before = _copies(writes)
        step()
        outcome = _copies(writes)
        with _repeating():
            _write(writes, before)
            step()
            repeated = _copies(writes)
            replay = self._first_replay(step, reads, writes, before)
            if isinstance(replay, str):
                reason = replay
            elif _same_bits(writes, repeated):
                reason = ""
            else:
                reason = self._why_other(step, writes, before, repeated)
        if not reason and not _same_bits(outcome, repeated):
            replay = self._first_replay(step, reads, writes, before)
            near = _apart(writes, outcome) <= _NEAR * _apart(outcome, before)
            reason = replay if isinstance(replay, str) else "" if near else "its first replay is far from the step"
        if reason or isinstance(replay, str):
            _write(writes, outcome)  # ends the run where the device is lost
            self._refused.add(form)
            self.notes[str(form)] = f"{BY_HAND}: {reason}"
        else:
            self._replays[form] = replay
            self.notes.setdefault(str(form), "recorded")

    def _first_replay(
        self, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor], before: Sequence[Tensor]
    ) -> Step | str:
        """Record a step and replay it from what was in the buffers before; returns the replay, or why there is none."""
        _write(writes, before)
        try:
            replay = self.recorder.record(step, reads, writes)
            replay()
        except RuntimeError as error:  # of the device's rules, or of memory that ran out
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return replay

    def _why_other(
        self, step: Step, writes: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor]
    ) -> str:
        """Return why a replay had other bits than the step, which is carried out again to see whether it repeats."""
        _write(writes, before)
        step()
        if _same_bits(writes, after):
            return "its first replay had other bits than the step itself"
        return "the step has other bits each time, so that no replay could be compared with it"

    @property
    def settled(self) -> bool:
        """True if all forms of steps are recorded that have been taken and will be, if they are taken again."""
        waiting = (form for form in self._times_taken if form not in self._replays and form not in self._refused)
        return not self.recorder.records or all(self._times_taken[form] > WORTH for form in waiting)

    def forget(self) -> None:
        """Free all recordings."""
        # first, since replays hold the graphs whose memory `close` gives back
        self._replays.clear()
        self._times_taken.clear()
        self.recorder.close()


def side_by_side(turns: Sequence[tuple[Recorder, Iterator[bool]]]) -> None:
    """Carry out steps of several lanes in turn, after all that was asked of the device before, and before all that is
    asked of it afterwards.
    """
    for recorder, _ in turns:
        recorder.follow()
    waiting = list(turns)
    try:
        while waiting:
            for turn in list(waiting):
                with turn[0].stream():
                    # True is the default of an iterator that has ended; a step yields False
                    if next(turn[1], True):
                        waiting.remove(turn)
    finally:
        for recorder, _ in turns:
            recorder.lead()


@contextlib.contextmanager
def _repeating() -> Iterator[None]:
    """Convolutions by algorithms that repeat their bits."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _copies(buffers: Sequence[Tensor]) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in buffers]


def _write(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.detach().copy_(value)


def _same_bits(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same bits: what is not a number is equal to itself."""
    pairs: Any = zip(tensors, expected, strict=True)
    return all(torch.equal(*(part.detach().contiguous().view(-1).view(torch.uint8) for part in pair)) for pair in pairs)


def _apart(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The distance between two lists of tensors, as one vector of all their numbers."""
    squares = [(a.detach().double() - b.double()).square().sum() for a, b in zip(tensors, expected, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


class Checkpointing:
    """Layers of a module that are checkpointed from now on, whenever the module trains inside `steps`.

    Args:
        module: the module.
        patterns: as in `training.checkpointing`.
        random: whether the layers draw from torch's own generators, whose state is then kept with each of them.
    """

    def __init__(self, module: nn.Module, patterns: Sequence[str], random: bool) -> None:
        # torch's reentrant form takes no context_fn, and gives no gradient where no input needs one
        self._options: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": random,
            "context_fn": self._contexts,
        }
        self._dropout: KeyedDropout | None = None
        self._active, self._ran = False, set[str]()
        self._layers = [] if tuple(patterns) == (AUTO,) else checkpointed_layers(module, patterns)
        if not self._layers:  # a module of transformers, whose layers look themselves whether they train
            enable_own(module, self._options)
        for name in self._layers:
            layer = module.get_submodule(name)
            layer.__dict__["forward"] = self._checkpointed(name, layer.forward)

    @contextlib.contextmanager
    def steps(self, dropout: KeyedDropout | None) -> Iterator[None]:
        """The steps of one client; `dropout` is the active mode, or None.

        Raises:
            SettingError: none of the layers was run, so that nothing was saved.
        """
        self._dropout, self._active = dropout, True
        try:
            yield
        finally:
            self._active = False
        if self._layers and not self._ran:
            raise SettingError(
                f"checkpointing names {', '.join(self._layers)}, which the model never calls: name layers that it does"
            )

    def _checkpointed(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **named: Any) -> Any:
            if not self._active:
                return forward(*inputs, **named)
            self._ran.add(name)
            return checkpoint(functools.partial(forward, **named), *inputs, **self._options)

        return run

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """The contexts of a layer's first pass and of its second one, which draws the masks of the first."""
        if self._dropout is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        again = KeyedDropout()
        again.start(self._dropout.key)
        again.call = self._dropout.call
        return contextlib.nullcontext(), again
