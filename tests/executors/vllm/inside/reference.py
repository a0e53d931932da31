"""What vLLM's own ``LLM`` answers, in a process of its own.

    python reference.py MODEL DTYPE NUM_TOKENS OUT < PROMPTS

For each prompt the tokens, and for each token by how much it was better than the next.
"""

import json
import os
import sys

from tests.executors.vllm.inside import second_runner


def main() -> None:
    model, dtype, num_tokens, out = sys.argv[1:]
    if second_runner.is_wanted():
        second_runner.pretend_a_back_end()
        second_runner.stand_in_for_kernels()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
        tensor_parallel_size=int(os.environ.get("NEAPTIDE_TEST_RANKS", "1")),
    )
    asked = [{"prompt_token_ids": prompt} for prompt in json.load(sys.stdin)]
    params = SamplingParams(temperature=0.0, max_tokens=int(num_tokens), ignore_eos=True, detokenize=False, logprobs=2)
    found = []
    for answer in llm.generate(asked, params, use_tqdm=False):
        (text,) = answer.outputs
        best = [sorted((entry.logprob for entry in entries.values()), reverse=True) for entries in text.logprobs]
        found.append({"tokens": list(text.token_ids), "gaps": [first - second for first, second, *_ in best]})
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
