"""DFlash 2 drafts in vLLM's model runner V1: the candidate walk that this runner leaves out.

vLLM 0.32 has the whole draft network, on the CPU too, but walks the candidates in runner V2 alone, which needs Triton.
Runner V1 would take each position's likeliest token, so vLLM refuses such drafts there. This plugin lifts the refusal
and walks: position by position the best successor of the token before, by the sum of its logit and its edge. The walk
is greedy at every temperature; no draft probabilities are handed on, so proposals are checked as certain ones, which
keeps sampled text exact. vLLM loads it by its entry point in vllm.general_plugins; it imports nothing before that.
"""

# Shapes: R requests, K proposals of each, M candidates of a position, D width of the draft.
from __future__ import annotations

from typing import Any

__all__ = ["register", "walk"]

READ_AT = "0.32"  # the release whose internals are used below
_REFUSED = "DFlash candidate-head drafts"
_MARK = "_walks_candidates"


def register() -> None:
    """Teach this process's vLLM to walk; a second call does nothing. Another release than 0.32 is left alone."""
    import vllm
    from vllm.config import VllmConfig
    from vllm.logger import init_logger
    from vllm.v1.spec_decode.dflash import DFlashProposer

    if not vllm.__version__.startswith(f"{READ_AT}."):
        init_logger("vllm.blockdraft").warning(
            "blockdraft-vllm is made for vLLM %s and leaves %s as it is", READ_AT, vllm.__version__
        )
    elif not getattr(DFlashProposer, _MARK, False):
        _lift_refusal(VllmConfig)
        _add_walk(DFlashProposer)
        setattr(DFlashProposer, _MARK, True)


def _lift_refusal(config_class: Any) -> None:
    """Take DFlash 2 out of what runner V1 refuses. LiLiCorr drafts, refused by the same words, stay refused."""
    before = config_class._get_v1_model_runner_unsupported_features

    def unsupported(config: Any) -> list[str]:
        found: list[str] = before(config)
        kinds = config.speculative_config.draft_model_config.architectures if _REFUSED in found else []
        return [word for word in found if word != _REFUSED] if "DFlash2DraftModel" in kinds else found

    config_class._get_v1_model_runner_unsupported_features = unsupported


def _add_walk(proposer_class: Any) -> None:
    """Let the proposer keep the anchors of a step, and choose by walking where the draft has candidates."""
    inputs, choose = proposer_class.set_inputs_first_pass, proposer_class._sample_draft_tokens

    def set_inputs_first_pass(self: Any, *args: Any, next_token_ids: Any, **kwargs: Any) -> Any:
        self._anchor_ids = next_token_ids
        return inputs(self, *args, next_token_ids=next_token_ids, **kwargs)

    def _sample_draft_tokens(self: Any, hidden_states: Any, sampling_metadata: Any) -> tuple[Any, Any]:
        if not hasattr(self.model, "compute_candidates"):
            return choose(self, hidden_states, sampling_metadata)
        count = self.num_speculative_tokens
        ids, logits = self.model.compute_candidates(hidden_states)  # [R*K, M] each
        selector = self.model.model.candidate_selector
        edges = selector(
            ids.view(-1, count, selector.top_k),
            logits.view(-1, count, selector.top_k),
            hidden_states.view(-1, count, hidden_states.shape[-1]),
            self._anchor_ids,
        )
        return walk(ids.view(-1, count, selector.top_k), edges).flatten(), None

    proposer_class.set_inputs_first_pass = set_inputs_first_pass
    proposer_class._sample_draft_tokens = _sample_draft_tokens


def walk(candidate_ids_RKM: Any, edges_RKMM: Any) -> Any:
    """The ids of the greedy walk, [R, K]. An edge is that of a candidate after each candidate of the position before;
    at the first position the rows of all predecessors are the anchor's."""
    import torch

    rows = torch.arange(candidate_ids_RKM.shape[0], device=candidate_ids_RKM.device)
    place = torch.zeros_like(rows)
    chosen = []
    for position in range(candidate_ids_RKM.shape[1]):
        place = edges_RKMM[rows, position, place].float().argmax(dim=-1)
        chosen.append(candidate_ids_RKM[rows, position, place])
    return torch.stack(chosen, dim=1)
