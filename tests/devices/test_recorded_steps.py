"""Steps that read tables: recorded ones end with the bits of those that are carried out, whatever is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald.data.partition import LazyClients
from piebald.engines import engine_choice, recorded_step, sequential
from piebald.engines.recorded_step import BY_HAND, CudaRecorder, Lane, MakesRecorder, Recorder, StepForm
from piebald.engines.sgd_step import SgdRun
from piebald.methods.recipe import Recipe
from piebald.runs.finished_run import Run
from piebald.testing.components import mixing_network, narrowable_network, plain_network
from tests.contract.conftest import DISTINCT, TABLE, VARIANTS, method, vector
from tests.devices.recorded_on_cpu import StandIn
from tests.devices.streams import Streams
from tests.devices.test_devices import full, group_norm_net, long
from tests.devices.there import ENGINES, carry_out, equal_clients, fitted, there


@contextlib.contextmanager
def recording(monkeypatch: pytest.MonkeyPatch, make: MakesRecorder) -> Iterator[None]:
    """Steps that read tables on the CPU, recorded from the third one on."""
    with monkeypatch.context() as patched:
        patched.setattr(sequential, "recorder_for", lambda device, recorded: make)
        patched.setattr(recorded_step, "WORTH", 3)
        yield


class Both:
    """A run whose steps are carried out, the same run with recorded ones, and its recorders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Run]) -> None:
        self.recorders: list[StandIn] = []

        def stand_in(device: torch.device) -> StandIn:
            self.recorders.append(StandIn(device))
            return self.recorders[-1]

        with recording(monkeypatch, lambda device: Recorder()):
            self.by_hand = run()
        with recording(monkeypatch, stand_in):
            self.recorded = run()

    @property
    def replays(self) -> int:
        return sum(recorder.replays for recorder in self.recorders)

    @property
    def recordings(self) -> int:
        return sum(len(recorder.recordings) for recorder in self.recorders)

    @property
    def notes(self) -> dict[str, str]:
        return self.recorded.meta.get("recorded_steps", {})  # type: ignore[no-any-return]

    def assert_equal_bits(self) -> None:
        assert torch.equal(vector(self.recorded), vector(self.by_hand))
        for found, expected in zip(self.recorded.rounds, self.by_hand.rounds, strict=True):
            assert found["loss"] == expected["loss"] or found["loss"] != found["loss"]


def several_steps(name: str, **more: Any) -> Recipe:
    """A recipe whose clients take enough steps to record some."""
    epochs = {} if "epochs" in TABLE[name] or more.get("steps") else {"epochs": 3}
    return method(name, **epochs | more)


def ending(name: str, engine: str, **more: Any) -> Callable[[], Run]:
    recipe = several_steps(name, **more)
    model = fitted(recipe, "sequential" if engine == "sequential" else "batched")  # else no stack could share passes
    return lambda: carry_out(recipe, model=model, engine=engine, stack=2)


# Kinds of work at clients on one engine in the quick tier, every recipe on one in the full one, on all in the long one.
QUICK = ["fedavg", "scaffold", "moon", "pfedme"]
CASES = [(name, engine) for name in DISTINCT for engine in ENGINES]
UNRECORDED = {"dp_sgd": "rows and noise of DP-SGD are drawn on the host"}
UNEQUAL = "batches that cannot be filled up have unequal lengths"  # of the clients here, where rows mix


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        case
        if case[0] in QUICK and place % 3 == QUICK.index(case[0]) % 3
        else (full if place % 3 == place // 3 % 3 else long)(*case)
        for place, case in enumerate(CASES)
        if case[0] != "fedala"
    ],
)
def test_a_recipe_replays_with_the_bits_of_its_steps(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(monkeypatch, ending(name, engine))
    both.assert_equal_bits()
    mixes = engine != "sequential" and fitted(method(name), "batched") in (narrowable_network, mixing_network)
    reason = UNRECORDED.get(name, UNEQUAL if mixes else "")
    if reason:
        assert f"{engine}, {reason}" in both.notes
    else:
        assert both.replays > both.recordings > 0
        assert "recorded" in both.notes.values()
        by_hand = [form for form, note in both.notes.items() if BY_HAND in note]
        assert all(engine != "sequential" and UNEQUAL in form for form in by_hand)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd, nesterov": {"optimizer": {"kind": "sgd", "nesterov": True}, "momentum": 0.9},
    "sgd, dampened": {"optimizer": {"kind": "sgd", "dampening": 0.5}, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": {"kind": "adam", "eps": 0.1, "amsgrad": True}},
    "rmsprop": {"optimizer": {"kind": "rmsprop", "centered": True, "eps": 0.1}, "momentum": 0.5},
    "adagrad": {"optimizer": {"kind": "adagrad", "lr_decay": 0.1}},
    "weight decay": {"weight_decay": 0.01},
    "accumulated": {"accumulate": 2, "batch": 5},
    "bfloat16": {"precision": "bfloat16"},
    "checkpointed": {"checkpointing": ["0"]},
    **VARIANTS,
}
ALONE = ("accumulated", "checkpointed")  # are the sequential engine's


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "engine"),
    [
        (setting, engine) if (place + turn) % 3 == 0 else long(setting, engine)
        for place, setting in enumerate(OPTIMIZERS)
        for turn, engine in enumerate(ENGINES)
        if engine == "sequential" or setting not in ALONE
    ],
)
def test_every_optimizer_and_setting_does_so(setting: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length = {} if "steps" in OPTIMIZERS[setting] else {"epochs": 3}
    recipe = method("fedavg", **length | OPTIMIZERS[setting])

    def run() -> Run:
        return carry_out(recipe, model=plain_network if engine == "batched" else group_norm_net, engine=engine, stack=2)

    both = Both(monkeypatch, run)
    both.assert_equal_bits()
    assert both.replays > both.recordings > 0
    plain = run()  # with numbers of the host, whose last digit rounds otherwise
    torch.testing.assert_close(vector(both.recorded), vector(plain), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"precision": "float16"}, "the host asks whether a float16 step was made"),
        ({"augmentation": [{"kind": "mix_up"}]}, "augmentation draws from a generator of the host"),
    ],
)
def test_what_the_host_decides_is_carried_out_and_the_record_says_so(
    settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(monkeypatch, StandIn):
        run = carry_out(method("fedavg", **settings), model=group_norm_net, engine="sequential")
    assert run.meta["recorded_steps"] == {f"sequential, {reason}": BY_HAND}


@pytest.mark.full
def test_networks_of_every_kind_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws the masks of its keys in every replay, and batch norm counts its batches."""

    def dropping(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4))

    for engine in ENGINES:
        both = Both(
            monkeypatch,
            lambda engine=engine: carry_out(
                several_steps("fedavg"), clients=equal_clients(4), model=dropping, engine=engine, stack=2
            ),
        )
        both.assert_equal_bits()
        assert both.replays > both.recordings > 0


class Counting(nn.Module):
    """Adds up its passes in Python, and scales its outputs with them: a replay would not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(6, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.requires_grad is False and torch.is_grad_enabled():
            self.passes += 1
        return self.layer(x) * (1 + 0.01 * self.passes)


class Looking(nn.Module):
    """Asks the device for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if float(x.detach().sum()) > 1e9 else 1.0)


@pytest.mark.parametrize(("model", "reason"), [(Looking, "the host waits"), (Counting, "from step to step")])
def test_what_cannot_be_recorded_is_carried_out_and_the_record_says_why(
    model: type[nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Run:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = model()
        return carry_out(several_steps("fedavg"), model=made, engine="sequential")

    both = Both(monkeypatch, run)
    assert both.recordings == 0
    assert any(BY_HAND in note and reason in note for note in both.notes.values())
    if model is Looking:
        both.assert_equal_bits()


@pytest.mark.full
def test_lanes_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (lambda device: Recorder(), StandIn):
        with recording(monkeypatch, make):
            one, *others = (
                vector(carry_out(several_steps("scaffold", cohort=1.0), engine="sequential", stack=stack))
                for stack in (1, 2, 3, 5)
            )
        for other in others:
            assert torch.equal(one, other)


@pytest.mark.parametrize("engine", ["sequential", full("batched")])
def test_rows_without_a_pool_are_copied_to_where_steps_read_them(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [
        (torch.rand(size, 6, generator=draw), torch.randint(0, 4, (size,), generator=draw)) for size in (30, 31, 70)
    ]
    recipe, clients = several_steps("fedavg", cohort=1.0), LazyClients(3, rows.__getitem__, classes=list("abcd"))
    both = Both(monkeypatch, lambda: carry_out(recipe, clients=clients, model=plain_network, engine=engine, stack=2))
    both.assert_equal_bits()
    assert both.replays > both.recordings > 0


def form(rows: int = 6) -> StepForm:
    return StepForm((rows,), "", 0.0, None, ())


class Lying(StandIn):
    """Replays another step than it has recorded."""

    def record(self, step: Any, reads: Any, writes: Any) -> Any:
        return lambda: writes[0].add_(1.5)


def lane_of(make: MakesRecorder) -> tuple[Lane, dict[str, str]]:
    notes: dict[str, str] = {}
    return Lane(make, torch.device("cpu"), notes), notes


def counted_steps(lane: Lane, count: int, planned: int | None = None) -> Tensor:
    """The buffer that so many steps add 1 to."""
    held = torch.zeros(3)

    def step() -> None:
        held.add_(1)

    for taken in range(count):
        lane.step(form(), step, count - taken - 1 if planned is None else planned, ([], [held]))
    return held


def test_a_replay_with_other_bits_is_never_used_again() -> None:
    lane, notes = lane_of(Lying)
    assert counted_steps(lane, 12).tolist() == [12.0] * 3
    assert notes == {"6 rows": "carried out step by step: its first replay had other bits than the step itself"}


def by_algorithm(held: Tensor) -> Callable[[], None]:
    """A step with a convolution, as it were, which has other bits by the algorithms that repeat theirs."""
    return lambda: held.add_(1.0 if torch.backends.cudnn.deterministic else 1.001)


def test_the_algorithms_of_the_run_are_recorded_once_more() -> None:
    """After those that repeat their bits have shown that the step can be replayed."""
    (lane, notes), held, expected = lane_of(StandIn), torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    for taken in range(9):
        lane.step(form(), by_algorithm(held), 8 - taken, ([], [held]))
    torch.testing.assert_close(held, (expected + 9 * 1.001).double())
    assert notes == {"6 rows": "recorded"}
    assert len(lane.recorder.recordings) == 2  # type: ignore[attr-defined]
    assert not torch.backends.cudnn.deterministic


def test_a_run_that_repeats_its_bits_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    (lane, _), held = lane_of(StandIn), torch.zeros(3)
    for taken in range(9):
        lane.step(form(), by_algorithm(held), 8 - taken, ([], [held]))
    assert held.tolist() == [9.0] * 3
    assert len(lane.recorder.recordings) == 1  # type: ignore[attr-defined]


class Straying(StandIn):
    """Whose second recording goes elsewhere."""

    def record(self, step: Any, reads: Any, writes: Any) -> Any:
        replay = super().record(step, reads, writes)
        return replay if len(self.recordings) == 1 else lambda: writes[0].add_(1.5)


def test_a_replay_that_is_far_from_its_step_is_never_used_again() -> None:
    (lane, notes), held = lane_of(Straying), torch.zeros(3, dtype=torch.float64)
    for taken in range(9):
        lane.step(form(), by_algorithm(held), 8 - taken, ([], [held]))
    torch.testing.assert_close(held, torch.full_like(held, 9 * 1.001))
    assert notes == {"6 rows": f"{BY_HAND}: its first replay is far from the step"}


@pytest.mark.parametrize(
    ("count", "planned", "recordings"),
    [(5, None, 1), (4, None, 0), (2, 100, 0), (3, 100, 1), (4, 0, 0), (5, 0, 1)],
)
def test_steps_are_recorded_by_counting(count: int, planned: int | None, recordings: int) -> None:
    """The third of five, whether they are planned in one run or come one by one."""
    lane, _ = lane_of(StandIn)
    assert counted_steps(lane, count, planned).tolist() == [float(count)] * 3
    assert len(lane.recorder.recordings) == recordings  # type: ignore[attr-defined]
    assert lane.settled is (recordings == 1)


def test_all_forms_of_a_lane_are_dropped_together() -> None:
    lane, _ = lane_of(StandIn)
    held = torch.zeros(1)
    for rows in range(1, recorded_step._MOST + 2):
        for _ in range(3):
            lane.step(form(rows), lambda: held.add_(1), 100, ([], [held]))
    assert held.item() == 3 * (recorded_step._MOST + 1)
    assert (lane.recorder.closed, len(lane.recorder.recordings)) == (1, 1)  # type: ignore[attr-defined]


class FakeGraph:
    """`torch.cuda.CUDAGraph` on the CPU: keeps what was asked in order."""

    asked: list[str]
    step: Callable[[], None] | None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.asked.append("capture")

    def capture_end(self) -> None:
        self.asked.append("captured")

    def replay(self) -> None:
        self.asked.append("replay")


class FakeStream:
    def __init__(self, asked: list[str], name: str) -> None:
        self.asked, self.name = asked, name

    def wait_stream(self, other: FakeStream) -> None:
        self.asked.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.asked.append("synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of `torch.cuda`, in order."""
    asked: list[str] = []
    streams = [FakeStream(asked, "main")]

    @contextlib.contextmanager
    def within(stream: FakeStream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (FakeGraph,), {"asked": asked}))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(asked, "lane"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", within)
    return asked


def test_a_graph_is_captured_after_everything_and_replayed_before_anything_is_copied_out(cuda: list[str]) -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    recorder.follow()
    with recorder.stream():
        replay = recorder.record(lambda: cuda.append("step"), [], [])
        replay()
    recorder.lead()
    cuda.append("copy")
    assert cuda == [
        "lane waits for main", "synchronize", "capture", "step", "captured", "replay", "main waits for lane", "copy",
    ]  # fmt: skip
    recorder.close()
    assert cuda[-1] == "synchronize"  # before graphs are destroyed


def test_a_capture_that_fails_is_ended(cuda: list[str]) -> None:
    recorder = CudaRecorder(torch.device("cuda"))

    def step() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(step, [], [])
    assert cuda[-1] == "captured"
    recorder.record(lambda: None, [], [])  # and others can be recorded


def test_a_run_captures_replays_and_copies_in_this_order(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane begins after what the device was asked before, and what is asked afterwards waits for it."""

    class Replaying(CudaRecorder):
        """Whose replays carry the step out as well."""

        def record(self, step: Any, reads: Any, writes: Any) -> Any:
            replay = super().record(lambda: None, reads, writes)
            return lambda: (replay(), step())

    with recording(monkeypatch, Replaying):
        run = carry_out(several_steps("fedavg"), engine="sequential", stack=2)
    with recording(monkeypatch, lambda device: Recorder()):
        expected = carry_out(several_steps("fedavg"), engine="sequential", stack=2)
    assert torch.equal(vector(run), vector(expected))
    assert "replay" in cuda
    for place, asked in enumerate(cuda):
        if asked == "capture":
            assert cuda[place + 1] == "captured"
        if asked == "replay":
            last = max(i for i, one in enumerate(cuda[:place]) if "waits" in one)
            assert cuda[last] == "lane waits for main"


ON_LANES = [name for name in DISTINCT if name not in (*UNRECORDED, "fedala")]


def on_lanes(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> Streams:
    recipe = several_steps(name)
    with Streams() as streams, recording(monkeypatch, streams.make):
        carry_out(recipe, model=fitted(recipe, engine if engine == "sequential" else "batched"), engine=engine, stack=3)
    return streams


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "sequential") for name in ("lg_fedavg", "ditto")),
        *(full(name, "sequential") for name in ON_LANES[::3] if name not in ("lg_fedavg", "ditto")),
        *(long(name, "sequential") for name in ON_LANES if name not in ("lg_fedavg", "ditto", *ON_LANES[::3])),
        *(long(name, engine) for name in ON_LANES for engine in ("vmapped", "batched")),
    ],
)
def test_no_lane_touches_what_another_has_not_finished(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes lanes at the same time; nothing but waiting orders them."""
    streams = on_lanes(name, engine, monkeypatch)
    assert not streams.races
    assert streams.lanes >= (2 if engine == "sequential" else 0)


@pytest.mark.full
def test_sums_that_a_lane_forms_for_all_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, models with private layers were formed by the first lane, and a GPU's others read them unfinished."""
    monkeypatch.setattr(SgdRun, "formed", lambda run: run)
    assert any("did not wait" in race for race in on_lanes("lg_fedavg", "sequential", monkeypatch).races)


@pytest.mark.full
def test_engines_are_measured_once_their_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks beside lanes, all of them settled."""
    seen: list[tuple[str, int]] = []
    measure = engine_choice._measure

    def measured(engine: Any, clients: Any, stack: int) -> Any:
        found = measure(engine, clients, stack)
        assert all(lane.settled for lane in engine.lanes)
        assert set(engine.notes.values()) == {"recorded"}
        seen.append((engine.name, stack))
        return found

    engine_choice.MEASURED.clear()
    monkeypatch.setattr(engine_choice, "_measure", measured)
    with monkeypatch.context() as patched:
        by_setting = lambda device, recorded: StandIn if recorded else lambda device: Recorder()  # noqa: E731
        patched.setattr(sequential, "recorder_for", by_setting)
        carry_out(method("fedavg"), clients=equal_clients(8, rows=45), engine="auto", stack=None)
    lanes = [stack for name, stack in seen if name == "sequential"]
    assert lanes == [1, 2, 4, 8]
    assert ("vmapped", 5) in seen


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gpu_replays_with_the_bits_of_its_steps(engine: str) -> None:
    """On a real one; the pretended one has nothing to record."""
    recipe = several_steps("scaffold", epochs=4)
    with there() as device:
        runs = [
            carry_out(recipe, device, equal_clients(4), plain_network, engine=engine, stack=2, recorded=recorded)
            for recorded in ("auto", False)
        ]
    assert torch.equal(*(vector(run) for run in runs))
    assert ("recorded" in runs[0].meta.get("recorded_steps", {}).values()) is (device.type == "cuda")


def test_the_setting_is_for_gpus() -> None:
    with pytest.raises(ValueError, match="recorded = true is for NVIDIA's GPUs: leave it out with device = 'cpu'"):
        piebald.Simulator(recorded=True)
    assert piebald.Simulator(recorded=False).recorded is False
    assert sequential.recorder_for(torch.device("cpu"), True) is None
    assert sequential.recorder_for(torch.device("cuda"), True) is CudaRecorder
    assert not sequential.recorder_for(torch.device("cuda"), False)(torch.device("cuda")).records  # type: ignore[misc]
