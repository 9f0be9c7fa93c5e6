"""The one file that touches vLLM's semi-public names, so that a new vLLM is met in one place.

Importing it imports vLLM, which takes seconds: only worker threads and engine processes do so. It was run with
vLLM 0.32.0; the names and signatures used here are the same from 0.20 to 0.33.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import msgspec

from omni_trio.errors import OmniTrioError
from omni_trio.pipeline import nearest

from ._version import HINT, TESTED, installed_version

_VERSION = installed_version()

try:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs.engine import embeds_input, tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams
    from vllm.renderers.inputs.preprocess import parse_model_prompt
    from vllm.renderers.params import ChatParams
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
except ImportError as error:
    raise OmniTrioError(
        f"vLLM {_VERSION} is installed but can not be used: {error} (tested with {', '.join(TESTED)}); {HINT}"
    ) from error

__all__ = [
    "Frontend",
    "OutputProcessor",
    "PoolingParams",
    "SamplingParams",
    "check_engine_args",
    "decode_outputs",
    "decode_outputs_one_by_one",
    "encode",
    "engine_config",
    "fan_out",
    "lora_request",
    "make_sampling_params",
    "new_output_processor",
    "normalised",
    "public_fields",
    "releasing_request",
    "run_engine_core",
    "silent",
    "validate_params",
    "visible_devices",
]

Frames: TypeAlias = Sequence[Any]
"""The zmq frames of one message."""

# Creating a config sets process-wide state for its duration (the current config, the environment).
_config_lock = threading.Lock()


class BadEngineArgs(OmniTrioError):
    """An argument that `vllm.EngineArgs` does not know; `key` is its name."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def check_engine_args(args: Mapping[str, Any]) -> None:
    """Check the names of engine arguments.

    Raises:
        BadEngineArgs: vLLM knows no such argument; names the nearest one.
    """
    known = [name for name in EngineArgs.__dataclass_fields__ if not name.startswith("_")]
    for name in args:
        if name not in known:
            raise BadEngineArgs(f"vLLM {_VERSION} has no engine argument {name!r}{nearest(name, known)}", name)
    if args.get("data_parallel_size", 1) != 1:
        raise BadEngineArgs(
            "each replica is an engine of its own: set the stage's replicas, not data_parallel_size",
            "data_parallel_size",
        )


def engine_config(args: Mapping[str, Any]) -> Any:
    """Build a VllmConfig from plain engine arguments. Blocking: reads the model's files.

    Raises:
        BadEngineArgs: vLLM knows no such argument.
        Exception: whatever vLLM raises about the values.
    """
    check_engine_args(args)
    if isinstance(transfer := args.get("kv_transfer_config"), Mapping):
        # EngineArgs takes plain data for most of its configs, not for this one.
        args = {**args, "kv_transfer_config": _kv_transfer_config(transfer)}
    return EngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)


def _kv_transfer_config(values: Mapping[str, Any]) -> Any:
    known = list(KVTransferConfig.__dataclass_fields__)
    for name in values:
        if name not in known:
            raise BadEngineArgs(
                f"vLLM {_VERSION} has no setting {name!r} in kv_transfer_config{nearest(name, known)}",
                f"kv_transfer_config.{name}",
            )
    return KVTransferConfig(**values)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo what creating a config does to this process's environment (LD_PRELOAD, thread counts, ...)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in [*os.environ]:
            if name not in before:
                del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@attrs.frozen(eq=False)
class Frontend:
    """What turns prompts into engine requests for one model: config and input processor.

    Its methods may be called from several threads at once.
    """

    config: Any
    processor: Any

    @classmethod
    def build(cls, args: Mapping[str, Any]) -> Frontend:
        """Build one from plain engine arguments. Blocking; one at a time in a process."""
        with _config_lock, _environment_kept():
            # vLLM sets up its logging anew with each config. What it has to say is in the engine's log too.
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            config = engine_config(args)
            return cls(config, InputProcessor(config))

    @property
    def shareable(self) -> bool:
        """Whether replicas may share it: not if it mirrors the state of one engine's multimodal cache."""
        return not self.config.model_config.is_multimodal_model

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        length: int = self.config.model_config.max_model_len
        return length

    @property
    def embeds_size(self) -> int:
        """The last dimension of prompt embeddings."""
        model = self.config.model_config
        size: int = (
            model.get_inputs_embeds_size() if hasattr(model, "get_inputs_embeds_size") else model.get_hidden_size()
        )
        return size

    @property
    def takes_embeds(self) -> bool:
        """Whether prompt embeddings may be sent."""
        return bool(self.config.model_config.enable_prompt_embeds)

    @property
    def connector(self) -> str | None:
        """The name of what hands KV caches from engine to engine, if there is one."""
        config = self.config.kv_transfer_config
        return None if config is None else config.kv_connector

    @property
    def has_priorities(self) -> bool:
        """Whether the scheduler looks at priorities; it refuses them otherwise."""
        return bool(self.config.scheduler_config.policy == "priority")

    def adopt(self, ready: Mapping[str, Any]) -> None:
        """Take over what the engine found out while it started, from its first message."""
        model, cache = self.config.model_config, self.config.cache_config
        if (length := ready.get("max_model_len")) is not None:
            model.max_model_len = min(model.max_model_len, length)
        for name in ("num_gpu_blocks", "block_size"):
            if (value := ready.get(name)) is not None:
                setattr(cache, name, value)

    def render_prompt(self, prompt: Mapping[str, Any]) -> Any:
        """Tokenize a prompt as users write it for vLLM: ``prompt`` or ``prompt_token_ids``, multimodal data."""
        renderer = self.processor.renderer
        (rendered,) = renderer.render_cmpl([parse_model_prompt(self.config.model_config, dict(prompt))])
        return rendered

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Put a conversation through the chat template and tokenize it."""
        # Without it the model would be asked to go on with the user's words.
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        _, (rendered,) = self.processor.renderer.render_chat([[dict(m) for m in messages]], params)
        return rendered

    def render_tokens(self, token_ids: list[int]) -> Any:
        """Wrap token ids."""
        if self.processor.tokenizer is None:
            # vLLM then checks nothing, and an id that is out of range kills the engine.
            size = self.config.model_config.get_vocab_size()
            for token_id in token_ids:
                if not 0 <= token_id < size:
                    raise ValueError(f"Token id {token_id} is out of vocabulary (0 to {size - 1})")
        return tokens_input(token_ids)

    def render_embeds(self, embeds: Any) -> Any:
        """Wrap an array or tensor of shape [tokens, hidden]; cast to the model's type."""
        import torch  # noqa: PLC0415 - vLLM has imported it by now; kept out of this file's own imports

        tensor = torch.as_tensor(embeds).detach().to("cpu", self.config.model_config.dtype).contiguous()
        return embeds_input(tensor)

    def request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        supported_tasks: tuple[str, ...],
        *,
        priority: int = 0,
        resumable: bool = False,
    ) -> Any:
        """Validate a rendered prompt with its parameters and make the engine's request of it.

        Args:
            request_id: the request's.
            prompt: what one of the ``render`` methods made.
            params: SamplingParams or PoolingParams; not changed.
            supported_tasks: the engine's.
            priority: lower is sooner.
            resumable: whether the engine keeps the request for more input after it has answered this one.

        Raises:
            Exception: what vLLM raises about prompt and parameters, mostly ValueError.
        """
        request = self.processor.process_inputs(
            request_id, prompt, params, supported_tasks, priority=priority, resumable=resumable
        )
        # vLLM appends random letters to make ids unique; ours already are.
        request.external_req_id = request.request_id
        return request

    def clear_multimodal_cache(self) -> None:
        """Forget which images, sounds and videos the engine has: it has just forgotten them itself."""
        clear = getattr(self.processor.renderer, "clear_mm_cache", None)
        if clear is not None:
            clear()

    def close(self) -> None:
        """Let go of the renderer's executors and caches."""
        shutdown = getattr(self.processor.renderer, "shutdown", None)
        if shutdown is not None:
            shutdown()


def fan_out(request: Any) -> list[Any]:
    """Return the engine's requests that one with n > 1 in its SamplingParams stands for: as vLLM's own, seeds too."""
    parent = ParentRequest(request)
    children = []
    for index in range(request.sampling_params.n):
        child = copy.copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        child.external_req_id = child.request_id
        children.append(child)
    return children


def silent(params: Any) -> Any:
    """Return SamplingParams that have the engine do no more than prefill: it can not sample less than one token."""
    mine = params.clone()
    mine.max_tokens = 1
    mine.min_tokens = 0
    mine.logprobs = None
    return mine


def releasing_request(request_id: str, params: Any) -> Any:
    """Return a request that ends as soon as the engine has it, for its connector to let go of a KV cache.

    None where this vLLM has no such thing; there what is held expires by itself.
    """
    if "abort_immediately" not in EngineCoreRequest.__struct_fields__:
        return None
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        abort_immediately=True,
    )


def lora_request(lora_name: Any, lora_int_id: Any, lora_path: Any) -> Any:
    """Make what the engine calls a LoRA adapter.

    Raises:
        ValueError: something is missing.
    """
    if not isinstance(lora_int_id, int) or lora_int_id < 1:
        raise ValueError(f"lora_int_id must be a whole number from 1, not {lora_int_id!r}")
    if not lora_path or not isinstance(lora_path, str):
        raise ValueError(f"lora_path must be the adapter's folder, not {lora_path!r}")
    return LoRARequest(lora_name=str(lora_name), lora_int_id=lora_int_id, lora_path=lora_path)


def new_output_processor(frontend: Frontend) -> Any:
    """Make the part of vLLM that detokenizes, finds stop strings and collects logprobs."""
    return OutputProcessor(
        frontend.processor.tokenizer,
        log_stats=False,
        stream_interval=frontend.config.scheduler_config.stream_interval,
    )


def public_fields(cls: Any) -> list[str]:
    """Return the names of the parameters that a user may set on SamplingParams or PoolingParams."""
    hidden = {"output_kind", "output_text_buffer_length", "skip_clone", "requires_token_ids"}
    return [name for name in cls.__struct_fields__ if not name.startswith("_") and name not in hidden]


def make_sampling_params(values: Mapping[str, Any]) -> Any:
    """Make SamplingParams of plain values, each checked for its type as the engine's decoder will check it.

    Raises:
        Exception: mostly ValueError and msgspec.ValidationError.
    """
    plain = {**values, "output_kind": RequestOutputKind.DELTA.value}
    return MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(plain))


def normalised(params: Any) -> Any:
    """Return a private copy of SamplingParams or PoolingParams that the engine's decoder is sure to take.

    The engine's input thread dies of a value of the wrong type, and the engine with it goes mute. So what is sent
    has been through the same decoder once before.

    Raises:
        Exception: mostly msgspec.ValidationError.
    """
    mine = params.clone()
    if isinstance(mine, SamplingParams):
        mine.output_kind = RequestOutputKind.DELTA
    decoded = MsgpackDecoder(type(mine)).decode(MsgpackEncoder().encode(mine))
    if isinstance(mine, SamplingParams):
        # It is ours, and vLLM only adds the model's own end tokens to it: a flat copy per request will do.
        decoded.skip_clone = True
    return decoded


def validate_params(frontend: Frontend, params: Any, supported_tasks: tuple[str, ...]) -> None:
    """Check parameters against the model, where this vLLM can do so before there is a prompt.

    Raises:
        Exception: what vLLM raises, mostly ValueError.
    """
    validate = getattr(frontend.processor, "_validate_params", None)
    if validate is not None:
        validate(params, supported_tasks)


class _RawOutputs(msgspec.Struct, array_like=True):
    """The beginning of EngineCoreOutputs, the same in all versions, with its outputs left undecoded."""

    engine_index: int = 0
    outputs: list[msgspec.Raw] = []


class _RawCall(msgspec.Struct, array_like=True):
    engine_index: Any = None
    outputs: Any = None
    scheduler_stats: Any = None
    timestamp: Any = None
    utility_output: tuple[int, str | None, Any] | None = None


class _RawId(msgspec.Struct, array_like=True):
    request_id: str


_decoder = MsgpackDecoder(EngineCoreOutputs)
_encoder = MsgpackEncoder()


def encode(message: Any) -> Sequence[Any]:
    """Encode a request, a list of ids or a call into frames. Trio thread only."""
    frames: Sequence[Any] = _encoder.encode(message)
    return frames


def decode_outputs(frames: Frames) -> Any:
    """Decode one message of the engine. Trio thread only.

    Raises:
        Exception: it can not be decoded; try `decode_outputs_one_by_one`.
    """
    return _decoder.decode(frames)


def decode_outputs_one_by_one(frames: Frames) -> tuple[list[tuple[str, Any]], int | None]:
    """Decode as much as possible of a message that `decode_outputs` can not decode.

    Returns:
        The outputs by request id, an exception in place of each that can not be decoded; and the id of the call
        that the message answers, if it does.

    Raises:
        Exception: not even the request ids can be made out.
    """
    first = frames[0]
    # The helper decoders know nothing of tensors, which are extension types or frames of their own: both
    # pass through them as they are.
    call = msgspec.msgpack.decode(first, type=_RawCall).utility_output
    outputs: list[tuple[str, Any]] = []
    decoder = MsgpackDecoder(EngineCoreOutput)
    for raw in msgspec.msgpack.decode(first, type=_RawOutputs).outputs:
        request_id = msgspec.msgpack.decode(raw, type=_RawId).request_id
        try:
            outputs.append((request_id, decoder.decode([raw, *frames[1:]])))
        except Exception as error:  # handed on as this output's outcome
            outputs.append((request_id, error))
    return outputs, None if call is None else call[0]


def visible_devices(devices: Sequence[str]) -> Mapping[str, str]:
    """Return the environment variable that shows a process only these devices; none on CPUs."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolving the platform looks at the hardware

    if not devices or current_platform.is_cpu():
        return {}
    return {current_platform.device_control_env_var: ",".join(devices)}


def run_engine_core(config: Any, *, alone: bool, handshake_address: str, log_stats: bool) -> None:
    """Run an engine core in this process until it is told to stop, by SIGTERM. Raises what it dies of.

    Args:
        config: a VllmConfig.
        alone: whether the worker may live in this process too, if there is just one.
        handshake_address: where the client waits.
        log_stats: whether outputs carry the scheduler's statistics.
    """
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415 - only engine processes need it
    from vllm.v1.executor import Executor  # noqa: PLC0415 - only engine processes need it
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415 - only engine processes need it

    # On CPUs vLLM turns "uni" into "mp", a second process that takes seconds to start, unless told the class.
    alone = alone and config.parallel_config.world_size == 1
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=handshake_address,
        executor_class=UniProcExecutor if alone else Executor.get_class(config),
        log_stats=log_stats,
        tensor_queue=None,
    )


def on_cpu() -> bool:
    """Whether engines compute on CPUs."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolving the platform looks at the hardware

    return bool(current_platform.is_cpu())


def prompt_length(request: Any) -> int:
    """Return how many tokens the prompt of an engine's request has."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_embeds)
