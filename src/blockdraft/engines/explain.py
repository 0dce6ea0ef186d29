"""Why a draft that should accept much accepts little: likely causes, the likeliest first, each with what to do.

Speculation never changes the text, so nothing else shows that one of these is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.engines.confirm import Finding
from blockdraft.engines.measure import Acceptance
from blockdraft.engines.setting import Setting

_NOTHING = 0.05  # share of the proposals: below, the draft reads noise rather than the wrong text


@dataclass(frozen=True, slots=True)
class Cause:
    """A name that tests and readers can hold on to, why it is suspected here, and what to do about it."""

    name: str
    why: str
    remedy: str


def likely_causes(
    setting: Setting, acceptance: Acceptance, findings: Sequence[Finding], rules: Sequence[Mapping[str, Any]]
) -> list[Cause]:
    """Every cause that this pair allows. `rules`: what `inspect` says of this engine and draft."""
    share = acceptance.num_accepted / max(acceptance.num_steps * setting.num_proposals, 1)
    causes = [*_said(findings), *_known(rules), *_stream(setting)]
    layout = [*_taps(setting, findings), *_mask(setting, findings)]
    use = [*_width(setting), *_window(setting), *_head(setting), *_template(setting)]
    return causes + (layout + use if share < _NOTHING else use + layout)


def _said(findings: Sequence[Finding]) -> Iterator[Cause]:
    for finding in findings:
        if finding.is_right is False:
            yield Cause(finding.what, finding.text, "start it as the draft's file says, or file this with the engine")


def _known(rules: Sequence[Mapping[str, Any]]) -> Iterator[Cause]:
    for rule in rules:
        if rule["level"] == "lower_acceptance":
            yield Cause(rule["name"], rule["text"], f"see {rule['source']}")


def _stream(setting: Setting) -> Iterator[Cause]:
    if setting.is_kimi_k3:
        stated = setting.tap_stream or "undeclared"
        yield Cause(
            "tap stream",
            f"Kimi K3 has two streams to tap, the one of this draft is {stated}",
            "try the other: --tap-stream prefix or --tap-stream attn_res",
        )


def _taps(setting: Setting, findings: Sequence[Finding]) -> Iterator[Cause]:
    if any(finding.what == "taps" and finding.is_right for finding in findings):
        return
    taps = " ".join(map(str, setting.draft.config.target_layer_ids))
    yield Cause(
        "shifted taps",
        f"almost nothing is accepted, and nobody confirmed the layers {taps}",
        "compare with `blockdraft generate` on the same pair; engines count layers from 0 or from 1",
    )


def _mask(setting: Setting, findings: Sequence[Finding]) -> Iterator[Cause]:
    if any(finding.what == "mask" and finding.is_right for finding in findings):
        return
    yield Cause(
        "mask",
        f"nobody confirmed the mask id {setting.draft.config.mask_token_id}",
        "look for its row in the target's embedding: `blockdraft inspect DRAFT --target T`",
    )


def _width(setting: Setting) -> Iterator[Cause]:
    config = setting.draft.config
    if setting.is_narrowed and not all(layer.is_causal for layer in config.layers):
        yield Cause(
            "width",
            f"width {setting.width} of {config.max_width}: rows of this block see each other, a narrower one computes "
            "something else",
            f"serve it at {config.max_width}",
        )


def _window(setting: Setting) -> Iterator[Cause]:
    window = setting.draft.config.max_window
    if setting.draft_window is not None and (window is None or setting.draft_window < window):
        yield Cause(
            "window",
            f"the draft sees {setting.draft_window} positions, it was trained with {window or 'all of them'}",
            "leave --draft-window out, or widen it",
        )
    elif setting.draft.has_windows:
        yield Cause(
            "window",
            "sliding layers: engines differ in whether they slide, and whether they are causal in the block",
            "compare short prompts, within the window, with long ones",
        )


def _head(setting: Setting) -> Iterator[Cause]:
    if setting.is_target_quantised:
        yield Cause(
            "quantised head",
            "the target is quantised: the draft borrows its head and reads its hidden states",
            "check that lm_head and embedding are left in bf16, and measure against the bf16 target",
        )


def _template(setting: Setting) -> Iterator[Cause]:
    yield Cause(
        "template",
        "drafts trained on raw text, or with thinking on or off, accept little of the other kind",
        "ask with the template and the thinking switch that the draft's card names",
    )
