"""Any causal language model of transformers as a target, also one with recurrent or convolution states.

Owns: loading, the refusal of families that cannot be rolled back, taps, rows. Must not know drafts or
requests. The model is used through what every family shares (``get_decoder().layers``, the embedding and head
accessors, the cache calls), never through a family's own names.

Shapes: T positions fed to the target, N taps, E target width, V vocabulary rows.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockdraft.config import REFUSED_RECURRENT_MODEL_TYPES, TapStream, TargetFacts, token_ids
from blockdraft.errors import CheckpointError, PairError, UnavailableError
from blockdraft.packed import pack_linears_

from .contract import Row, Scored, Target, check_forward, checked_taps
from .fused import FusedTarget, can_fuse
from .hf_attention import use_grouped_attention_
from .hf_cache import RowCache, refusal
from .kimi_k3 import holds_kimi_k3, load_kimi_k3
from .recurrent import Mixers, Undo
from .selftest import identity_of, prove
from .streams import join_streams

__all__ = ["HFTarget", "load_target"]


class _HFRow(Row):
    """A row of one HFTarget; ``num_last`` of its positions came with the last forward."""

    def __init__(self, owner: HFTarget, cache: RowCache, undo: Undo | None) -> None:
        self.owner = owner
        self.cache: RowCache | None = cache
        self.undo = undo  # of the states; None where the row has none
        self.length = 0
        self.num_last = 0

    @property
    def num_positions(self) -> int:
        return self.length

    @property
    def num_bytes(self) -> int:
        beside = 0 if self.undo is None else self.undo.num_bytes
        return 0 if self.cache is None else self.cache.num_bytes + beside

    @property
    def was_freed(self) -> bool:
        return self.cache is None

    def shorten(self, length: int) -> None:
        """Forget all but the first ``length`` positions; those forgotten belong to the last forward."""
        assert self.cache is not None
        self.cache.shorten(length)
        if self.undo is not None:
            self.undo.shorten(length)


class _Capture:
    """Layer outputs of the forward pass that runs now, for the one target that runs it."""

    def __init__(self, owner: HFTarget) -> None:
        self.owner = owner
        self.outputs: dict[int, Tensor] = {}
        self._token: Token[_Capture | None] | None = None

    def __enter__(self) -> None:
        self._token = _capture.set(self)

    def __exit__(self, *_error: object) -> None:
        assert self._token is not None
        _capture.reset(self._token)


# Not a field: hooks of two targets on one model, or of two threads, must not see each other.
_capture: ContextVar[_Capture | None] = ContextVar("blockdraft_capture", default=None)


class HFTarget:
    """A target around a loaded transformers model. The model is not copied; close() removes the hooks."""

    tap_stream: TapStream = "prefix"

    def __init__(self, model: nn.Module, tap_layer_ids: Sequence[int] = ()) -> None:
        self._model = cast(Any, model)
        self._config = self._model.config
        self._text_config = self._config.get_text_config(decoder=True)
        self.facts = _facts_of(self._model)
        self._cache_word = cache_word(self._model, self.facts.model_type)
        self._decoder, self._layers = decoder_of(self._model, self.facts)
        self.tap_layer_ids = checked_taps(tap_layer_ids, len(self._layers))
        self._embedding: Tensor = self._model.get_input_embeddings().weight
        self._head: Any = self._model.get_output_embeddings()
        self.dtype: torch.dtype = self._embedding.dtype
        self.device: torch.device = self._embedding.device
        model.eval()
        self._mixers: Mixers | None = None
        self._handles = [
            self._layers[layer].register_forward_hook(self._hook(layer)) for layer in set(self.tap_layer_ids)
        ]
        try:
            self._probe()
            if self._mixers is not None or self.facts.is_recurrent:
                prove(self, identity_of(self._model))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the hooks off the model. The target must not be used afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._mixers is not None:
            self._mixers.close()

    def new_row(self) -> Row:
        cache = RowCache(self._config, self.facts.model_type)
        return _HFRow(self, cache, None if self._mixers is None else Undo(self._mixers, cache))

    def free(self, row: Row) -> None:
        owned = self._owned(row)
        owned.cache, owned.undo, owned.length, owned.num_last = None, None, 0, 0

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        """One ``Scored`` per row; rows are run one after another, and on an error every row is as it was."""
        owned = [self._owned(row) for row in rows]
        check_forward(ids, owned, num_logits, max_length=self.facts.max_length)
        before = [row.length for row in owned]
        try:
            return [self._score(x, row, num_logits) for x, row in zip(ids, owned, strict=True)]
        except BaseException:
            for row, length in zip(owned, before, strict=True):
                row.shorten(length)
                row.length, row.num_last = length, 0
            raise

    def rollback(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        if len(rows) != len(keep):
            raise ValueError(f"rollback of {len(rows)} rows was given {len(keep)} numbers to keep")
        owned = [self._owned(row) for row in rows]
        for row, kept in zip(owned, keep, strict=True):
            if row.cache is None or not 0 <= kept <= row.num_last:
                raise ValueError(f"cannot keep {kept} positions: the last forward left {row.num_last}")
        for row, kept in zip(owned, keep, strict=True):
            row.length -= row.num_last - kept
            row.num_last = kept
            row.shorten(row.length)

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.embedding(ids.to(self.device), self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, self._head(hidden))

    # ---- inside ----

    def _owned(self, row: Row) -> _HFRow:
        if not isinstance(row, _HFRow) or row.owner is not self:
            raise ValueError("this row belongs to another target")
        return row

    def _score(self, ids_T: Tensor, row: _HFRow, num_logits: int | None) -> Scored:
        num_new = ids_T.shape[0]
        capture = _Capture(self)
        # Inference mode saves a tenth of the time between the matrix products; what leaves this class is made
        # outside it, so that a trainer may use it in a graph.
        with torch.inference_mode():
            ids_1T = ids_T.to(self.device)[None]
            if row.undo is not None:
                row.undo.begin(ids_1T)
            with capture, nullcontext() if row.undo is None else row.undo.recording():
                inner = self._run(ids_1T, row.cache, num_logits)
        row.length += num_new
        row.num_last = num_new
        with torch.no_grad():
            empty_0V = self._embedding.new_empty((0, self.facts.vocab_size))
            logits_TV = empty_0V if inner is None else inner[0].clone()
            if self.tap_layer_ids:
                taps_TNE = torch.stack([capture.outputs[i][0] for i in self.tap_layer_ids], dim=1)
            else:
                taps_TNE = self._embedding.new_empty((num_new, 0, self.facts.hidden_size))
        return Scored(logits_TV=logits_TV, taps_TNE=taps_TNE)

    def _run(self, ids_1T: Tensor, cache: RowCache | None, num_logits: int | None) -> Tensor | None:
        kwargs = {self._cache_word: cache, "use_cache": True}
        if num_logits == 0:  # the head is a third of a small model: leave it out
            self._decoder(input_ids=ids_1T, **kwargs)
            return None
        output = self._model(input_ids=ids_1T, logits_to_keep=num_logits or 0, **kwargs)
        return cast(Tensor, output.logits)

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            capture = _capture.get()
            if capture is not None and capture.owner is self:
                capture.outputs[layer] = join_streams(self.facts.model_type, output)

        return keep

    def _probe(self) -> None:
        """Feed one id: state kept elsewhere, or taps of another shape, show now and not in a request."""
        capture = _Capture(self)
        cache = RowCache(self._config, self.facts.model_type)
        try:
            with torch.inference_mode(), capture:
                self._run(torch.zeros((1, 1), dtype=torch.long, device=self.device), cache, 0)
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # of code that meets a wrong cache
            reason = " ".join(str(error).split())[:160]
            what = f"a cache of its own config that its forward cannot use ({reason})"
            raise PairError(refusal(self.facts.model_type, what)) from error
        has_states = any(any(layer.has_previous_state.values()) for layer in cache.states)
        if cache.lengths != {1} and not (has_states and cache.lengths <= {1}):
            raise PairError(refusal(self.facts.model_type, "state outside its key/value cache"))
        cache.shorten(0)
        if has_states:
            cache = RowCache(self._config, self.facts.model_type)
            with torch.inference_mode():
                self._mixers = Mixers(self._model, lambda ids, row: self._run(ids.to(self.device), row, 0), cache)
        for layer, output in capture.outputs.items():
            if tuple(output.shape) != (1, 1, self.facts.hidden_size):
                raise PairError(
                    f"layer {layer} of {self.facts.model_type!r} puts out {tuple(output.shape)}, not one stream of"
                    f" width {self.facts.hidden_size}, and no published draft says what of it a tap is: name another"
                    " target"
                )


def load_target(
    name_or_path: str | Path,
    *,
    tap_layer_ids: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    pack: bool | None = None,
    fused: bool | None = None,
    trust_remote_code: bool = False,
    tap_stream: TapStream = "prefix",
) -> Target:
    """The target in a local folder or of a hub id, ready to run.

    dtype None: as stored. pack: weights and attention in the form that is fastest on the CPU, the same up to
    rounding; None does it wherever it pays. fused: one pass for all rows, for the families that have it; None uses it
    wherever it is there. The family and the taps are checked before any weight is read. tap_stream: which of the two
    streams of a target with attention residuals (Kimi K3) the taps are.
    """
    source = str(name_or_path)
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"device {device!r} was asked for and no CUDA device is here: use device 'cpu'")
    folder = Path(source).expanduser()
    if holds_kimi_k3(folder):
        if fused:
            raise UnavailableError("fused=True was asked for, and Kimi K3 has no other form here: pass fused=None")
        return load_kimi_k3(folder, tap_layer_ids, tap_stream=tap_stream, dtype=dtype, device=place, pack=pack)
    if tap_stream != "prefix":
        raise PairError(f"taps of the stream {tap_stream!r} were asked for: only Kimi K3 has it; is this its target?")
    model = load_model(source, tap_layer_ids, dtype=dtype, trust_remote_code=trust_remote_code)
    model.to(place)
    can_pack = place.type == "cpu" and not hasattr(model.config, "quantization_config")
    if pack and not can_pack:
        raise UnavailableError(
            f"pack=True needs an unquantised target on the CPU, this one is on {place}: pass pack=None"
        )
    should_pack = can_pack if pack is None else pack
    if fused and not can_fuse(model):
        raise UnavailableError(
            f"fused=True was asked for, and {model.config.model_type!r} has no fused form here: pass fused=None"
        )
    if fused or (fused is None and can_fuse(model)):
        taps = checked_taps(tap_layer_ids, len(model.model.layers))
        return FusedTarget(model.eval(), _facts_of(model), taps, pack=should_pack)
    if should_pack:
        pack_linears_(model)
        use_grouped_attention_(model)
    return HFTarget(model, tap_layer_ids)


def load_model(
    source: str, tap_layer_ids: Sequence[int], *, dtype: torch.dtype | None, trust_remote_code: bool = False
) -> Any:
    """The transformers model itself, whole and without gradients; its family and the taps are checked first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_folder(source)
    config = _read(AutoConfig, source, trust_remote_code=trust_remote_code)
    facts = _declared_facts(config)
    checked_taps(tap_layer_ids, facts.num_layers)
    model, found = _read(
        AutoModelForCausalLM,
        source,
        dtype="auto" if dtype is None else dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
        raise CheckpointError(
            f"{source} lacks {len(missing)} tensors of a {facts.model_type} model ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): fetch it again, or correct its config.json"
        )
    model.requires_grad_(False)
    return model


def _declared_facts(config: Any) -> TargetFacts:
    """Facts of a configuration. Raises PairError, naming the family, when its state is known to be out of reach."""
    raw = _filled(config)
    # Purely recurrent families declare no maximum length: they are refused for what they are, not for that.
    facts = TargetFacts.from_config({"max_position_embeddings": 1, **raw})
    if facts.model_type in REFUSED_RECURRENT_MODEL_TYPES:
        raise PairError(refusal(facts.model_type, "recurrent state that is out of reach or lost between forwards"))
    return TargetFacts.from_config(raw)


def _filled(config: Any) -> dict[str, Any]:
    """The configuration as a dictionary, with the number of layers also where it follows from their kinds."""
    raw: dict[str, Any] = config.to_dict()
    text = config.get_text_config(decoder=True)
    known = {"num_hidden_layers": text.num_hidden_layers} if hasattr(text, "num_hidden_layers") else {}
    return {**known, **raw} if text is config else raw


def _facts_of(model: Any) -> TargetFacts:
    """Facts of a loaded model: those of its configuration, corrected by what really is in memory."""
    config = model.config
    facts = _declared_facts(config)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return dataclasses.replace(
        facts,
        is_recurrent=facts.is_recurrent or bool(getattr(model, "_is_stateful", False)),
        vocab_size=vocab_size,
        max_length=min([facts.max_length, *_rope_limits(config.get_text_config(decoder=True))]),
        eos_token_ids=end_ids_of(model, facts, vocab_size),
    )


def end_ids_of(model: Any, facts: TargetFacts, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text: those of the configuration and of the generation config that the model can emit."""
    more = token_ids("eos_token_id", getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    return tuple(dict.fromkeys(i for i in (*facts.eos_token_ids, *more) if i < vocab_size))


def _rope_limits(config: Any) -> list[int]:
    """Lengths past which the rotary table changes with the longest sequence seen.

    Beyond them a key would depend on what was fed later, or by another row, and no rollback is exact.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = []
    for table in tables:
        if table.get("rope_type") in ("dynamic", "longrope"):
            own = table.get("original_max_position_embeddings")
            shared = getattr(config, "original_max_position_embeddings", None)
            limits.append(int(own or shared or config.max_position_embeddings))
    return limits


def cache_word(model: Any, model_type: str) -> str:
    """The name under which this model takes its cache: it changed between transformers releases."""
    parameters = inspect.signature(model.forward).parameters
    for word in ("cache", "past_key_values"):
        if word in parameters:
            return word
    raise PairError(refusal(model_type, "no key/value cache argument"))


def decoder_of(model: Any, facts: TargetFacts) -> tuple[Any, nn.ModuleList]:
    """The module that runs the layers (embedding to final norm), and its list of layers."""
    names = ("model", "transformer")  # where get_decoder() does not find it
    for decoder in (model.get_decoder(), *(getattr(model, name, None) for name in names)):
        layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == facts.num_layers:
            return decoder, layers
    raise PairError(
        f"target family {facts.model_type!r} has no list of {facts.num_layers} decoder layers to tap: a"
        " causal language model of transformers, built like Llama, is needed"
    )


def _check_folder(source: str) -> None:
    """Raise CheckpointError for what can only be a path and is not there, before a hub is asked for it."""
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "~", os.sep)) or source.count("/") > 1 or "\\" in source
    if path.is_file():
        raise CheckpointError(f"{source} is a file: give the folder that holds config.json and the weights")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json: give the folder of a transformers checkpoint")
    if looks_local and not path.exists():
        raise CheckpointError(f"no folder {source}: give a folder with config.json, or a hub id (owner/name)")


def _read(loader: Any, source: str, **kwargs: Any) -> Any:
    path = Path(source).expanduser()
    is_local = path.is_dir()
    try:
        with _no_progress_bar():
            return loader.from_pretrained(str(path) if is_local else source, **kwargs)
    except Exception as error:  # configs and weights that make no sense raise anything, bare Exception included
        reason = " ".join(str(error).split())[:200]
        if is_local:
            raise CheckpointError(f"{source} cannot be loaded as a causal language model: {reason}") from error
        raise UnavailableError(
            f"target {source!r} is no local folder and could not be fetched from the hub: check the name and"
            f" the network, or give a local folder ({reason})"
        ) from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading draws nothing: a library does not write to its caller's terminal."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
