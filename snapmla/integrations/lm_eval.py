"""lm-evaluation-harness on MLA models of Transformers that decode on a paged latent cache.

    python -m snapmla.integrations.lm_eval run --model snapmla \\
        --model_args pretrained=/models/DeepSeek-V2-Lite,variant=snapmla --tasks gsm8k

The command is the harness's own, with one more kind of model. A context is prefilled as usual and cached in `variant`'s
format; what is scored or generated behind it goes through the decode kernel on a Hopper GPU, its emulation elsewhere.
Wants the extra `benchmarks`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from transformers import PreTrainedModel, StoppingCriteriaList

from snapmla.integrations import transformers as hf
from snapmla.integrations.transformers_cache import PagedLatents
from snapmla.quantization import SNAPMLA

BYTES = 256
"""Vocabulary of a model that reads bytes."""


@register_model("snapmla")
class SnapMLA(TemplateLM):
    """A local checkpoint, or a loaded model, that decodes on `variant`'s cache ("snapmla", "bf16", "config_a" … "config_d").

    A model without a tokenizer reads bytes: its texts are decoded as Latin-1, a character for each byte. device: "auto"
    is a GPU where there is one. The model stays enabled (`snapmla.integrations.transformers.enable`) until `close`.

    Raises as `integrations.transformers.load` and `enable` do, and ValueError for a missing tokenizer.
    """

    def __init__(
        self,
        pretrained: str | Path | PreTrainedModel,
        variant: str = SNAPMLA.name,
        device: str | None = "auto",
        max_gen_toks: int = 256,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, PreTrainedModel):
            self.model = pretrained
        else:
            if device in (None, "auto"):
                device = "cuda" if torch.cuda.is_available() else "cpu"
            self.model = hf.load(pretrained, "auto" if device == "cpu" else torch.bfloat16).to(device)
            self.tokenizer = hf.load_tokenizer(pretrained)
        if self.tokenizer is None and self.model.config.vocab_size != BYTES:
            raise ValueError(
                f"pretrained must have a tokenizer beside its {self.model.config.vocab_size} tokens, got none."
            )
        self.variant, self.max_gen_toks = variant, max_gen_toks
        self._layers = len(hf.attention_layers(self.model))
        self._enabled = hf.enable(self.model, variant)

    def close(self) -> None:
        self._enabled.disable()

    @property
    def eot_token_id(self) -> int:
        return ord("\n") if self.tokenizer is None else self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return "bytes" if self.tokenizer is None else self.tokenizer.name_or_path

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        if self.tokenizer is None:
            return list(string.encode("latin-1"))
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def tok_decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("latin-1") if self.tokenizer is None else self.tokenizer.decode(tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation behind its context, and whether greedy decoding would write it."""
        return [self._score(context, continuation) for _, context, continuation in requests]

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        cache = PagedLatents(self._layers, self.variant, len(context) + len(continuation))
        logits = torch.cat(list(hf.forced(self.model, cache, [context], [continuation])), 1)[0]
        scores, target = logits.float().log_softmax(-1), torch.tensor(continuation, device=logits.device)
        return scores.gather(1, target[:, None]).sum().item(), torch.equal(scores.argmax(-1), target)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, each behind one end-of-text token."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [self._score([self.prefix_token_id], text)[0] for text in texts]

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, or sampled ones where a request asks for it, up to one of its `until`."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict) -> str:
        settings = dict(settings)
        until = settings.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        ids = torch.tensor([self.tok_encode(context)], device=self.model.device)

        def ended(tokens: torch.Tensor, _scores: object, **kwargs) -> torch.Tensor:
            text = self.tok_decode(tokens[0, ids.shape[1] :].tolist())
            return torch.tensor([any(stop in text for stop in until)], device=tokens.device)

        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=settings.pop("max_gen_toks", self.max_gen_toks),
            do_sample=settings.pop("do_sample", False),
            pad_token_id=self.eot_token_id,
            stopping_criteria=StoppingCriteriaList([ended]),
            **({"temperature": t} if (t := settings.get("temperature")) else {}),
        )
        text = self.tok_decode(found[0, ids.shape[1] :].tolist())
        for stop in until:
            text = text.split(stop)[0]
        return text


if __name__ == "__main__":
    cli_evaluate()
