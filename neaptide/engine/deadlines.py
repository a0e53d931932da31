"""When tokens are due: the only place that says so, for one request and for rows of the request table alike.

``D_1 = arrival + TTFT``, and after it ``D_k = t_1 + (k - 1) * TPOT``, where ``t_1`` is the time of the first token.
"""

from typing import Any, overload

from neaptide.engine.arrays import FloatArray, IntArray


@overload
def first_token_due_s(arrival_s: float, ttft_slo_s: float) -> float: ...
@overload
def first_token_due_s(arrival_s: FloatArray, ttft_slo_s: FloatArray) -> FloatArray: ...
def first_token_due_s(arrival_s: Any, ttft_slo_s: Any) -> Any:
    """Deadline of the first token, in the engine clock's seconds."""
    return arrival_s + ttft_slo_s


@overload
def later_token_due_s(first_token_s: float, num_output: int, tpot_slo_s: float, put_off_s: float) -> float: ...
@overload
def later_token_due_s(
    first_token_s: FloatArray, num_output: IntArray, tpot_slo_s: FloatArray, put_off_s: FloatArray
) -> FloatArray: ...
def later_token_due_s(first_token_s: Any, num_output: Any, tpot_slo_s: Any, put_off_s: Any) -> Any:
    """Deadline of the token after ``num_output`` others, at least one.

    ``put_off_s`` is the time for which the server has put the request off: its deadlines move by as much.
    """
    return first_token_s + num_output * tpot_slo_s + put_off_s
