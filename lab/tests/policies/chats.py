"""Chats for the tests of policies."""

from tests.engine.harness import Harness, online


def add_chat(
    harness: Harness, request_id: str, num_tokens: int, ttft: float, max_tokens: int = 2, **fields: float
) -> None:
    """Adds a chat that arrives now. Prompts of names of different lengths share no prefix."""
    prompt = [7 + len(request_id)] * num_tokens
    harness.core.handle(
        online(request_id, prompt, max_tokens, arrival_s=harness.clock.now(), ttft_slo_s=ttft, **fields)
    )
