"""One SGLang engine behind HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
from torch import Tensor

from lora_harness.engines.sglang import wire
from lora_harness.engines.sglang.client import SglangCompletion, SglangRequest
from lora_harness.engines.sglang.overdue import TooLong, abort_overdue
from lora_harness.engines.sglang.server import SglangServer
from lora_plugins_sdk.errors import LoraError

_HEALTH_SECONDS = 10.0
# A busy engine takes an abort between two batches, however short a run's calls may be.
_ABORT_SECONDS = 30.0
_CONNECT_SECONDS = 10.0
_DEATH_SECONDS = 5.0


class HttpClient:
    """A `SglangClient` that speaks to a server over HTTP.

    Tensors travel by value, base64 in JSON: the server may run another torch version, in another container or on
    another machine.

    Args:
        url: for example ``http://127.0.0.1:30000``.
        timeout: most seconds that one call may take; a generation that takes longer is aborted.
        server: the process behind the URL, if this process started it. The client stops it on `close`, and quotes its
            log when it died.
        api_key: SGLang's key, if the server asks for one.
    """

    def __init__(
        self, url: str, *, timeout: float = 600.0, server: SglangServer | None = None, api_key: str | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._server = server
        self._http = httpx2.Client(
            base_url=self._url,
            timeout=httpx2.Timeout(timeout, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=8),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            # A proxy of the environment is for the internet, not for a rollout server.
            trust_env=False,
        )
        self._tp: int | None = None

    @property
    def name(self) -> str:
        """See `SglangClient.name`."""
        return self._url

    def generate(self, requests: Sequence[SglangRequest]) -> list[SglangCompletion]:
        """See `SglangClient.generate`. One HTTP request for all, so that the engine has them all at once."""
        if not requests:
            return []
        try:
            answers = self._post("/generate", wire.generate_fields(requests))
        except TooLong:
            raise abort_overdue(self, requests, self._timeout) from None
        return [wire.read_completion(self._url, one, answer) for one, answer in zip(requests, answers, strict=True)]

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], checksums: Mapping[str, str]
    ) -> None:
        """See `SglangClient.load_adapter`."""
        payload = wire.pack_tensors({key: wire.portable(tensor) for key, tensor in tensors.items()})
        fields = {"lora_name": name, "config_dict": dict(config), "expected_checksums": dict(checksums)}
        self._command("/load_lora_adapter_from_tensors", fields | self._for_every_rank(payload))

    def load_adapter_directory(self, name: str, directory: Path) -> None:
        """See `SglangClient.load_adapter_directory`."""
        self._command("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    def unload_adapter(self, name: str) -> None:
        """See `SglangClient.unload_adapter`."""
        self._command("/unload_lora_adapter", {"lora_name": name})

    def loaded_adapters(self) -> frozenset[str]:
        """See `SglangClient.loaded_adapters`."""
        models = self._answer(self._http.build_request("GET", "/v1/models")).json()["data"]
        return frozenset(one["id"] for one in models if one.get("parent") is not None)

    def begin_weight_update(self) -> None:
        """See `SglangClient.begin_weight_update`. Requests that run are held back and go on afterwards."""
        self._post("/pause_generation", {"mode": "retract"})
        try:
            self._command("/begin_weight_update", {})
        except LoraError:
            self._post("/continue_generation", {})
            raise

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """See `SglangClient.update_weights`."""
        payload = wire.pack_tensors([(key, wire.portable(tensor)) for key, tensor in tensors.items()])
        self._command("/update_weights_from_tensor", {"flush_cache": False} | self._for_every_rank(payload))

    def end_weight_update(self, version: str) -> None:
        """See `SglangClient.end_weight_update`."""
        self._command("/end_weight_update", {})
        self._answer(self._http.build_request("POST", "/flush_cache"))
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self._post("/continue_generation", {})

    def weight_checksums(self) -> Mapping[str, str]:
        """See `SglangClient.weight_checksums`."""
        return wire.weight_checksums(self._command("/weights_checker", {"action": "checksum"})["ranks"])

    def abort(self, rid: str | None = None) -> None:
        """See `SglangClient.abort`."""
        self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid}, timeout=_ABORT_SECONDS)

    def healthy(self) -> bool:
        """See `SglangClient.healthy`."""
        try:
            return self._http.get("/health", timeout=_HEALTH_SECONDS).status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False

    def death(self, during: str = "while it served") -> LoraError | None:
        """See `SglangClient.death`; `during` says when, in the error's words."""
        if self._server is not None:
            try:
                # The connection breaks a moment before the process is gone.
                self._server.raise_if_dead(during, grace=_DEATH_SECONDS)
            except LoraError as told:
                return told
        return None

    def information(self) -> dict[str, Any]:
        """SGLang's arguments as the server resolved them, and what it found out about the model."""
        return self._answer(self._http.build_request("GET", "/server_info")).json()

    def close(self) -> None:
        """See `SglangClient.close`."""
        self._http.close()
        if self._server is not None:
            self._server.stop()

    def _for_every_rank(self, payload: bytes) -> dict[str, list[str]]:
        if self._tp is None:
            self._tp = int(self.information()["tp_size"])
        return {"serialized_named_tensors": [base64.b64encode(payload).decode("ascii")] * self._tp}

    def _command(self, path: str, fields: Mapping[str, Any]) -> Any:
        """Post; an answer that says `success: false` is an error, whatever its status."""
        answer = self._post(path, fields)
        if not answer.get("success"):
            raise self._refused(path, answer.get("message") or answer.get("error_message") or "no reason was given")
        return answer

    def _post(self, path: str, fields: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        request = self._http.build_request(
            "POST",
            path,
            content=json.dumps(fields),
            headers={"Content-Type": "application/json"},
            timeout=httpx2.Timeout(self._timeout if timeout is None else timeout, connect=_CONNECT_SECONDS),
        )
        answer = self._answer(request)
        # Some paths answer with an empty body.
        return answer.json() if answer.content else {}

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        try:
            answer = self._http.send(request)
        except httpx2.ReadTimeout:
            raise TooLong(self._url, path, request.extensions["timeout"]["read"]) from None
        except httpx2.TransportError as error:
            raise self._unreachable(path, error) from None
        if answer.status_code != httpx2.codes.OK:
            raise self._refused(path, _words_of(answer))
        return answer

    def _refused(self, path: str, words: str) -> LoraError:
        return LoraError(
            f"engine {self._url}", reason=f"refused {path}: {words}", cure="correct what the engine's words name"
        )

    def _unreachable(self, path: str, error: Exception) -> LoraError:
        return self.death(f"during {path}") or LoraError(
            f"engine {self._url}",
            reason=f"cannot be reached for {path} ({type(error).__name__}: {error})",
            cure="check that the server runs and that its URL is right",
        )


def _words_of(answer: httpx2.Response) -> str:
    """What SGLang says in an answer that is no success; it has several forms."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text.strip() or f"status {answer.status_code}"
    if isinstance(body, dict):
        error = body.get("error")
        inner = error.get("message") if isinstance(error, dict) else error
        return str(inner or body.get("error_message") or body.get("message") or body)
    return str(body)
