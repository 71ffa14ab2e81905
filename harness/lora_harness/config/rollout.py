"""The ``[rollout]`` section: which engine samples, how the policy reaches it, and what of it is checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lora_harness.config.sections import PathOption, Section

Urls = Annotated[tuple[str, ...], Field(strict=False)]


class SglangSection(Section):
    python: PathOption | None = Field(
        default=None, description="interpreter that has SGLang, if it is not the trainer's own; servers run with it"
    )
    engines: int = Field(default=1, ge=1, description="servers to start, 1 or more; requests are shared out over them")
    urls: Urls = Field(default=(), description="list of servers that run already, used instead of starting any")
    in_process: bool = Field(
        default=False, description="run one engine inside the trainer's process instead of servers; one rank only"
    )
    port: int | None = Field(
        default=None,
        ge=1024,
        le=65535,
        description="port of the first server, the next ones follow it; by default free ports are found",
    )
    adapter_directory: PathOption | None = Field(
        default=None,
        description="hand adapters over through this directory (tmpfs, shared file system) instead of in the request",
    )
    keep: int | None = Field(
        default=None,
        ge=2,
        description="adapter versions that an engine holds at the same time, 2 or more; default 2 in adapter mode",
    )
    start_timeout: float = Field(default=600.0, gt=0, description="seconds that a server may take to start, above 0")
    timeout: float = Field(
        default=1800.0, gt=0, description="seconds that one call of an engine may take, above 0; then it is aborted"
    )
    arguments: dict[str, Any] = Field(
        default={}, description="table of SGLang's own arguments, under the names of its Engine, e.g. tp_size = 2"
    )


class RolloutSection(Section):
    engine: Literal["local", "sglang"] = Field(
        default="local", description="'local' samples in this process, 'sglang' on SGLang"
    )
    mode: Literal["adapter", "merge"] | None = Field(
        default=None,
        description="how the policy reaches SGLang: 'adapter' sends the adapter alone, 'merge' folds it into the base "
        "and sends full weights; default 'merge' with engine = 'sglang', and the run says so",
    )
    train_only: bool = Field(
        default=False, description="keep rollouts on the base: the adapter is trained and never sent to the engine"
    )
    max_new_tokens: int = Field(default=64, ge=1, description="longest completion in tokens, 1 or more")
    temperature: float = Field(
        default=1.0, gt=0, description="sampling temperature, above 0 (greedy samples are all alike)"
    )
    max_batch_size: int = Field(
        default=128, ge=1, description="most sequences decoded together, 1 or more; bounds the KV cache"
    )
    max_logprob_gap: float | None = Field(
        default=None,
        gt=0,
        description="end the run when the trainer's and the engine's log-probability of a drawn token differ by more, "
        "above 0; by default the gap is only reported",
    )
    sync_buffer_mib: int | None = Field(
        default=None,
        ge=1,
        description="most MiB of tensors in one message to an engine, 1 or more; default 512 with engine = 'sglang'",
    )
    delta_skip: float | None = Field(
        default=None,
        ge=0,
        description="send no new version when no factor changed by more, 0 or more; default 1e-6 with engine = "
        "'sglang'",
    )
    sglang: SglangSection | None = Field(default=None, description="table of SGLang options")

    @model_validator(mode="after")
    def _defaults(self) -> RolloutSection:
        if self.engine == "sglang":
            self._fill(sglang=SglangSection())
        if self.engine == "sglang" and not self.train_only:
            self._fill(sync_buffer_mib=512, delta_skip=1e-6)
            if self.sync_mode == "adapter":
                assert self.sglang is not None
                self.sglang._fill(keep=2)
        return self

    @property
    def sync_mode(self) -> Literal["adapter", "merge"]:
        """How the policy reaches the engine."""
        return self.mode or ("merge" if self.engine == "sglang" else "adapter")
