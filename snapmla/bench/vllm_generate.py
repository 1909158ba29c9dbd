"""Greedy generation in vLLM's offline engine; a program of its own, for a Python that has vLLM.

    python -m snapmla.bench.vllm_generate < run.json       # a `serving.GenerateRun`

CUDA graphs, prefix caching and chunked prefill are on. Answers three times, each with the seconds since its start: the cache's size;
each prompt's tokens; and of a long decode its steps and the memory that torch holds early and late.
"""

from __future__ import annotations

import json
import sys
import time

from snapmla.bench.engine import answer
from snapmla.bench.serving import GenerateRun


def long_decode(engine, prompts: list[list[int]], tokens: int) -> tuple[int, int, int]:
    """Bytes that torch has allocated on the GPU after a quarter of so many tokens of each prompt, and after all of them; and
    the engine's steps."""
    import torch
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"long-{i}", TokensPrompt(prompt_token_ids=prompt), params)
    early = late = made = steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            made = max(made, len(output.outputs[0].token_ids))
        if not early and made >= tokens // 4:
            early = torch.cuda.memory_allocated()
        if made < tokens:
            late = torch.cuda.memory_allocated()
    return early, late, steps


def main() -> None:
    run = GenerateRun(**json.load(sys.stdin))
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt

    drafts = None
    if run.speculative_tokens:  # vLLM would select another backend, with another cache, for the module's layer
        drafts = {"method": "mtp", "num_speculative_tokens": run.speculative_tokens, "attention_backend": run.backend}
    llm = LLM(
        model=run.model,
        skip_tokenizer_init=True,
        attention_backend=run.backend,
        max_model_len=run.max_model_len,
        max_num_seqs=len(run.prompts),
        max_num_batched_tokens=run.max_num_batched_tokens,
        gpu_memory_utilization=run.gpu_memory_utilization,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        compilation_config=run.compilation_config,
        speculative_config=drafts,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    answer(vllm=__version__, kv_tokens=cache.num_gpu_blocks * cache.block_size, at_s=round(time.perf_counter() - begin, 1))
    params = SamplingParams(max_tokens=run.max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in run.prompts]
    done = llm.generate(given, params, use_tqdm=False)
    answer(
        tokens=[list(output.outputs[0].token_ids) for output in done],
        cached_tokens=sum(output.num_cached_tokens or 0 for output in done),
        at_s=round(time.perf_counter() - begin, 1),
    )
    early, late, steps = long_decode(llm.llm_engine, [prompt[:64] for prompt in run.prompts[:8]], run.long_steps)
    answer(early_bytes=early, late_bytes=late, tokens_per_step=run.long_steps / steps, at_s=round(time.perf_counter() - begin, 1))


if __name__ == "__main__":
    main()
