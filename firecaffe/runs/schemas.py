"""The schemas of a run's JSON files. They ask for little, because older runs lack some entries."""

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from firecaffe.schema import Amount, Count, Positive, Real
from firecaffe.value_checks import MAX_MICRO_BATCHES

Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Seconds of a part of a step; as a difference of two clocks, they may be below 0."""
StepSeconds = Annotated[float, Meta(ge=1e-9, le=1e9)]
"""Seconds that serve as divisors, so they are above 0."""
MicroBatches = Annotated[int, Meta(ge=0, le=MAX_MICRO_BATCHES)]
Samples = Annotated[int, Meta(ge=0, le=10**12)]
Rank = Annotated[int, Meta(ge=0, le=1_000_000)]
Number = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
"""An integer as a key of a JSON object: a rank, a learner, a version."""
Values = dict[str, Real | None]
"""Metrics by name; null if not finite."""


class StepRow(TypedDict):
    step: Count


class MetricsRow(StepRow):
    kind: str


class LossRow(MetricsRow):
    loss: Real | None


class TrainRow(LossRow):
    samples: Samples


class TimedRow(TrainRow):
    images_per_s: Annotated[float, Meta(ge=1e-9, le=1e30)]


class NoiseRow(StepRow):
    noise_scale: NotRequired[Amount]
    noise_scale_low: Amount
    noise_scale_high: NotRequired[Amount]


class NoiseScaleRow(TypedDict):
    samples: Amount | None
    low: Amount
    high: Amount | None
    steps: list[Count]


class WeightsRow(StepRow):
    sha256: str


class DigestsRow(StepRow):
    tensors: dict[str, str]


class TimingRow(StepRow):
    """A line of timings/rank-R.jsonl."""

    step_s: StepSeconds
    data_s: Seconds
    compute_s: Seconds
    exposed_communication_s: Seconds
    update_s: Seconds
    exchange_s: NotRequired[Seconds | None]
    micro_batches: NotRequired[MicroBatches]
    idle_s: NotRequired[Seconds | None]
    stage: NotRequired[Rank | None]
    by_rank: NotRequired[dict[Number, tuple[MicroBatches, Seconds]] | None]
    activations_s: NotRequired[Seconds | None]
    processor_s: NotRequired[Seconds | None]


class ActivationsRow(TypedDict):
    activations_s: Seconds


class TripRow(StepRow):
    """A line of timings/round-trips-R.jsonl."""

    peer: Rank
    in_host: bool
    round_trip_s: Seconds


class LearnersRow(TypedDict, total=False):
    again: Count
    idle_by_rank: dict[str, Real]
    idle_by_learner: dict[str, Real]
    rank_by_learner: dict[str, Rank]
    pulled_bytes_by_learner: dict[str, Amount]
    pushed_bytes_by_learner: dict[str, Amount]


class SynchronyRow(LearnersRow, total=False):
    replicas: Count
    averages: Count
    updates: Count
    gradients: Count
    dropped: Count
    lost_learners: Count
    mean_staleness: Amount
    staleness: dict[str, Count]


class ParallelRow(TypedDict, total=False):
    idle_if_equal: Real | None
    stages: Any


class FirstWeightsRow(TypedDict, total=False):
    sha256: str


class ResultRow(TypedDict, total=False):
    world_size: Positive
    exchange: str
    route: str
    data: str
    steps: Samples
    images_per_s: Amount
    exposed_communication: Real
    weights_sha256: str
    state_sha256: str
    metric: str
    higher_is_better: bool
    shares: list[str]
    metrics: list[str]
    test_loss: Real | None
    top1: Share | None
    top5: Share | None
    r2: Real | None
    test_samples: Samples | None
    largest_class_share: Share | None
    samples_seen: Samples
    timed_samples: Samples
    identity_doubts: list[str]
    sent_bytes_per_step_by_rank: list[Amount | None]
    idle_by_stage: list[Real] | None
    resumed_from: str | None
    first_weights: FirstWeightsRow | None
    synchrony: SynchronyRow | None
    parallel: ParallelRow | None
    initial_lr: Amount
    tuned: str
    noise_scale: NoiseScaleRow | None


class DigestsResult(TypedDict):
    steps: Samples
    weights_sha256: str
    state_sha256: str


class ServerRow(LearnersRow):
    updates: Count
    gradients: Count
    dropped: Count
    lost_learners: Count
    mean_staleness: Amount
    staleness: dict[Number, Count]


class ServerResult(TypedDict):
    synchrony: ServerRow


class ScoredRow(TypedDict):
    gradients: Count
    dropped: Count
    mean_staleness: Amount
    idle_by_rank: Annotated[dict[str, Real], Meta(min_length=1)]
    pulled_bytes_by_learner: dict[str, Amount]
    pushed_bytes_by_learner: dict[str, Amount]


class ScoredResult(TypedDict):
    steps: Samples
    resumed_from: str | None
    synchrony: ScoredRow


class EnvironmentRow(TypedDict, total=False):
    cpu: str
    gpus: list[str]
    own_code: dict[str, str] | None
    run: str
    apart: dict[Number, tuple[str, str]]


class ForecastRow(TypedDict, total=False):
    cluster: str
    cluster_file: str | None
    workers: Count
    exchange: str
    compressor: str
    mode: str
    mode_in_words: str
    after_step: Count
    parallel: ParallelRow
    step_s: StepSeconds
    step_low_s: Seconds
    step_high_s: Seconds
    stragglers_s: Seconds
    compute_s: Seconds
    data_s: Seconds
    update_s: Seconds
    exposed_communication_s: Seconds
    low: dict[str, Seconds]
    high: dict[str, Seconds]
    average_s: Seconds | None
    activations_s: Seconds
    staleness: Amount | None
    dropped: Amount | None
    idle: Real | None
    bytes_per_step: Amount | None
    refined: "RefinedRow"


class MadeFromRow(TypedDict):
    first_step: Count
    last_step: Count


class RefinedRow(ForecastRow):
    """A forecast with measured steps, in place of the first."""

    made_from: MadeFromRow


class StepForecast(TypedDict):
    cluster: str
    step_s: StepSeconds
    step_low_s: Seconds
    step_high_s: Seconds


class ForecastParts(TypedDict):
    compute_s: Seconds
    data_s: Seconds
    update_s: Seconds
    exposed_communication_s: Seconds


class EveryStepForecast(StepForecast, ForecastParts):
    stragglers_s: Seconds
    low: ForecastParts
    high: ForecastParts


class ModeForecast(StepForecast):
    mode_in_words: str
    after_step: Count
    average_s: Seconds | None


class ServerForecast(ModeForecast):
    staleness: Amount
    dropped: Amount
    idle: Real
    bytes_per_step: Amount


class SplitForecast(StepForecast):
    compute_s: Seconds
    stragglers_s: Seconds
    activations_s: Seconds
    exposed_communication_s: Seconds
    update_s: Seconds


class StagesForecast(StepForecast):
    compute_s: Seconds
    stragglers_s: Seconds
    idle: Real


class LearnableForecast(TypedDict):
    """The entries of a forecast from which a plan learns."""

    exchange: str
    compressor: str


class FaultRow(TypedDict, total=False):
    """The last fault in fault.json, with those before it."""

    kind: str
    rank: int
    step: Count
    line: str
    then: str
    time: str
    earlier: list["FaultRow"]


class ModelWords(TypedDict, total=False):
    name: str


class TrainWords(TypedDict, total=False):
    global_batch_size: Annotated[int, Meta(ge=1, le=10**9)]
    micro_batch_size: Annotated[int, Meta(ge=1, le=10**9)]


class SolverWords(TypedDict, total=False):
    base_lr: Amount


class SynchronyWords(TypedDict, total=False):
    mode: str
    clock: str
    warm_steps: Samples


class ParallelWords(TypedDict, total=False):
    scheme: str
    model: Rank
    stages: list[Any]


class RecipeWords(TypedDict, total=False):
    """The entries of recipe.toml for readers that do not build a Recipe."""

    model: ModelWords
    data: dict[str, Any]
    task: dict[str, Any]
    train: TrainWords
    solver: SolverWords
    synchrony: SynchronyWords
    parallel: ParallelWords


SCHEMAS: dict[str, Any] = {
    "result.json": ResultRow,
    "environment.json": EnvironmentRow,
    "forecast.json": ForecastRow,
    "fault.json": FaultRow,
}
"""The schemas of files that a run writes once; other files may hold any object."""
