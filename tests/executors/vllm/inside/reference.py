"""What vLLM's own ``LLM`` answers, in a process of its own: ``python reference.py MODEL NUM_TOKENS OUT < PROMPTS``."""

import json
import os
import sys


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
        tensor_parallel_size=int(os.environ.get("NEAPTIDE_TEST_RANKS", "1")),
    )
    asked = [{"prompt_token_ids": prompt} for prompt in json.load(sys.stdin)]
    params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True, detokenize=False)
    answers = llm.generate(asked, params, use_tqdm=False)
    texts = [list(answer.outputs[0].token_ids) for answer in answers]
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        json.dump(texts, file)


if __name__ == "__main__":
    main()
