"""Cost features of a step."""

from neaptide.engine.steps.plan import BatchShape


def test_a_decode_reads_its_context_and_itself() -> None:
    shape = BatchShape()
    shape.add(1, 40)
    assert shape == BatchShape(
        decode_requests=1, decode_context_tokens=41, max_context_tokens=41, longest_decode_tokens=41
    )


def test_a_first_chunk_attends_to_itself_alone() -> None:
    shape = BatchShape()
    shape.add(5, 0)
    assert shape == BatchShape(prefill_tokens=5, prefill_attention_pairs=15, prefill_requests=1, max_context_tokens=5)


def test_a_chunk_behind_context_also_reads_that_and_may_compute_the_masked_half() -> None:
    shape = BatchShape()
    shape.add(5, 30)
    assert shape == BatchShape(
        prefill_tokens=5,
        prefill_attention_pairs=5 * 30 + 15,
        prefill_masked_pairs=10,
        prefill_context_tokens=30,
        prefill_requests=1,
        max_context_tokens=35,
    )


def test_a_copy_has_every_feature_and_is_apart() -> None:
    shape = BatchShape(*range(1, 1 + len(BatchShape.__slots__)))
    copy = shape.copy()
    assert copy == shape
    copy.add(3, 4)
    assert shape == BatchShape(*range(1, 1 + len(BatchShape.__slots__)))
