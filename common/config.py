"""The configuration: one frozen tree, one YAML file, ``--set path=value`` on top.

Precedence: default < file < ``--set``. Unknown keys are refused with the nearest known name. A
component gets its slice of the tree (``config.engine``), never the whole. Units are in the names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import ConfigError
from common.failpoints import Failpoints

DType = Literal["auto", "float32", "bfloat16", "float16"]
Transport = Literal["local", "shm", "gloo", "nccl", "nixl", "tcp", "grpc"]
WireFormat = Literal["native", "bfloat16", "float8", "int8"]
Mode = Literal["split", "adaptive", "colocated"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class SamplingDefaultsConfig(_Section):
    """What a request that does not say gets; default: what the model recommends, else OpenAI's values."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)


class ModelConfig(_Section):
    """Which model is served. ``name`` is a known name, a local path, or a Hugging Face id."""

    name: str = "smollm2-135m"
    served_name: str | None = Field(None, description="name in the API; default: `name`")
    dtype: DType = Field("auto", description="auto: float32 on a CPU, the checkpoint's on a GPU")
    max_model_len: int | None = Field(None, ge=1, description="context limit in tokens; default: the model's")
    cache_dir: str | None = Field(None, description="where fetched models are kept")
    default_sampling: SamplingDefaultsConfig = SamplingDefaultsConfig()


class EngineConfig(_Section):
    """How one worker runs the model."""

    device: str = "auto"
    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV block")
    pool_bytes: int | None = Field(None, ge=1, description="KV pool of one worker; default: a share of free memory")
    prefix_cache: bool = True
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="what computes a step: compiled here for this CPU (native: the fastest, and batch-invariant), or "
        "torch; auto: native where the CPU has AVX-512 and a C++ compiler is found",
    )
    quantization: Literal["none", "int8", "int4", "stored"] = Field(
        "none",
        description="of the weights that rows are multiplied with (native kernels). int8, int4: 32 weights share a "
        "scale (the head stays int8); stored: what a GGUF file has as Q8_0, Q4_0 or Q4_1 stays so, the rest as int8",
    )
    batch_invariant: bool = Field(
        False, description="bitwise equal results in any batch, also where torch computes (float32 only there)"
    )
    threads: int | None = Field(None, ge=1, description="compute threads; default: cores over workers on this host")
    step_timeout_s: float = Field(
        60.0, gt=0, description="a step that takes longer is taken for hung: the worker gets no new work until it ends"
    )


class PrefillConfig(_Section):
    """The prefill pool. ``addresses``: workers started by hand, instead of ``workers`` under Ray."""

    workers: int = Field(1, ge=0)
    addresses: tuple[str, ...] = ()
    chunk_tokens: int = Field(512, ge=1, description="token budget of one step")
    max_sequences: int = Field(8, ge=1, description="prompts in one step")
    undelivered_chunks: int = Field(
        4,
        ge=0,
        description="computed prompts whose KV is still on its way to one decode worker, the latest not counted, may "
        "have so many times `chunk_tokens` tokens; beyond that no further prompt for it is computed",
    )

    @property
    def undelivered_tokens(self) -> int:
        return self.undelivered_chunks * self.chunk_tokens


class DecodeConfig(_Section):
    """The decode pool."""

    workers: int = Field(1, ge=0)
    addresses: tuple[str, ...] = ()
    max_sequences: int = Field(64, ge=1, description="sequences in one step")
    chunk_tokens: int = Field(
        256, ge=1, description="budget for prompt tokens in one step (resume, adaptive, colocated)"
    )


class TransferConfig(_Section):
    """How KV moves. ``transports`` in order of preference; a pair uses the first that both can (NIXL is an extra:
    without it, it is passed over).
    """

    transports: tuple[Transport, ...] = ("shm", "nixl", "tcp", "grpc")
    lease_s: float = Field(30.0, gt=0, description="a ticket without progress for this long is void")
    pull_patience_s: float = Field(
        2.0, gt=0, description="a pulled prefix without progress for this long is given up, and computed"
    )
    staging_bytes: int = Field(64 << 20, ge=1 << 16, description="bytes in flight per pair of workers")
    verify: bool = Field(True, description="check each block's checksum on arrival")
    retries: int = Field(3, ge=0, description="how often pieces that were lost or damaged are asked for again")
    wire_formats: tuple[WireFormat, ...] = Field(
        ("native",),
        min_length=1,
        description="number formats of KV on its way, in order of preference; a pair uses the first that both list. "
        "native loses nothing that the receiving pool could hold; the others round (see docs/kv-handoff.md)",
    )


class RouterConfig(_Section):
    """The gateway."""

    replicas: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="HTTP; 0 picks a free port")
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC for clients; 0 picks a free port")
    max_queue: int = Field(1024, ge=0, description="requests waiting for a worker; more are refused (429)")
    timeout_s: float = Field(600.0, gt=0, description="longest life of one request")
    max_attempts: int = Field(3, ge=1, description="placements of one request before it fails")
    default_max_tokens: int = Field(4096, ge=1, description="when the client gives none; capped by the context limit")
    recent_requests: int = Field(4096, ge=1, description="finished requests kept for /requests/{id}")
    probe_timeout_s: float = Field(10.0, gt=0, description="patience of /ready's own request")
    pulls: bool = Field(True, description="a worker may pull a prefix from another one instead of computing it")
    pull_token_cost: float = Field(
        0.1, ge=0, le=1, description="pulling the KV of a token takes this share of the time of computing it"
    )
    pull_fixed_tokens: int = Field(
        64, ge=0, description="a pull takes, beside that, the time of computing this many tokens"
    )
    local_prefill_tokens: int = Field(
        128,
        ge=0,
        description="adaptive mode: up to this many prompt tokens that the decode worker lacks it computes itself",
    )
    worker_patience_s: float = Field(10.0, ge=0, description="how long requests wait for a role without a ready worker")


class WorkerConfig(_Section):
    """A worker process, whichever its role."""

    id: str | None = Field(None, description="default: ROLE-N under Ray, ROLE-PORT by hand")
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    report_interval_s: float = Field(0.1, gt=0, description="load reports to routers while busy")
    heartbeat_s: float = Field(
        1.0, gt=0, description="load reports while idle; more often where `suspect_after_s` asks for it"
    )
    suspect_after_s: float = Field(5.0, gt=0, description="silence after which a worker gets no new work")
    drain_timeout_s: float = Field(30.0, gt=0, description="what has not ended by then goes on at other workers")


class ClusterConfig(_Section):
    """Ray."""

    address: str | None = Field(None, description="join this Ray cluster instead of starting one")
    secret: str | None = Field(None, description="shared by all processes of the cluster; calls without it are refused")
    start_timeout_s: float = Field(300.0, gt=0)
    stop_timeout_s: float = Field(10.0, gt=0)
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class LogConfig(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    content: bool = Field(False, description="also log prompts and answers; they may be private")


class Config(_Section):
    """The whole tree."""

    mode: Mode = "split"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    failpoints: Mapping[str, str] = Field(default_factory=dict, description="name → action, see common/failpoints.py")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        Failpoints(self.failpoints)
        invariant_torch = self.engine.batch_invariant and self.engine.kernels == "torch"
        if invariant_torch and self.model.dtype not in ("auto", "float32"):
            raise ValueError(
                f"engine.batch_invariant with torch's kernels needs model.dtype float32, it is {self.model.dtype}"
            )
        if self.mode == "colocated":
            if self.decode.workers < 1 and not self.decode.addresses:
                raise ValueError("mode colocated needs decode.workers >= 1, it is 0")
        elif not (self.prefill.workers or self.prefill.addresses):
            raise ValueError(f"mode {self.mode} needs prefill.workers >= 1, it is 0")
        elif not (self.decode.workers or self.decode.addresses):
            raise ValueError(f"mode {self.mode} needs decode.workers >= 1, it is 0")
        return self


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads ``path`` (YAML; None for defaults) and applies ``overrides`` (``a.b=value``).

    Raises ConfigError with one line that names the key, the limit and the given value.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # no text, an impossible date, too deep
            raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {path} must hold a mapping, it holds a {type(loaded).__name__}")
        tree = loaded or {}
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """The configuration that ``tree`` (parsed YAML or JSON) describes. Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(detail) for detail in error.errors())) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set wants path=value, got {override!r}")
    node = tree
    *parents, leaf = path.strip().split(".")
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {path}: {name} is not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {path}: {text!r} is not a YAML value") from error


def _explain(detail: Any) -> str:
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = _known_keys(detail["loc"][:-1])
        name = str(detail["loc"][-1])
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        return f"unknown config key {location!r}; nearest known: {'.'.join([*map(str, detail['loc'][:-1]), *near])!r}"
    message = detail["msg"].removeprefix("Value error, ")
    if not location:
        return str(message)
    return f"config {location}: {message}, got {detail['input']!r}"


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    section: Any = Config
    for name in path:
        section = section.model_fields[name].annotation
    return list(section.model_fields)
