"""One target's tokenizer: text and chat messages to ids, ids to text.

Owns how a tokenizer is loaded and asked. Knows nothing about streams, stop strings or models.
``tokenizers``, ``jinja2`` and ``transformers`` are imported when they are needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from blockdraft.errors import CheckpointError, RequestError
from blockdraft.text.messages import check_chat_messages
from blockdraft.text.prompts import check_unicode, hint

_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Keys of a tokenizer_config.json that change nothing about encoding. A folder with no others is read by
# `tokenizers` alone; any other key leaves the folder to transformers.
_PLAIN_KEYS = frozenset(
    {
        *_NAMED_SPECIAL_TOKENS,
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "is_local",
        "local_files_only",
        "model_max_length",
        "tokenizer_class",
    }
)
# Above this size transformers may repair the splitting rules of a tokenizer it takes for a Mistral one.
_MAX_PLAIN_VOCAB = 100_000


class Tokenizer:
    """One target's tokenizer: text and chat messages to ids, ids to text."""

    def __init__(
        self,
        *,
        backend: Any | None,
        auto: Any | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``backend``: a ``tokenizers.Tokenizer``; ``auto``: transformers' own, where that one encodes."""
        assert backend is not None or auto is not None
        self._backend = backend
        self._auto = auto
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token, added ones included (a target may have more embedding rows)."""
        if self._backend is not None:
            return int(self._backend.get_vocab_size())
        assert self._auto is not None
        return len(self._auto)

    @property
    def sha256(self) -> str:
        """Hash of everything that decides which ids a text gets; the chat template is not part of it."""
        if self._backend is not None:
            content = self._backend.to_str()
        else:
            assert self._auto is not None
            content = json.dumps(self._auto.get_vocab(), sort_keys=True)
        special = json.dumps(self.special_tokens, sort_keys=True, default=str)
        return hashlib.sha256(f"{content}\n{special}".encode()).hexdigest()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text, exactly as the target's own tokenizer gives them."""
        check_unicode(text, "the text")
        if self._auto is not None:
            return list(self._auto.encode(text, add_special_tokens=add_special_tokens))
        assert self._backend is not None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; ids without a token (padding rows of the target) give nothing."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        assert self._auto is not None
        return str(
            self._auto.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    @property
    def can_spell(self) -> bool:
        """Whether single tokens can be asked for: not with a tokenizer that transformers runs in Python."""
        return self._backend is not None

    def definition(self) -> tuple[str, int]:
        """The tokenizer.json that it amounts to, and one more than its highest id; only where it can spell."""
        assert self._backend is not None
        return str(self._backend.to_str()), max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def decoder_kinds(self) -> tuple[str, ...]:
        """Names of the steps that turn tokens into text, outermost first; empty where they are not known."""
        if self._backend is None or self._backend.decoder is None:
            return ()
        return tuple(re.findall(r'"type": ?"(\w+)"', self._backend.decoder.__getstate__().decode()))

    @cached_property
    def special_id_of(self) -> dict[str, int]:
        """Special tokens by their text: what decoding leaves out when special tokens are skipped."""
        if self._backend is None:
            assert self._auto is not None
            return dict(zip(self._auto.all_special_tokens, self._auto.all_special_ids, strict=True))
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out when special tokens are skipped."""
        return frozenset(self.special_id_of.values())

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        assert self._backend is not None
        spelled: str | None = self._backend.id_to_token(token_id)
        return spelled

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation under the target's chat template, ready to be continued by the target."""
        plain = check_chat_messages(messages)
        template = self.chat_template
        if template is None:
            raise RequestError(
                "this target's tokenizer has no chat template, so messages cannot be turned into a prompt: "
                "give a raw text prompt, or add chat_template.jinja to the target's folder"
            )
        self._check_template_kwargs(template, template_kwargs)
        try:
            if self._auto is not None:
                ids = self._auto.apply_chat_template(
                    plain, add_generation_prompt=add_generation_prompt, tokenize=True, **template_kwargs
                )
                return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)
            text = self._render(template, plain, add_generation_prompt, template_kwargs)
        except Exception as error:  # a template is a program: it may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the target's chat template refuses these messages: {reason}") from error
        return self.encode(text, add_special_tokens=False)

    def _render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **kwargs},
        )
        texts, _ = rendered
        return str(texts[0])

    @staticmethod
    def _check_template_kwargs(template: str, kwargs: Mapping[str, Any]) -> None:
        words = set(re.findall(r"[A-Za-z_]\w*", template))
        for name in kwargs:
            if name not in words:
                raise RequestError(
                    f"template setting {name!r} has no effect: this target's chat template never mentions it"
                    + hint(name, words)
                )


def load_tokenizer(path: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a target's folder or GGUF: read by ``tokenizers`` alone where exact, else by transformers.

    Code that the folder brings runs only with trust_remote_code; nobody is asked at a prompt.
    """
    folder = Path(path)
    if folder.suffix == ".gguf" and folder.is_file():
        return _load_auto(folder.parent, trust_remote_code, gguf_file=folder.name)
    if not folder.is_dir():
        raise CheckpointError(f"no tokenizer at {folder}: expected a folder with tokenizer.json")
    return _load_plain(folder) or _load_auto(folder, trust_remote_code)


def _load_plain(folder: Path) -> Tokenizer | None:
    """The tokenizer without transformers' own loader, which costs seconds; None where that might differ."""
    settings = _read_json(folder / "tokenizer_config.json")
    legacy = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")
    if (
        settings.get("tokenizer_class") != "TokenizersBackend"
        or not _PLAIN_KEYS.issuperset(settings)
        or not (folder / "tokenizer.json").is_file()
        or any((folder / name).exists() for name in legacy)
    ):
        return None
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    special = {name: settings[name] for name in _NAMED_SPECIAL_TOKENS if settings.get(name) is not None}
    added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    template_file = folder / "chat_template.jinja"
    template = _read_text(template_file) if template_file.is_file() else settings.get("chat_template")
    is_plain = all(isinstance(token, str) and token in added for token in special.values())
    if not is_plain or backend.get_vocab_size() > _MAX_PLAIN_VOCAB or not isinstance(template, str | None):
        return None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend=backend, chat_template=template, special_tokens=special)


def _load_auto(folder: Path, trust_remote_code: bool, **file: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        auto: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **file
        )
    except Exception as error:  # transformers and tokenizers raise anything here, bare Exception included
        reason = " ".join(str(error).split())[:200].rstrip() or type(error).__name__
        found = "" if (folder / "tokenizer.json").is_file() else "there is no tokenizer.json; "
        raise CheckpointError(f"no usable tokenizer in {folder}: {found}{reason}") from error
    try:
        template = auto.get_chat_template()
    except ValueError:
        template = None
    return Tokenizer(
        backend=getattr(auto, "backend_tokenizer", None),
        auto=auto,
        chat_template=template,
        special_tokens=auto.special_tokens_map,
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{file} is not valid JSON: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content
