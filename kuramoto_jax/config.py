"""Configuration: frozen dataclasses that hold every default and check every value.

A run is described by one `Config`. `Config.from_mapping` builds it from any nested mapping (an
ml_collections `ConfigDict`, the content of a `config.json`); an unknown key, a wrong type or an
inconsistent value raises a `ConfigError` whose message is one line that names the field.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

MODELS = ("kuramoto", "transformer")
DTYPES = ("float32", "bfloat16")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field, its value and a remedy."""


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    model: str = "",
) -> Any:
    """Declares a field: its default, a line of help, the values it may take, and its model."""
    if choices:
        help += f" ({', '.join(choices)})"
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "model": model,
    }
    return dataclasses.field(default=default, metadata=metadata)


def _check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Holds one number, or each of a tuple, to the bounds its field declares."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{name}={number}: must be a finite number")
        for bound, holds, words in (
            ("at_least", lambda x, b: x >= b, "at least"),
            ("above", lambda x, b: x > b, "above"),
            ("at_most", lambda x, b: x <= b, "at most"),
        ):
            limit = metadata[bound]
            if limit is not None and not holds(number, limit):
                raise ConfigError(f"{name}={number}: must be {words} {limit:g}")


class _Group:
    """What the groups of a configuration share: a prefix for messages, and checks of each field."""

    _prefix: typing.ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = self._prefix + field.name, getattr(self, field.name)
            choices = field.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(choices)}")
            if not isinstance(value, str | bool):
                _check_range(name, value, field.metadata)


@dataclasses.dataclass(frozen=True)
class ModelConfig(_Group):
    """The network. Fields marked with a model's name are for that model alone.

    Where the paper's text leaves a choice open, the default is what trained best in short runs on
    four megabytes of enwik8 (docs/training.md), and the alternatives can be selected: initial
    phases of which most nearly agree, on a ramp of spreads, rather than all uniform on the circle,
    the bound on the norm rather than on each coordinate, a value gate that starts at one, a
    feed-forward that starts small. The readout starts small for another reason, to begin near the
    loss of equal odds at every width.

    Fields from `gates` to `drift`, and the values "none", are for ablations.
    """

    _prefix = "model."

    name: str = option("kuramoto", "architecture", choices=MODELS)
    symbols: int = option(256, "alphabet size V; bytes need 256", at_least=1)
    layers: int = option(4, "layers L", at_least=1)
    width: int = option(128, "coordinates of a token, D = heads * K", at_least=1)
    heads: int = option(4, "attention heads H", at_least=1)
    hidden: int = option(384, "feed-forward width F", at_least=1)
    dtype: str = option("float32", "compute type; angles stay float32", choices=DTYPES)
    remat: bool = option(False, "recompute each layer in the backward pass: less memory, more time")
    unroll: int = option(
        8, "layers unrolled in the compiled loop over layers: speed for compile time", at_least=1
    )
    rate_base: float = option(10000.0, "base of the geometric position rates", above=1.0)

    implementation: str = option(
        "auto",
        "attention implementation; one that does not work here gives way to xla",
        choices=("auto", "reference", "xla", "cudnn", "pallas"),
    )
    gates: bool = option(True, "gate the scores; without, all coordinates count", model="kuramoto")
    gate_inputs: str = option(
        "head",
        "what gates and value gate of a head read: its own coordinates, or the whole token's",
        choices=("head", "token"),
        model="kuramoto",
    )
    gate_normalization: bool = option(
        True, "divide the gates of a head by their mean", model="kuramoto"
    )
    value_gate: bool = option(
        True, "scale the coupling by a signed readout of the phases", model="kuramoto"
    )
    value_projection: bool = option(
        False, "average a dense projection of the lift in place of the lift", model="kuramoto"
    )
    normalization: bool = option(
        False, "RMS normalisation of what gates and feed-forward read", model="kuramoto"
    )
    drift: str = option(
        "learned",
        "phase drift omega t in the score: learned rates, the initial ones throughout, or none",
        choices=("learned", "fixed", "none"),
        model="kuramoto",
    )
    rates: str = option(
        "rope",
        "initial omega: geometric RoPE rates, or none",
        choices=("rope", "zero"),
        model="kuramoto",
    )
    rate_scale: float = option(1.0, "factor on the initial rates", above=0.0, model="kuramoto")
    tau: float = option(
        1.0, "initial inverse temperature of each head", above=0.0, model="kuramoto"
    )
    phase_init: str = option(
        "ramp",
        "spread of the initial phases: growing along each head, or the same for all coordinates",
        choices=("ramp", "uniform"),
        model="kuramoto",
    )
    phase_spread: float = option(
        math.pi, "largest initial phase in radians", above=0.0, at_most=math.pi, model="kuramoto"
    )
    phase_spread_min: float = option(
        0.1,
        "initial phase of a ramp's first coordinate, in radians",
        above=0.0,
        at_most=math.pi,
        model="kuramoto",
    )
    phase_power: float = option(
        6.0,
        "initial phases are spread * sign(u) |u|^power, u uniform: 1 spreads symbols evenly, more "
        "lets most nearly agree and few stand apart",
        above=0.0,
        model="kuramoto",
    )
    bound: str = option(
        "norm",
        "tanh bound on increments: of the whole increment, of each coordinate, or none",
        choices=("norm", "coordinate", "none"),
        model="kuramoto",
    )
    radius: float = option(
        1.0,
        "initial radius of the bound in radians, of each coordinate or of the rms increment",
        above=0.0,
        model="kuramoto",
    )
    value_bias: str = option(
        "ones",
        "initial bias of the value gate: on all coordinates, on even ones, on none",
        choices=("ones", "alternating", "zeros"),
        model="kuramoto",
    )
    feedforward: str = option(
        "raw",
        "what SwiGLU reads: the raw angle, its lift, or no feed-forward at all",
        choices=("raw", "lift", "none"),
        model="kuramoto",
    )
    feedforward_scale: float = option(
        0.1, "factor on the initial feed-forward output matrix", above=0.0, model="kuramoto"
    )
    tied_readout: bool = option(True, "read out against the embedding's phases", model="kuramoto")
    readout_logit: float = option(
        1.0,
        "initial logit of a symbol whose phases agree fully: the readout scale times D",
        above=0.0,
        model="kuramoto",
    )
    embedding_std: float = option(
        0.2, "standard deviation of the initial embeddings", above=0.0, model="transformer"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            lower = self.width - self.width % self.heads
            valid = " or ".join(str(w) for w in (lower, lower + self.heads) if w)
            raise ConfigError(
                f"model.width={self.width}: must be a multiple of model.heads={self.heads}, "
                f"such as {valid}"
            )
        if self.name == "transformer" and (self.width // self.heads) % 2:
            raise ConfigError(
                f"model.width={self.width}: with model.heads={self.heads} a head has "
                f"{self.width // self.heads} features; rotary position needs an even number"
            )
        if not (self.gates or self.gate_normalization):
            raise ConfigError(
                "model.gate_normalization=False: has no effect with model.gates=False; "
                "leave out one of the two"
            )
        if self.phase_init == "ramp" and self.phase_spread_min > self.phase_spread:
            raise ConfigError(
                f"model.phase_spread_min={self.phase_spread_min}: must be at most "
                f"model.phase_spread={self.phase_spread}"
            )
        for field in dataclasses.fields(self):
            owner = field.metadata["model"]
            if owner and owner != self.name and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"model.{field.name}={getattr(self, field.name)!r}: has no effect on "
                    f"model.name={self.name!r} (it belongs to {owner!r}); leave it out"
                )

    @property
    def head_width(self) -> int:
        """Coordinates of a head, K."""
        return self.width // self.heads


@dataclasses.dataclass(frozen=True)
class DataConfig(_Group):
    """The corpus and how it is cut."""

    _prefix = "data."

    source: str = option("stdlib", "where bytes come from", choices=("enwik8", "stdlib", "file"))
    path: str = option("", "file to read: required for source file, optional for enwik8")
    split: tuple[float, float, float] = option(
        (0.9, 0.05, 0.05),
        "train, validation and test fractions, in order (enwik8 is always 90/5/5 million bytes)",
        above=0.0,
        at_most=1.0,
    )
    window: int = option(256, "bytes a model sees at once, T", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(sum(self.split) - 1.0) > 1e-9:
            raise ConfigError(
                f"data.split={self.split}: must sum to 1, sums to {sum(self.split):g}"
            )
        if self.source == "file" and not self.path:
            raise ConfigError("data.path='': data.source='file' needs the path of a file")
        if self.source == "stdlib" and self.path:
            raise ConfigError(
                f"data.path={self.path!r}: data.source='stdlib' reads no file; "
                "set data.source to 'file' or 'enwik8'"
            )


@dataclasses.dataclass(frozen=True)
class OptimConfig(_Group):
    """AdamW with warm-up and cosine decay."""

    _prefix = "optim."

    learning_rate: float = option(1e-2, "peak learning rate of matrices", above=0.0)
    phase_rate: float = option(5.0, "phases learn this many times faster than matrices", at_least=0)
    embedding_rate: float = option(
        1.0, "embeddings that are not phases (the transformer's), likewise", at_least=0
    )
    gate_rate: float = option(0.3, "matrices of gates and value gates, likewise", at_least=0)
    omega_rate: float = option(
        0.1, "drift rates omega, in radians a position, likewise", at_least=0
    )
    scalar_rate: float = option(
        3.0, "other scalars and vectors (tau, radii, scales, biases), likewise", at_least=0
    )
    warmup: float = option(
        0.05, "part of train.steps over which the rate rises", at_least=0.0, at_most=1.0
    )
    final: float = option(
        0.05,
        "part of the peak rate that the cosine reaches after the last step",
        at_least=0.0,
        at_most=1.0,
    )
    weight_decay: float = option(0.1, "decoupled weight decay, on matrices alone", at_least=0.0)
    beta1: float = option(0.9, "decay of Adam's first moment", at_least=0.0, at_most=0.99999)
    beta2: float = option(0.95, "decay of Adam's second moment", at_least=0.0, at_most=0.99999)
    clip: float = option(1.0, "largest global gradient norm; 0 turns clipping off", at_least=0.0)


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Group):
    """The training run."""

    _prefix = "train."

    steps: int = option(1000, "optimizer steps", at_least=1)
    batch_size: int = option(16, "windows a step, over all devices", at_least=1)
    microbatch: int = option(
        0,
        "windows whose gradient is taken at once, a divisor of batch_size: changes memory and "
        "speed; 0 takes the whole batch, on a single CPU a few that fit its caches",
        at_least=0,
    )
    eval_batch_size: int = option(
        64, "windows evaluated at once; changes memory, not scores", at_least=1
    )
    log_every: int = option(10, "steps between training rows and progress lines", at_least=1)
    eval_every: int = option(500, "steps between validations", at_least=1)
    checkpoint_every: int = option(500, "steps between checkpoints", at_least=1)
    keep: int = option(2, "newest checkpoints kept, beside the best", at_least=1)
    sample_length: int = option(200, "bytes sampled at each validation; 0 for none", at_least=0)
    tensorboard: bool = option(True, "write TensorBoard event files")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.microbatch and self.batch_size % self.microbatch:
            valid = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            near = sorted(valid, key=lambda n: abs(n - self.microbatch))[:2]
            raise ConfigError(
                f"train.microbatch={self.microbatch}: must divide train.batch_size="
                f"{self.batch_size}, such as {' or '.join(map(str, sorted(near)))}"
            )


@dataclasses.dataclass(frozen=True)
class Config(_Group):
    """Everything that defines a run."""

    seed: int = option(0, "seed of the initial parameters and of the batches", at_least=0)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed}: must be from 0 to {2**31 - 1}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | ConfigDict) -> "Config":
        """Builds a configuration from a nested mapping; keys left out take their defaults.

        Raises:
          ConfigError: for an unknown key, a value of the wrong type, or one that cannot be run.
        """
        values = completed(mapping)
        groups = {
            name: kind(**values[name])
            for name, kind in typing.get_type_hints(cls).items()
            if _is_group(kind)
        }
        return cls(**values | groups)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as nested dictionaries, the inverse of `from_mapping`."""
        return dataclasses.asdict(self)


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, _Group)


def completed(mapping: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries with every key: given values and defaults.

    Names and types are checked; whether the values can be run together is not.

    Raises:
      ConfigError: for an unknown key or a value of the wrong type.
    """
    if isinstance(mapping, ConfigDict):
        mapping = mapping.to_dict()
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{mapping!r}: a configuration must be a mapping of keys to values")
    values = Config().to_dict()
    kinds = typing.get_type_hints(Config)
    for key, value in mapping.items():
        if key not in values:
            raise ConfigError(unknown_key(str(key)))
        if not _is_group(kinds[key]):
            values[key] = _typed(key, value, kinds[key])
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r}: must be a group of fields")
        inner = typing.get_type_hints(kinds[key])
        for name, item in value.items():
            if name not in values[key]:
                raise ConfigError(unknown_key(f"{key}.{name}"))
            values[key][name] = _typed(f"{key}.{name}", item, inner[name])
    return values


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """Returns `value` as the declared type; whole numbers are floats too, nothing else changes."""
    if typing.get_origin(annotation) is tuple:
        kinds = typing.get_args(annotation)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise ConfigError(f"{name}={value!r}: must be {len(kinds)} numbers")
        return tuple(_typed(name, item, kind) for item, kind in zip(value, kinds, strict=True))
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
        raise ConfigError(f"{name}={value!r}: must be {words[annotation]}")
    return value


def options() -> dict[str, dataclasses.Field]:
    """Returns every key of a configuration with the field that declares it, in order."""
    found = {}
    for field in dataclasses.fields(Config):
        if _is_group(field.type):
            for inner in dataclasses.fields(field.type):  # type: ignore[arg-type]
                found[f"{field.name}.{inner.name}"] = inner
        else:
            found[field.name] = field
    return found


def unknown_key(name: str) -> str:
    """Returns the one line that says a key does not exist, and which may have been meant."""
    known = list(options())
    near = [key for key in known if key.split(".")[-1] == name.split(".")[-1]]
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all keys"
    return f"{name}: unknown key; {hint}"


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested mapping as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def parameter_budget(model: ModelConfig) -> dict[str, int]:
    """Counts parameters from the sizes alone, by part; "total" is their sum.

    For D coordinates, H heads, F hidden units, V symbols and L layers:

      kuramoto     attention L (3 (2D D / H + D) + H + 2D)  (gates, tau, omega, radii),
                   or L (3 (2D D + D) + H + 2D) where the gates read the whole token
                   feed-forward L (3 D F + D), or L (5 D F + D) on the lift
                   embedding V D, readout V + 1 (+ V D untied)
      transformer  attention 4 L D^2, feed-forward 3 L D F, norms 2 L D + D, embedding V D

    What an ablation leaves out is not counted; what it puts back is: a value projection has 4 D^2
    in a layer, a norm one gain for each number it reads.
    """
    d, h, f, v, n = model.width, model.heads, model.hidden, model.symbols, model.layers
    if model.name == "transformer":
        parts = {
            "embedding": v * d,
            "attention": n * 4 * d * d,
            "feedforward": n * 3 * d * f,
            "norms": n * 2 * d + d,
        }
    else:
        reads = 2 * d if model.feedforward == "lift" else d
        readouts = 2 * model.gates + model.value_gate
        radii = d if model.bound != "none" else 0
        gate_reads = 2 * (model.head_width if model.gate_inputs == "head" else d)
        attention = readouts * (gate_reads * d + d) + h + radii
        attention += d if model.drift == "learned" else 0
        attention += 4 * d * d if model.value_projection else 0
        attention += 2 * d if model.normalization else 0
        feedforward = 2 * reads * f + f * d + radii + (reads if model.normalization else 0)
        parts = {
            "embedding": v * d,
            "attention": n * attention,
            "feedforward": n * feedforward if model.feedforward != "none" else 0,
            "readout": v + 1 + (0 if model.tied_readout else v * d),
        }
    return parts | {"total": sum(parts.values())}
